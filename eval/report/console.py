"""What a terminal shows of a report: a table, what its columns mean, and lines of warning."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..measurement.result import ENGINE, Result
from ..measurement.sampling_check import SMALLEST_P
from .document import Report
from .one_result import deviates, disturbance_words, has_drafts, has_lossless_rule, loop_words, number, speedup_words
from .pairs import beside_fastest, pair_words

LEGEND = (
    "T temperature, B rows at a time, K drafts deep; length: tokens per target forward;",
    "lossless: texts that are the target's, or how likely sampled ones deviate so far from it;",
    "proved: they differ by rounding alone, held against the model's own code",
)


def show(report: Report, console: Any) -> None:
    """Print the table on a rich console, and under it what the columns mean and what else was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    target, environment = report.target, report.environment
    name = f"{target.name} with the head's adapters" if target.is_adapted else target.name
    console.print(f"{name} ({target.computed}) on {environment.device}, {environment.num_threads} threads")
    named = [(drafter_name(result), result.suite, result.tree) for result in report.results]
    varies = [len(set(column)) > 1 for column in zip(*named, strict=True)] or [True] * 3
    if not all(varies):  # what is the same in all rows stands above them
        console.print(", ".join(word for word, differs in zip(named[0], varies, strict=True) if not differs))
    titles = [title for title, differs in zip(("drafter", "suite", "tree"), varies, strict=True) if differs]
    figures = ("T/B/K", "length", "tok/s", "base", "speedup [95 %]", "lossless")
    columns = [*titles, *(Column(title, justify="right", no_wrap=True) for title in figures)]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for result, names in zip(report.results, named, strict=True):
        table.add_row(
            *(word for word, differs in zip(names, varies, strict=True) if differs),
            f"{result.temperature:g}/{result.batch_size}/{result.num_draft_tokens if has_drafts(result) else ''}",
            number(result.acceptance_length),
            number(result.tokens_per_second, 0),
            number(result.baseline_tokens_per_second, 0),
            speedup_words(result),
            lossless_words(result),
        )
    console.print(table)
    for line in LEGEND:
        console.print(line, soft_wrap=True)
    results = report.results
    lines = [*bandwidth_lines(report), *map(pair_words, beside_fastest(report.ours)), *turn_lines(results)]
    lines += [*failure_words(results), *disturbance_lines(results), *loop_lines(results)]
    for line in lines:
        console.print(line, markup=False)
    for result in results:
        console.print(details(result))


def drafter_name(result: Result) -> str:
    """A cell: the drafter, behind the engine that it was measured in where that is not ours."""
    return result.drafter if result.engine == ENGINE else f"{result.engine}: {result.drafter}"


def place_of(result: Result) -> str:
    """Which result a line is about."""
    return f"{result.drafter} {result.tree} on {result.suite}, batch {result.batch_size}"


def details(result: Result) -> str:
    """A line on what the table has no column for."""
    if result.is_beside:
        ratio = number(result.ours_over_theirs)
        return f"{result.engine}, {result.drafter}, {result.suite}: ours over theirs {ratio}"
    spread = "/".join(map(number, (result.speedup_p10, result.speedup_median, result.speedup_p90)))
    forced = result.teacher_forced_acceptance_length
    where = f"{result.drafter} {result.tree} on {result.suite}"
    unit = "batch" if result.batch_size > 1 else "chat" if result.by_turn else "prompt"
    parts = [f"{where}, K {result.num_draft_tokens}: speedup per {unit} {spread} (p10/median/p90)"]
    if result.step_medians.speedup is not None:
        parts.append(f"by medians of steps {speedup_words(result.step_medians)}")
    if any(rate is not None for rate in result.acceptance_rate):
        parts.append(f"rate by position {' '.join(map(number, result.acceptance_rate))}")
    if forced is not None:
        parts.append(f"teacher-forced acceptance length {forced:.2f}")
    if result.verify_cost is not None:
        parts.append(stopping_words(result, result.verify_cost))
    return "; ".join(parts)


def stopping_words(result: Result, cost: float) -> str:
    """How many drafts were verified, and how true the estimates were that said so."""
    told = result.calibration
    error = "" if told is None else f", calibration error of the estimates {number(told.error, 3)}"
    verified = f"{number(result.drafts_verified)} of {result.num_draft_tokens} drafts verified per round"
    return f"{verified}, one more token being taken to cost {cost:.3f} rounds{error}"


def training_warnings(results: Iterable[Result]) -> list[str]:
    """A line for each result with contexts longer than the head's training rows: what was accepted there."""
    lines = []
    for result in results:
        part = result.beyond_training
        if part is not None and result.trained is not None:
            within = part.acceptance_length_within
            beside = "none as short was measured" if within is None else f"{within:.2f} in shorter ones"
            lines.append(
                f"{result.drafter} on {result.suite}, batch {result.batch_size}: contexts longer than its training "
                f"rows ({result.trained.max_length:,} tokens): acceptance length {part.acceptance_length:.2f}, {beside}"
            )
    return lines


def lossless_warnings(results: Iterable[Result]) -> list[str]:
    """A line for each result with a lossless rule whose texts are not the target's own as far as is known: where."""
    lines = []
    for result in filter(has_lossless_rule, results):
        where, lossless = place_of(result), result.lossless
        first = next((text for text in lossless.divergences if not text.is_proved), None)
        if first is not None and first.unproved is not None:
            count = f"{lossless.unexplained} of {lossless.checked} texts are not proved to be the target's own"
            lines.append(f"{where}: {count}, the first at token {first.unproved + 1} behind prompt {first.prompt}")
        if deviates(result):
            lines.append(f"{where}: sampled texts are not distributed as the target's")
    return lines


def turn_lines(results: Iterable[Result]) -> list[str]:
    """A line for each result over chats with several turns: how many there are, and each turn's figures."""
    return [
        f"{place_of(result)}: {result.num_prompts} turns of {result.num_chats} chats; "
        + ", ".join(
            f"turn {turn}: length {number(part.acceptance_length)}, speedup {speedup_words(part)} "
            f"({part.num_prompts} prompts)"
            for turn, part in result.by_turn.items()
        )
        for result in results
        if result.by_turn
    ]


def failure_words(results: Iterable[Result]) -> list[str]:
    """A line for each result without some of its prompts: how many, and why the first of them failed."""
    lines = []
    for result in results:
        if result.failed:
            first, count = result.failed[0], f"{len(result.failed)} of {result.num_prompts + len(result.failed)}"
            what = f"{count} prompts failed and are in no figure, the first {first.row}: {first.reason}"
            lines.append(f"{result.drafter} on {result.suite}: {what}")
    return lines


def disturbance_lines(results: Iterable[Result]) -> list[str]:
    """A line for each result that was disturbed: by what."""
    return [f"! {place_of(result)}: {words}" for result in results if (words := disturbance_words(result))]


def loop_lines(results: Iterable[Result]) -> list[str]:
    """A line for each result some of whose texts loop: how many, and the figures without them."""
    return [f"{place_of(result)}: {words}" for result in results if (words := loop_words(result))]


def bandwidth_lines(report: Report) -> list[str]:
    """What the baselines read per second, beside what a copy reaches on this machine; none where that was not timed."""
    shares: Sequence[float] = sorted(
        share for result in report.results if (share := result.baseline_bandwidth.share_of_copy) is not None
    )
    ends = dict.fromkeys(f"{share:.0%}" for share in (*shares[:1], *shares[-1:]))
    copied = f"{report.environment.copy_gigabytes_per_second:.1f} GB/s"
    return [f"base reads weights and cache at {' to '.join(ends)} of a copy's {copied}"] if ends else []


def lossless_words(result: Result) -> str:
    """A cell: how many texts equal the baseline's, or how well sampled ones follow the target's distribution."""
    lossless, check = result.lossless, result.sampling_check
    if check and check.p_value is not None:
        return f"p {check.p_value:.2g}" + ("" if check.p_value >= SMALLEST_P else " DEVIATES")
    if not lossless.checked:
        return "sampled"
    words = f"{lossless.identical}/{lossless.checked}"
    if lossless.proved:
        words += f" +{lossless.proved} proved"
    return words + (f", {lossless.unexplained} UNEXPLAINED" if lossless.unexplained else "")
