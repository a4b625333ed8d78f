"""The chart and the tables of docs/data.md, from docs/results/data.json; and what train/trend.py expects of a training.

    python -m headstart.benchmarks.data_figures

A test finds them stale where the results have changed since. What train/trend.py expects is fitted to the trainings of
one target and domain; forecasts are judged on all others.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2, sqrt
from pathlib import Path
from statistics import fmean, linear_regression, stdev

from ..configs.files import write_text
from ..configs.loader import build
from ..eval.report.charts import WIDTH, Series, line_chart
from ..eval.report.page import page_template
from ..train.trend import Forecast, Validated, forecast, log_accepted
from .readme_figures import with_figures

RESULTS, PAGE, CHART = Path("docs/results/data.json"), Path("docs/data.md"), Path("docs/results/data.svg")
FITTED = ("SmolLM2-135M-Instruct, bf16", "GSM8K questions")
HEIGHT = 240  # of the chart with its names


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """One training: its data, and the acceptance length of teacher-forced drafts on held-out rows after some steps."""

    head: str
    target: str
    domain: str
    rows: int  # of answers that it is trained on
    answer_tokens: int
    seed: int
    trained_parameters: int
    num_draft_tokens: int
    num_rounds: int  # of the last validation
    acceptance_length: dict[str, float]  # by optimizer step


Columns = Mapping[str, Callable[[TrainingCurve], float | None]]


@dataclass(frozen=True)
class Expectation:
    """The constants of train/trend.py."""

    slope: float
    slope_deviation: float
    spread: float
    doubling: float
    doubling_deviation: float


def main() -> None:
    curves = read_curves(RESULTS)
    print(fitted(curves))
    write_text(PAGE, page_of(PAGE.read_text(), curves))
    write_text(CHART, chart(curves))


def read_curves(path: Path) -> list[TrainingCurve]:
    return [build(TrainingCurve, entry, where=str(path)) for entry in json.loads(path.read_text())]


def page_of(page: str, curves: Sequence[TrainingCurve]) -> str:
    """docs/data.md with the tables of these trainings."""
    return with_figures(with_figures(page, tables(curves)), forecasts(curves), name="forecasts")


def tables(every: Sequence[TrainingCurve]) -> str:
    """Markdown: after the last step by the answers, and with all answers by the steps."""
    curves = [curve for curve in every if is_fitted(curve)]
    sizes, steps = sizes_of(curves), sorted({step for curve in curves for step in curve.acceptance_length}, key=int)
    whole = [curve for curve in curves if curve.answer_tokens == sizes[-1]]
    by_answers = {f"{size:,}": partial(last_with, answer_tokens=size) for size in sizes}
    by_steps = {step: partial(after_step, step=step) for step in steps}
    parts = [*table("tokens of answers", curves, by_answers), "", *table("steps", whole, by_steps)]
    return "\n".join([*parts, "", "![Acceptance length by answers](results/data.svg)", ""])


def table(title: str, curves: Sequence[TrainingCurve], columns: Columns) -> list[str]:
    """A row per head, means over seeds."""
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for head in heads_of(curves):
        own = [curve for curve in curves if curve.head == head]
        lines.append(f"| {head} | {' | '.join(mean_of(map(value, own)) for value in columns.values())} |")
    return lines


def last_with(curve: TrainingCurve, *, answer_tokens: int) -> float | None:
    return last(curve) if curve.answer_tokens == answer_tokens else None


def after_step(curve: TrainingCurve, *, step: str) -> float | None:
    return curve.acceptance_length.get(step)


def mean_of(lengths: Iterable[float | None]) -> str:
    known = [length for length in lengths if length is not None]
    return f"{fmean(known):.2f}" if known else "-"


def forecasts(every: Sequence[TrainingCurve]) -> str:
    """Markdown: what the validations of the first quarter and half of trainings forecast of their ends."""
    curves = [curve for curve in every if not is_fitted(curve)]
    lines = ["| head | target | domain | expected after a quarter | after half | reached |", "|---" * 6 + "|"]
    within = [0, 0]
    for curve in curves:
        parts = [expected(curve, share) for share in (0.25, 0.5)]
        for i, part in enumerate(parts):
            within[i] += part.low <= last(curve) <= part.high
        lines.append(
            f"| {curve.head} | {curve.target} | {curve.domain} | {parts[0]} | {parts[1]} | {last(curve):.2f} |"
        )
    held = " | ".join(f"{count} of {len(curves)}" for count in within)
    return "\n".join([*lines, f"| within the 80 % interval | | | {held} | |", ""])


def expected(curve: TrainingCurve, share: float) -> Forecast:
    """The forecast of the end from the validations of that share of the training."""
    steps = max(map(int, curve.acceptance_length))
    return forecast([part for part in course_of(curve) if part.step <= share * steps], steps)


def course_of(curve: TrainingCurve) -> list[Validated]:
    lengths = curve.acceptance_length.items()
    return [Validated(int(step), length, curve.num_rounds) for step, length in lengths]


def is_fitted(curve: TrainingCurve) -> bool:
    """Whether the constants of train/trend.py are fitted to this training."""
    return (curve.target, curve.domain) == FITTED


def fitted(every: Sequence[TrainingCurve]) -> Expectation:
    """By least squares of log(L - 1) against 1 / sqrt(step) in each training; the effect of answers, at their ends."""
    curves = [curve for curve in every if is_fitted(curve)]
    slopes, squares = [], []
    for curve in curves:
        course = course_of(curve)
        logs, inputs = (
            [log_accepted(part.acceptance_length) for part in course],
            [-(part.step**-0.5) for part in course],
        )
        slope, limit = linear_regression(inputs, logs)
        slopes.append(slope)
        left = sum((log - limit - slope * x) ** 2 for log, x in zip(logs, inputs, strict=True))
        squares.append(left / (len(course) - 2))
    gains = []
    for curve in curves:
        fewer = [other for other in curves if (other.head, other.seed) == (curve.head, curve.seed)]
        fewer = [other for other in fewer if other.answer_tokens < curve.answer_tokens]
        if fewer:
            other = max(fewer, key=lambda other: other.answer_tokens)
            doublings = log2(curve.answer_tokens / other.answer_tokens)
            gains.append((log_accepted(last(curve)) - log_accepted(last(other))) / doublings)
    figures = (fmean(slopes), stdev(slopes), sqrt(fmean(squares)), fmean(gains), stdev(gains))
    return Expectation(*(float(f"{figure:.2g}") for figure in figures))


def chart(every: Sequence[TrainingCurve]) -> str:
    """SVG: acceptance length after the last step by the answers' tokens."""
    curves = [curve for curve in every if is_fitted(curve)]
    sizes, lines = sizes_of(curves), []
    for head in heads_of(curves):
        found = [[last(c) for c in curves if c.head == head and c.answer_tokens == size] for size in sizes]
        points = [(float(i), fmean(lengths)) for i, lengths in enumerate(found) if lengths]
        if len(points) > 1:
            lines.append(Series(head, points))
    ticks = [f"{size:,}" for size in sizes]
    picture = line_chart("Acceptance length by answers", lines, axis="tokens of answers", ticks=ticks, mark=1.0)
    return page_template("compare.svg.j2").render(charts=[picture], width=WIDTH + 20, height=HEIGHT)


def sizes_of(curves: Sequence[TrainingCurve]) -> list[int]:
    """Their tokens of answers, ascending."""
    return sorted({curve.answer_tokens for curve in curves})


def heads_of(curves: Sequence[TrainingCurve]) -> list[str]:
    """Their heads, the one that accepts most first."""
    names = dict.fromkeys(curve.head for curve in curves)
    return sorted(names, key=lambda name: -max(last(curve) for curve in curves if curve.head == name))


def last(curve: TrainingCurve) -> float:
    return curve.acceptance_length[max(curve.acceptance_length, key=int)]


if __name__ == "__main__":
    main()
