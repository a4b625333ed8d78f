"""compare.html: heads or runs side by side on one page: who is ahead, where, whether that is proved, and the curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import sections as report_sections
from .charts import Curve, curve_chart, thinned
from .comparison import Evaluation, headline, standings, unlike
from .document import number, write_whole
from .page_parts import Figure, Section, Table, page_template
from .sections import words

FIGURES = ("steps", "loss", "best_acceptance_length", "best_step", "last_acceptance_length")
FIGURES = (*FIGURES, "decoded_acceptance_length", "tokens_per_second")


@dataclass(frozen=True)
class TrainingRun:
    """name: short. figures: as `headstart compare` prints them. differs: settings that not all runs share. losses,
    taught, decoded: (step, value), of the logged steps and of the validations."""

    name: str
    figures: dict[str, Any]
    differs: dict[str, Any]
    losses: Sequence[tuple[float, float]]
    taught: Sequence[tuple[float, float]]
    decoded: Sequence[tuple[float, float]]


def write_page(folder: Path, evaluations: Sequence[Evaluation], runs: Sequence[TrainingRun]) -> Path:
    """Write compare.html, whole or not at all."""
    return write_whole(folder / "compare.html", render(evaluations, runs))


def render(evaluations: Sequence[Evaluation], runs: Sequence[TrainingRun]) -> str:
    """The page: no script, and nothing fetched."""
    results = [entry for one in evaluations for entry in one.results]
    found = standings(evaluations)
    sections = runs_sections(runs) if runs else []
    if results:
        sections += [
            report_sections.speed_section(results),
            report_sections.acceptance_section(results),
            report_sections.time_section(results),
            report_sections.settings_section(results),
            report_sections.conventions_section(results),
            surroundings_section(evaluations),
        ]
    return page_template("compare.html.j2").render(
        names=[one.name for one in (*evaluations, *runs)],
        headline=headline(found) if results else runs_headline(runs),
        is_proved=bool(results) and len({one.winner for one in found}) == 1 and found[0].winner is not None,
        standings=found,
        unlike=unlike(evaluations),
        sections=[one for one in sections if one.tables or one.figures],
    )


def runs_headline(runs: Sequence[TrainingRun]) -> str:
    """The run with the best validation; one seed each proves little, which the page says below."""
    known = [run for run in runs if run.figures["best_acceptance_length"]]
    if not known:
        return f"{len(runs)} runs, none validated"
    best = max(known, key=lambda run: run.figures["best_acceptance_length"])
    return f"{best.name} reached the best validation, {best.figures['best_acceptance_length']:.2f} tokens per forward"


def runs_sections(runs: Sequence[TrainingRun]) -> list[Section]:
    """What came of the runs, how they got there, and what differs between them."""
    text = (
        "Seeds alone move these figures: compare several of each before a difference counts. Taught: the rows' texts, "
        "with teacher-forced drafts; decoded: real greedy decoding behind their first prompts."
    )
    rows = [[run.name, *(shown(run.figures[key]) for key in FIGURES)] for run in runs]
    table = Table("What came of each run", ["run", *(key.replace("_", " ") for key in FIGURES)], rows)
    keys = list(dict.fromkeys(key for run in runs for key in run.differs))
    differs = Table(
        "Settings that differ",
        ["setting", *(run.name for run in runs)],
        [[key, *(words(run.differs.get(key)) for run in runs)] for key in keys],
        num_labels=len(runs) + 1,
    )
    size = -(-max(len(run.losses) for run in runs) // 120)
    curves = {
        f"Loss over optimizer steps{f'; a point is the mean of {size} logged steps' if size > 1 else ''}.": [
            Curve(run.name, thinned(run.losses)) for run in runs
        ],
        "Acceptance length of validations, taught.": [Curve(run.name, run.taught) for run in runs if run.taught],
        "Acceptance length of validations, decoded.": [Curve(run.name, run.decoded) for run in runs if run.decoded],
    }
    figures = [
        Figure(caption, curve_chart(caption, found, axis="optimizer step", with_dots=number > 0))
        for number, (caption, found) in enumerate(curves.items())
        if any(len(curve.points) > 1 for curve in found)  # one validation each is in the table
    ]
    return [Section("runs", "Training runs", [text], figures, [table, *([differs] if keys else [])])]


def shown(value: float | None) -> str:
    """A figure of a run: lengths and losses with two decimals, steps and rates whole."""
    return number(value) if isinstance(value, float) and value < 100 else words(None if value is None else round(value))


def surroundings_section(evaluations: Sequence[Evaluation]) -> Section:
    """Target and environment of each, side by side."""
    tables = []
    for caption, part in (("Target", "target"), ("Environment", "environment")):
        keys = list(dict.fromkeys(key for one in evaluations for key in one.report[part]))
        rows = [[key.replace("_", " "), *(words(one.report[part].get(key)) for one in evaluations)] for key in keys]
        columns = ["key", *(one.name for one in evaluations)]
        tables.append(Table(caption, columns, rows, num_labels=len(columns)))
    return Section("environment", "Where this was measured", [], [], tables)
