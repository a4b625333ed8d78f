"""The chart and the tables of docs/data.md, from docs/results/data.json; and what train/trend.py expects of a training.

    python -m headstart.benchmarks.data_figures

A test finds them stale where the results have changed since. What train/trend.py expects is fitted to the trainings of
one target and domain; forecasts are judged on all others.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log, log2
from pathlib import Path
from statistics import fmean, stdev

import torch

from ..configs.files import write_text
from ..configs.loader import build
from ..eval.report.charts import WIDTH, Series, line_chart
from ..eval.report.page import page_template
from ..train.trend import PRIOR, CurvePrior, Forecast, Validated, forecast, log_lengths
from .readme_figures import with_figures

RESULTS, PAGE, CHART = Path("docs/results/data.json"), Path("docs/data.md"), Path("docs/results/data.svg")
FITTED = ("SmolLM2-135M-Instruct, bf16", "GSM8K questions")
GRID = {
    "slope": (1.0, 1.25, 1.5, 1.75, 2.0),
    "slope_deviation": (0.3, 0.4, 0.55, 0.7, 1.0),
    "drift": (0.03, 0.05, 0.07, 0.1, 0.14, 0.2),
    "spread": (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02),
}
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
    sizes = sizes_of(curves)
    whole = [curve for curve in curves if curve.answer_tokens == sizes[-1]]
    steps = [step for step in whole[0].acceptance_length if all(step in curve.acceptance_length for curve in whole)]
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
    return [Validated(int(step), length, curve.num_rounds) for step, length in curve.acceptance_length.items()]


def is_fitted(curve: TrainingCurve) -> bool:
    """Whether the constants of train/trend.py are fitted to this training."""
    return (curve.target, curve.domain) == FITTED


def fitted(every: Sequence[TrainingCurve]) -> CurvePrior:
    """The prior of forecasts: what makes the trainings likeliest, from the present one on by changing one figure at a
    time to the best in GRID; and what more answers added at their ends."""
    curves = [curve for curve in every if is_fitted(curve)]
    gain, deviation = gains_of_answers(curves)
    best, found = None, replace(PRIOR, doubling=gain, doubling_deviation=deviation)
    while found != best:
        best = found
        near = [replace(best, **{name: figure}) for name, figures in GRID.items() for figure in figures]
        found = max([best, *near], key=lambda prior: sum(log_likelihood(prior, course_of(curve)) for curve in curves))
    return found


def log_likelihood(prior: CurvePrior, course: Sequence[Validated]) -> float:
    """The logarithm of a training's probability density, but for a constant."""
    mean, covariance = prior.over(course)
    left = log_lengths(course) - mean
    return -0.5 * float(left @ torch.linalg.solve(covariance, left) + torch.logdet(covariance))


def gains_of_answers(curves: Sequence[TrainingCurve]) -> tuple[float, float]:
    """Mean and standard deviation of what twice the answers add to log L after the last step."""
    gains = []
    for curve in curves:
        like = [other for other in curves if (other.head, other.seed) == (curve.head, curve.seed)]
        fewer = [other for other in like if other.answer_tokens < curve.answer_tokens]
        if fewer:
            other = max(fewer, key=lambda other: other.answer_tokens)
            doublings = log2(curve.answer_tokens / other.answer_tokens)
            gains.append(log(last(curve) / last(other)) / doublings)
    return round(fmean(gains), 3), round(stdev(gains), 3)


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
