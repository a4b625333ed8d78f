"""The HTML page of an unattended run: the decision, its reasons, and the evidence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...configs.files import write_text
from ...eval.report.one_result import number
from ...eval.report.page import page_template
from ...eval.report.sections import Table, cell
from .clock import clock_text
from .steps import StepRecord

Part = tuple[str, str, Table]  # a section of the page: title, text and table


class Decision(Protocol):
    """The result of a run."""

    @property
    def deploy(self) -> bool: ...
    @property
    def headline(self) -> str: ...
    @property
    def reasons(self) -> list[str]: ...
    @property
    def cautions(self) -> list[str]: ...
    @property
    def commands(self) -> list[str]:
        """Command lines with which to carry out the decision."""
        ...


def write_page(
    path: Path,
    *,
    decision: Decision,
    heading: str,
    figure: tuple[str, str],
    report: str,
    parts: Sequence[Part | None],
    guide: str,
) -> Path:
    """Renders decision.html.j2 into `path`; returns the path.

    Args:
        figure: the main figure with its interval, and a caption; an empty figure is left out.
        report: link to the report of an evaluation, relative to the page; empty: none.
        parts: sections; None is left out.
        guide: page of the documentation that explains the figures.
    """
    page = page_template("decision.html.j2", Path(__file__).parent).render(
        decision=decision,
        heading=heading,
        figure=figure,
        report=report,
        parts=[part for part in parts if part],
        journal=path.with_suffix(".json").name,
        guide=guide,
    )
    return write_text(path, page)


def interval_text(ratio: float | None, interval: Sequence[float | None]) -> str:
    """A ratio with its confidence interval, such as `1.92 [1.81, 2.03]`; empty if the ratio is None."""
    return "" if ratio is None else f"{number(ratio)} [{number(interval[0])}, {number(interval[1])}]"


def steps_part(steps: Sequence[StepRecord]) -> Part:
    """A section with the commands that were run."""
    rows = [[step.command, clock_text(step.seconds), cell(step.exit_code)] for step in steps]
    table = Table("Commands", ["command", "time", "exit"], rows)
    return "How to repeat it", "Each step is an ordinary command; its output is in logs/.", table
