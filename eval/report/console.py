"""What a terminal shows of an evaluation: its conclusion and a table; with --verbose a line of figures per result."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..measurement.result import Result
from .conclusion import Conclusion, Table
from .results.document import Report
from .results.drafter_words import drafter_words
from .results.one_result import (
    deviates,
    disturbance_words,
    is_lossless,
    label,
    learnt_words,
    loop_words,
    lossless_words,
    number,
    ratio_words,
    requests_words,
    speedup_words,
)
from .screen import show_conclusion


def show(report: Report, conclusion: Conclusion, page: Path, console: Any, *, verbose: bool = False) -> None:
    """Print what the page begins with, a table of the results, and where the page is. Args: verbose: before that, what
    the table has no column for."""
    for result in report.results if verbose else ():
        console.print(details(result), markup=False, highlight=False)
    show_conclusion(conclusion, results_table(report.results), f"The page: {page}", console)


def details(result: Result) -> str:
    """A line on what the table has no column for."""
    unit = "batch" if result.batch_size > 1 else "chat" if result.has_turns else "prompt"
    parts = [f"speedup per {unit} {'/'.join(map(number, result.spread))} (p10/median/p90)"]
    parts.append(f"texts {lossless_words(result)}")
    if any(rate is not None for rate in result.acceptance_rate):
        parts.append(f"rate by position {' '.join(map(number, result.acceptance_rate))}")
    if (forced := result.teacher_forced_acceptance_length) is not None:
        parts.append(f"teacher-forced acceptance length {forced:.2f}")
    parts += filter(None, [loop_words(result), disturbance_words(result)])
    return f"{place_of(result)}: {'; '.join(parts)}"


def results_table(results: Sequence[Result]) -> Table | None:
    """A row for each result; what is the same in all of them is said above."""
    if not results:
        return None
    first, columns = results[0], []
    columns.append(("drafter", [drafter_words(result.drafter) for result in results]))
    above = []
    if len({result.suite for result in results}) > 1:
        columns.append(("traffic", [result.suite for result in results]))
    else:
        above.append(f"on {first.suite}")
    num_labels = len(columns)
    if len({result.batch_size for result in results}) > 1:
        columns.append(("requests at a time", [str(result.batch_size) for result in results]))
    else:
        above.append(requests_words(first.batch_size))
    sampled = sorted({result.temperature for result in results})
    above.append(f"at temperature {', '.join(f'{one:g}' for one in sampled)}" if any(sampled) else "greedy")
    drafts = [
        str(one.num_draft_tokens) if one.tree == "chain" else f"{one.num_drafted} {one.tree}"  # a tree's nodes
        for one in results
    ]
    columns.append(("drafts", drafts))
    if any(result.adapter for result in results):  # how drafts fare under the others is the question
        lengths = [ratio_words(result.acceptance_length, result.acceptance_length_ci95) for result in results]
        columns.append(("tokens per forward [95 %]", lengths))
    else:
        columns.append(("tokens per forward", [number(result.acceptance_length) for result in results]))
        columns.append(("tokens per second", [speed_words(result.tokens_per_second) for result in results]))
    speedups = [speedup_words(one) + ("" if is_lossless(one) else ", not lossless") for one in results]
    columns.append(("speedup [95 %]", speedups))
    rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
    caption = ", ".join(above) + ":"
    return Table(caption[0].upper() + caption[1:], [title for title, _ in columns], rows, num_labels)


def speed_words(tokens_per_second: float | None) -> str:
    """Whole tokens per second, below ten with a decimal."""
    return number(tokens_per_second, 0 if (tokens_per_second or 0.0) >= 10 else 1)


def place_of(result: Result) -> str:
    """Which result a line is about."""
    return f"{label(result)}, on {result.suite}".replace("\xa0", " ")


def training_warnings(results: Iterable[Result]) -> list[str]:
    """A line for each result with prompts of its head's training."""
    told = [(place_of(result), learnt_words([result])) for result in results]
    return [f"{place}: {words}: its figures say little of other prompts" for place, words in told if words]


def lossless_warnings(results: Iterable[Result]) -> list[str]:
    """A line for each result with a lossless rule whose texts are not the target's own as far as is known: where."""
    lines = []
    for result in results:
        where, lossless = place_of(result), result.lossless
        first = next((text for text in lossless.divergences if not text.is_proved), None)
        if first is not None and first.unproved is not None:
            count = f"{lossless.unexplained} of {lossless.checked} texts are not proved to be the target's own"
            lines.append(f"{where}: {count}, the first at token {first.unproved + 1} behind prompt {first.prompt}")
        if deviates(result):
            lines.append(f"{where}: sampled texts are not distributed as the target's")
    return lines


def failure_words(results: Iterable[Result]) -> list[str]:
    """A line for each result without some of its prompts: how many, and why the first of them failed."""
    lines = []
    for result in results:
        if result.failed:
            first, count = result.failed[0], f"{len(result.failed)} of {result.num_prompts + len(result.failed)}"
            what = f"{count} prompts failed and are in no figure, the first {first.row}: {first.reason}"
            lines.append(f"{drafter_words(result.drafter)} on {result.suite}: {what}")
    return lines
