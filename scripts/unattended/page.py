"""The page of an unattended run: what to do, why, and how that was found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...configs.files import write_text
from ...eval.report.one_result import number
from ...eval.report.page import page_template
from ...eval.report.sections import Table, cell
from .clock import clock_words
from .steps import StepRecord

Part = tuple[str, str, Table]  # title, text and table


class Decision(Protocol):
    """What to do. commands: that are to be run then."""

    @property
    def deploy(self) -> bool: ...
    @property
    def headline(self) -> str: ...
    @property
    def reasons(self) -> list[str]: ...
    @property
    def cautions(self) -> list[str]: ...
    @property
    def commands(self) -> list[str]: ...


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
    """Args: figure: a ratio with its interval, and what it is of; empty where there is none. guide: page of docs."""
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


def figure_of(ratio: float | None, interval: Sequence[float | None]) -> str:
    """`1.92 [1.81, 2.03]`; empty where there is none."""
    return "" if ratio is None else f"{number(ratio)} [{number(interval[0])}, {number(interval[1])}]"


def steps_part(steps: Sequence[StepRecord]) -> Part:
    """The commands, to be repeated by hand."""
    rows = [[step.command, clock_words(step.seconds), cell(step.exit_code)] for step in steps]
    table = Table("Commands", ["command", "time", "exit"], rows)
    return "How to repeat it", "Each step is an ordinary command; its output is in logs/.", table
