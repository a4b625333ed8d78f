"""compare.html: heads or runs side by side: which is ahead, where, whether that is proved, and the curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.files import write_text
from .acceptance_sections import acceptance_section, conventions_section
from .charts import WIDTH, Series, line_chart, thinned
from .comparison import NamedReport, headline, standings, unlike
from .one_result import number
from .page import page_template
from .sections import Figure, Section, cell, environment_section, settings_section, speed_section, time_section

MOST_POINTS = 120  # of a curve
RUN_COLUMNS = ("steps", "loss", "tokens/s", "best", "at", "last", "decoded", "after twice the steps")


@dataclass(frozen=True)
class TrainingRun:
    """A run folder as read."""

    name: str  # short
    folder: str
    finished: bool
    settings: dict[str, Any]  # its config, keys joined by dots
    tokens_per_second: float
    losses: Sequence[tuple[int, float]]  # (step, loss) of the logged steps
    taught: Sequence[tuple[int, float]]  # (step, acceptance length) of validations, teacher-forced
    decoded: Sequence[tuple[int, float]]  # the same, of validations that also decoded
    # forecast of the taught acceptance length after twice the steps, with an 80 % interval; None: no validation
    after_twice: tuple[float, float, float] | None

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and acceptance length of the best validation."""
        return max(self.taught, key=lambda point: (point[1], point[0]), default=None)

    def to_json(self) -> dict[str, Any]:
        """As compare.json has it, without the settings."""
        return {
            "run": self.folder,
            "finished": self.finished,
            "steps": self.losses[-1][0],
            "loss": round(self.losses[-1][1], 4),
            "tokens_per_second": self.tokens_per_second,
            "best_acceptance_length": self.best[1] if self.best else None,
            "best_step": self.best[0] if self.best else None,
            "last_acceptance_length": self.taught[-1][1] if self.taught else None,
            "decoded_acceptance_length": self.decoded[-1][1] if self.decoded else None,
            "acceptance_length_after_twice_the_steps": self.after_twice,
        }

    def cells(self) -> list[str]:
        """The texts under RUN_COLUMNS."""
        step, best = self.best or (None, None)
        last, decoded = (points[-1][1] if points else None for points in (self.taught, self.decoded))
        steps = cell(self.losses[-1][0]) + ("" if self.finished else " (not finished)")
        loss, speed = number(self.losses[-1][1]), cell(round(self.tokens_per_second))
        twice = "{:.2f} [{:.2f}, {:.2f}]".format(*self.after_twice) if self.after_twice else "-"
        return [steps, loss, speed, number(best), cell(step), number(last), number(decoded), twice]


def differing_settings(runs: Sequence[TrainingRun]) -> dict[str, list[Any]]:
    """The settings that not all runs share, but their folders: the value of each run, None if it has none."""
    keys = sorted({key for run in runs for key in run.settings} - {"train.output_dir"})
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: settings for key, settings in values.items() if any(value != settings[0] for value in settings)}


def write_page(folder: Path, evaluations: Sequence[NamedReport], runs: Sequence[TrainingRun]) -> Path:
    """Write compare.html, and for runs compare.svg; returns the path of the page."""
    if runs:
        write_text(folder / "compare.svg", render_curves(runs))
    return write_text(folder / "compare.html", render(evaluations, runs))


def render_curves(runs: Sequence[TrainingRun]) -> str:
    """An SVG file: losses, and acceptance lengths of validations, over optimizer steps."""
    losses = [Series(run.name, thinned(run.losses, most=MOST_POINTS)) for run in runs]
    lengths = [Series(run.name, run.taught) for run in runs]
    charts = [
        line_chart("Loss", losses, axis="loss over optimizer steps", with_dots=False),
        line_chart("Acceptance length", lengths, axis="acceptance length of validations"),
    ]
    height = 230 + 16 * len(runs)
    return page_template("compare.svg.j2").render(charts=charts, width=2 * (WIDTH + 20), height=height)


def render(evaluations: Sequence[NamedReport], runs: Sequence[TrainingRun]) -> str:
    """The page. No script is in it, and nothing is fetched."""
    results = [result for evaluation in evaluations for result in evaluation.results]
    ranks = standings(evaluations)
    sections = [runs_section(runs)] if runs else []
    if results:
        sections += [
            speed_section(results),
            acceptance_section(results),
            time_section(results),
            settings_section(results),
            conventions_section(results),
            environment_section({evaluation.name: evaluation.report for evaluation in evaluations}),
        ]
    return page_template("compare.html.j2").render(
        names=[one.name for one in (*evaluations, *runs)],
        headline=headline(ranks) if results else runs_headline(runs),
        is_proved=bool(results) and len({rank.winner for rank in ranks}) == 1 and ranks[0].winner is not None,
        standings=ranks,
        unlike=unlike(evaluations),
        sections=[section for section in sections if section.tables or section.figures],
    )


def runs_headline(runs: Sequence[TrainingRun]) -> str:
    """The run with the best validation."""
    best = max(runs, key=lambda run: run.best[1] if run.best else 0.0)
    if best.best is None:
        return f"{len(runs)} runs, none validated"
    return f"{best.name} reached the best validation, {best.best[1]:.2f} tokens per forward"


def runs_section(runs: Sequence[TrainingRun]) -> Section:
    """What came of the runs, how they got there, and what differs between them."""
    section = Section("runs")
    size = -(-max(len(run.losses) for run in runs) // MOST_POINTS)
    charts = {
        f"Loss over optimizer steps{f'; a point is the mean of {size} logged steps' if size > 1 else ''}.": [
            Series(run.name, thinned(run.losses, most=MOST_POINTS)) for run in runs
        ],
        "Acceptance length of validations, taught.": [Series(run.name, run.taught) for run in runs if run.taught],
        "Acceptance length of validations, decoded.": [Series(run.name, run.decoded) for run in runs if run.decoded],
    }
    for number_of, (caption, lines) in enumerate(charts.items()):
        if any(len(line.points) > 1 for line in lines):  # a single validation of each is in the table
            chart = line_chart(caption, lines, axis="optimizer step", with_dots=number_of > 0)
            section.figures.append(Figure(caption, chart))
    rows = [[run.name, *run.cells()] for run in runs]
    section.add_table("What came of each run", ["run", *RUN_COLUMNS], rows, 1)
    rows = [[key, *map(cell, values)] for key, values in differing_settings(runs).items()]
    return section.add_table("Settings that differ", ["setting", *(run.name for run in runs)], rows, len(runs) + 1)
