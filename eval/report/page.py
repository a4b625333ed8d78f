"""report.html: the report as a page to read, with the recommendation first, charts, and causes of what is slow."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from ...base.files import write_text
from ..measurement.result import Result
from . import acceptance_sections, sections
from .causes.diagnosis import UNEXPLAINED, diagnose
from .causes.findings import Case
from .conclusion import Conclusion, Table
from .recommendation import best_deployable, conclude
from .results.document import Report, short_name
from .results.one_result import grouped, label, name_of, speedup_words
from .sections import cell

MOST_DIVERGENCES = 20  # shown; report.json has all


@cache
def page_template(name: str) -> Template:
    """A template of `templates`. It escapes all that it is given but charts."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def write_page(folder: str | Path, report: Report, conclusion: Conclusion | None = None) -> Path:
    """Write report.html beside report.json."""
    return write_text(Path(folder) / "report.html", render(report, conclusion))


def render(report: Report, conclusion: Conclusion | None = None) -> str:
    """The page of a report. No script is in it, and nothing is fetched. Args: conclusion: default: `conclude`."""
    ours = report.results
    shown = [
        sections.settings_section(ours),
        sections.pairs_section(ours),
        acceptance_sections.acceptance_section(ours),
        acceptance_sections.domains_section(ours),
        sections.failed_section(ours),
        sections.time_section(ours),
        acceptance_sections.confidence_section(ours),
        sections.environment_section(report),
    ]
    return page_template("report.html.j2").render(
        target=replace(report.target, name=short_name(report.target.name)),
        environment=report.environment,
        conclusion=conclusion or conclude(ours),
        where=where_table(ours),
        divergences=divergences(ours),
        findings=findings_by_cause(report),
        speed=sections.speed_section(ours),
        sections=[section for section in shown if section.tables or section.figures],
    )


def where_table(ours: Sequence[Result]) -> Table | None:
    """The best setting for each kind of traffic; None if there is only one kind."""
    rows = []
    for (suite, size), results in grouped(ours, lambda result: (result.suite, result.batch_size)).items():
        best = best_deployable(results, among=len(ours))
        setting, speedup = (name_of(best), speedup_words(best)) if best else ("no drafts", "-")
        rows.append([suite, setting, str(size), speedup])
    columns = ["traffic", "what to run", "requests at a time", "speedup [95 %]"]
    return Table("What pays where", columns, rows, num_labels=2) if len(rows) > 1 else None


def divergences(ours: Sequence[Result]) -> Table | None:
    """Texts that differ from the target's own by more than rounding."""
    rows = [
        [label(result), result.suite, cell(text.prompt), cell(text.position), cell(text.unproved)]
        for result in ours
        for text in result.lossless.divergences
        if not text.is_proved
    ]
    columns = ["setting", "suite", "prompt", "differs from", "not proved from"]
    caption = f"Unexplained differences, {min(len(rows), MOST_DIVERGENCES)} of {len(rows)}"
    return Table(caption, columns, rows[:MOST_DIVERGENCES], num_labels=2) if rows else None


def findings_by_cause(report: Report) -> dict[tuple[str, str], dict[str, str]]:
    """By cause and advice: the figures, by the settings that have them. What is recommended is not said to have a low
    acceptance without a cause."""
    causes: dict[tuple[str, str], dict[str, list[Result]]] = {}
    advised = best_deployable(report.results)
    for result in report.results:
        for finding in diagnose(Case(result, report.results, report.target)):
            if result is advised and finding.cause == UNEXPLAINED:
                continue
            same_cause = causes.setdefault((finding.cause, finding.advice), {})
            same_cause.setdefault(finding.figures, []).append(result)
    several = len({result.suite for result in report.results}) > 1
    return {
        cause: {settings_words(results, with_suite=several): figures for figures, results in same_cause.items()}
        for cause, same_cause in causes.items()
    }


def settings_words(results: Sequence[Result], *, with_suite: bool) -> str:
    """Several settings in a few words: batch sizes of one drafter and suite together."""
    names = grouped(results, lambda result: name_of(result) + (f", {result.suite}" if with_suite else ""))
    sizes = {name: " and ".join(str(result.batch_size) for result in same) for name, same in names.items()}
    return "; ".join(name if size == "1" else f"{name}, {size} at a time" for name, size in sizes.items())
