"""report.html: the report as one page to read, with the verdict first, charts, and causes of what is slow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..measurement.lossless import MAX_ULPS
from . import domains as report_domains
from . import sections as report_sections
from .diagnosis import diagnose
from .document import write_whole
from .page_parts import Table, page_template, short_name
from .recommendation import Result, best_of, label, lossless_evidence, speedup_words, verdict
from .sections import words

MOST_DIVERGENCES = 20  # shown; report.json has all


def write_page(folder: str | Path, report: dict[str, Any]) -> Path:
    """Write report.html beside report.json, whole or not at all."""
    return write_whole(Path(folder) / "report.html", render(report))


def render(report: dict[str, Any]) -> str:
    """The page of a report as docs/report_schema.md describes it: no script, and nothing fetched."""
    results: list[Result] = report["results"]
    ours = [{**entry, "target": report["target"]} for entry in results if entry["engine"] == "headstart"]
    sections = [
        report_sections.settings_section(results),
        report_sections.acceptance_section(ours),
        report_domains.domains_section(ours),
        report_domains.failed_section(results),
        report_sections.time_section(ours),
        report_sections.trees_section(ours),
        report_sections.forced_section(ours),
        report_sections.conventions_section(ours),
        report_sections.comparison_section(results),
        report_sections.environment_section(report),
    ]
    return page_template("report.html.j2").render(
        target={**report["target"], "name": short_name(report["target"]["name"])},
        environment=report["environment"],
        verdict=verdict(results),
        evidence=lossless_evidence(results),
        where=where_table(ours),
        divergences=divergences(ours),
        findings=findings(ours),
        speed=report_sections.speed_section(ours),
        sections=[one for one in sections if one.tables or one.figures],
    )


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


def findings(ours: Sequence[Result]) -> dict[tuple[str, str], dict[str, str]]:
    """By cause and advice: of which settings, as settings to figures."""
    causes: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for entry in ours:
        for found in diagnose(entry, ours):
            causes.setdefault((found.cause, found.advice), {}).setdefault(found.words, []).append(entry)
    several = len({entry["suite"] for entry in ours}) > 1
    return {
        cause: {whose(entries, with_suite=several): what for what, entries in found.items()}
        for cause, found in causes.items()
    }


def whose(entries: Sequence[Result], *, with_suite: bool) -> str:
    """Several settings in a few words: batch sizes of one drafter and suite together."""
    sizes: dict[str, list[str]] = {}
    for entry in entries:
        name = label(entry, with_batch=False) + (f", {entry['suite']}" if with_suite else "")
        sizes.setdefault(name, []).append(str(entry["batch_size"]))
    return "; ".join(f"{name}, batch {' and '.join(found)}" for name, found in sizes.items())
