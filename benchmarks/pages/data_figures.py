"""The chart and the tables of docs/data.md, from the trainings of one target and domain in docs/results/data.json, and
from contexts.json beside it.

    python -m headstart.benchmarks.pages.data_figures

A test finds them stale where the results have changed since.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from ...base.files import write_text
from ...configs.loader import build
from ...eval.figures.metrics import relative_and_interval
from ...eval.report.charts import WIDTH, Series, line_chart
from ...eval.report.page import page_template
from .readme_figures import with_figures

RESULTS, CONTEXTS = Path("docs/results/data.json"), Path("docs/results/contexts.json")
PAGE, CHART = Path("docs/data.md"), Path("docs/results/data.svg")
SHOWN = ("SmolLM2-135M-Instruct, bf16", "GSM8K questions")
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


@dataclass(frozen=True, kw_only=True)
class ContextFigure:
    """What a head's drafts were accepted for on the same questions behind longer and longer chats, decoded."""

    target: str
    domain: str
    head: str
    training_rows: str  # their lengths in tokens
    num_draft_tokens: int
    max_new_tokens: int
    context: int  # tokens that the prompts have at most
    mean_prompt: int  # tokens that they have
    rounds: list[int]  # by prompt
    committed: list[int]  # tokens of these rounds, by prompt
    texts_equal: bool  # to those of the run's first head

    @property
    def acceptance_length(self) -> float:
        return sum(self.committed) / sum(self.rounds)


Columns = Mapping[str, Callable[[TrainingCurve], float | None]]


def main() -> None:
    write_text(PAGE, page_of(PAGE.read_text(), Path()))
    write_text(CHART, chart(read_curves(RESULTS)))


def read_curves(path: Path) -> list[TrainingCurve]:
    return [build(TrainingCurve, entry, where=str(path)) for entry in json.loads(path.read_text())]


def page_of(page: str, root: Path) -> str:
    """docs/data.md with the tables of what was measured. Args: root: of the repository."""
    figures = [build(ContextFigure, entry, where=str(CONTEXTS)) for entry in json.loads((root / CONTEXTS).read_text())]
    return with_figures(with_figures(page, tables(read_curves(root / RESULTS))), by_context(figures), name="contexts")


def tables(every: Sequence[TrainingCurve]) -> str:
    """Markdown: after the last step by the answers, and with all answers by the steps."""
    curves = [curve for curve in every if is_shown(curve)]
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


def is_shown(curve: TrainingCurve) -> bool:
    """Whether the page shows this training: it has one target and one domain."""
    return (curve.target, curve.domain) == SHOWN


def chart(every: Sequence[TrainingCurve]) -> str:
    """SVG: acceptance length after the last step by the answers' tokens."""
    curves = [curve for curve in every if is_shown(curve)]
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


def by_context(figures: Sequence[ContextFigure]) -> str:
    """Markdown: a row per head, a column per context, and the length in the longest over that in the shortest."""
    contexts = sorted({figure.context for figure in figures})
    names = " | ".join(f"{context:,}" for context in contexts)
    lines = [
        f"| target | head | training rows | {names} | {contexts[-1]:,} over {contexts[0]:,} |",
        "|---" * (len(contexts) + 4) + "|",
    ]
    for key in dict.fromkeys((figure.target, figure.head, figure.training_rows) for figure in figures):
        own = {f.context: f for f in figures if (f.target, f.head, f.training_rows) == key}
        lengths = " | ".join(f"{own[context].acceptance_length:.2f}" for context in contexts)
        lines.append(f"| {' | '.join(key)} | {lengths} | {relative(own[contexts[-1]], own[contexts[0]])} |")
    return "\n".join([*lines, ""])


def relative(long: ContextFigure, short: ContextFigure) -> str:
    """The acceptance length in one context over that in another, with its 95 % interval over prompts."""
    ratio, ends = relative_and_interval((long.committed, long.rounds), (short.committed, short.rounds))
    assert ends[0] is not None and ends[1] is not None
    return f"{ratio:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


if __name__ == "__main__":
    main()
