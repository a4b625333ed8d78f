"""report.html: the report as one page to read, with the verdict first, charts, and causes of what is slow."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from . import report_sections
from .diagnosis import Finding, diagnose
from .lossless import MAX_ULPS
from .report import write_whole
from .report_sections import Table, words
from .verdict import Result, best_of, label, lossless_evidence, speedup_words, verdict

MOST_DIVERGENCES = 20  # shown; report.json has all


def write_page(folder: str | Path, report: dict[str, Any]) -> Path:
    """Write report.html beside report.json, whole or not at all."""
    return write_whole(Path(folder) / "report.html", render(report))


def render(report: dict[str, Any]) -> str:
    """The page of a report as docs/report_schema.md describes it: no script, and nothing fetched."""
    results: list[Result] = report["results"]
    ours = [entry for entry in results if entry["engine"] == "headstart"]
    sections = [
        report_sections.settings_section(results),
        report_sections.speed_section(ours),
        report_sections.acceptance_section(ours),
        report_sections.time_section(ours),
        report_sections.trees_section(ours),
        report_sections.forced_section(ours),
        report_sections.conventions_section(ours),
        report_sections.comparison_section(results),
        report_sections.environment_section(report),
    ]
    return page_template().render(
        target=report["target"],
        environment=report["environment"],
        verdict=verdict(results),
        evidence=lossless_evidence(results),
        where=where_table(ours),
        divergences=divergences(ours),
        findings=findings(ours),
        sections=[one for one in sections if one.tables or one.figures],
    )


@cache
def page_template() -> Any:
    """The template, which escapes all that it is given but charts."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))


def where_table(ours: Sequence[Result]) -> Table | None:
    """What pays for which traffic; None where there is only one kind."""
    kinds = list(dict.fromkeys((entry["suite"], entry["batch_size"]) for entry in ours))
    rows = []
    for suite, size in kinds:
        there = [entry for entry in ours if (entry["suite"], entry["batch_size"]) == (suite, size)]
        best = best_of(there)
        what = (label(best, with_batch=False), speedup_words(best)) if best else ("no drafts", "-")
        rows.append([suite, what[0], str(size), what[1]])
    columns = ["suite", "what to run", "batch", "speedup [95 %]"]
    return Table("What pays where", columns, rows, num_labels=2) if len(kinds) > 1 else None


def divergences(ours: Sequence[Result]) -> Table | None:
    """Texts that differ from the target's own by more than rounding."""
    found = [
        [label(entry), entry["suite"], *(words(one[key]) for key in ("prompt", "position", "gap_ulp"))]
        for entry in ours
        for one in entry["lossless"]["divergences"]
        if one["gap_ulp"] is None or one["gap_ulp"] > MAX_ULPS
    ]
    columns = ["setting", "suite", "prompt", "position", "logit gap, ulp"]
    caption = f"Unexplained differences, {min(len(found), MOST_DIVERGENCES)} of {len(found)}"
    return Table(caption, columns, found[:MOST_DIVERGENCES], num_labels=2) if found else None


def findings(ours: Sequence[Result]) -> dict[str, list[tuple[str, str]]]:
    """By cause: what the figures say, and of which settings."""
    found: dict[Finding, list[str]] = {}
    for entry in ours:
        for finding in diagnose(entry, ours):
            found.setdefault(finding, []).append(f"{label(entry)}, {entry['suite']}")
    causes: dict[str, list[tuple[str, str]]] = {}
    for finding, whose in found.items():
        causes.setdefault(finding.cause, []).append(("; ".join(whose), finding.words))
    return causes
