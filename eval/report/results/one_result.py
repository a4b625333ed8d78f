"""One result in words, and whether its figures prove that it is faster than no drafts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ...figures.metrics import LEAST_TIMED, ratio_and_interval
from ...figures.repetition import WithoutLoops
from ...measurement.disturbance import OTHERS
from ...measurement.result import DomainPart, Result
from .drafter_words import drafter_words

Interval = tuple[float, float]
Figures = Result | DomainPart | WithoutLoops  # whatever has a speedup with its interval
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key of theirs, in the order in which the keys come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def label(result: Result) -> str:
    """A setting in a few words: drafter, drafts, and requests at a time where these are several."""
    return name_of(result) + (f", {requests_words(result.batch_size)}" if result.batch_size > 1 else "")


def name_of(result: Result) -> str:
    """The setting without its batch size. No line break between a number and its name."""
    parts = [drafter_words(result.drafter), drafts_words(result)]
    if result.verify_cost is not None:
        parts.append(f"{number(result.calibration and result.calibration.verified, 1)}\xa0verified")
    if result.accept != "exact":
        parts.append(result.accept)
    return ", ".join(parts)


def drafts_words(result: Result) -> str:
    """`4 drafts`; `dynamic tree of 24, 4 deep`."""
    if result.tree == "chain":
        return counted_words(result.num_draft_tokens, "draft").replace(" ", "\xa0")
    if "chain" in result.tree:
        return f"{result.tree} of\xa0{result.num_draft_tokens}"
    return f"{result.tree} tree of\xa0{result.num_drafted}, {result.num_draft_tokens}\xa0deep"


def requests_words(batch_size: int) -> str:
    """`one at a time`; `8 at a time`."""
    return f"{'one' if batch_size == 1 else batch_size}\xa0at\xa0a\xa0time"


def setting_of(result: Result) -> tuple[Any, ...]:
    """What a deployment chooses. Suite and batch size are not of it, nor is what a draft costs there: they come with
    the traffic."""
    r, by_cost = result, result.verify_cost is not None
    return r.drafter, r.tree, r.num_drafted, r.num_draft_tokens, by_cost, r.accept, r.temperature


def prompts_words(result: Result) -> str:
    """How many prompts were measured, and of how many chats they are the turns."""
    chats = result.num_chats or result.num_prompts
    return str(result.num_prompts) + (f", the turns of {chats}" if chats < result.num_prompts else "")


def num_timed(result: Result) -> int:
    """Prompts, or batches of them, that the interval is over: those in which there was something to time."""
    known = result.num_timed
    return -(-result.num_prompts // result.batch_size) if known is None else known


def timed_words(result: Result) -> str:
    """What the interval of the speedup is over: `20 prompts`, `1 batch of 4`; `20 chats` where a result has chats of
    several turns, each of which counts once."""
    size, unit, count = result.batch_size, "chat" if result.has_turns else "prompt", num_timed(result)
    return counted_words(count, unit) if size == 1 else f"{counted_words(count, 'batch')} of\xa0{size}"


def counted_words(count: int, unit: str) -> str:
    """`1 prompt`, `2 batches`."""
    return f"{count} {unit}" if count == 1 else f"{count} {unit}{'es' if unit == 'batch' else 's'}"


def number(value: float | None, digits: int = 2) -> str:
    """A figure as text; `-` where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def speedup_words(part: Figures) -> str:
    """`1.92 [1.81, 2.03]`; with a `!` behind it where the result was disturbed."""
    mark = " !" if isinstance(part, Result) and is_doubtful(part) else ""
    return ratio_words(part.speedup, part.speedup_ci95) + mark


def ratio_words(ratio: float | None, interval: Sequence[float | None]) -> str:
    """`1.92 [1.81, 2.03]`; `1.92` where there is no interval."""
    low, high = interval
    return number(ratio) if low is None else f"{number(ratio)} [{number(low)}, {number(high)}]"


def interval_words(part: Figures) -> str:
    """`[1.81, 2.03]`."""
    low, high = part.speedup_ci95
    return f"[{number(low)}, {number(high)}]"


def interval_of(part: Figures) -> Interval | None:
    """The 95 % interval of the speedup; None if nothing was timed."""
    low, high = part.speedup_ci95
    return None if low is None or high is None else (low, high)


def lower_end(part: Result | WithoutLoops, *, num_choices: int = 1) -> float:
    """The lower end of the speedup's interval; 0 where nothing was timed. Args: num_choices: as in
    `interval_as_chosen`."""
    return (interval_as_chosen(part, num_choices) or (0.0, 0.0))[0]


def interval_as_chosen(part: Result | WithoutLoops, num_choices: int) -> Interval | None:
    """The interval of a speedup that was chosen among so many (`ratio_and_interval`); its own if observations are not
    known."""
    if num_choices == 1 or len(part.observations) < 2:
        return interval_of(part)
    baseline, drafted = zip(*((seen.baseline_seconds, seen.seconds) for seen in part.observations), strict=True)
    low, high = ratio_and_interval(baseline, drafted, num_choices=num_choices)[1]
    return None if low is None or high is None else (low, high)


def is_lossless(result: Result) -> bool:
    """Whether the text is the target's own as far as the checks show: no difference is unexplained, and sampled tokens
    may be draws from the target's distribution."""
    return not result.lossless.unexplained and not deviates(result)


def deviates(result: Result) -> bool:
    """Whether sampled texts deviate from the target's distribution by more than chance explains."""
    return result.sampling_check is not None and not result.sampling_check.holds


def is_faster(result: Result, *, num_choices: int = 1) -> bool:
    """Whether the speedup's interval lies above 1, is over enough prompts or batches to hold, and can be true.

    Args: num_choices: results among which this one was chosen."""
    is_above = lower_end(result, num_choices=num_choices) > 1
    return is_above and num_timed(result) >= LEAST_TIMED and not result.step_medians.is_impossible


def rests_on_loops(result: Result, *, num_choices: int = 1) -> bool:
    """Whether it is not shown to be faster without the prompts whose texts loop. Args: num_choices: as in
    `is_faster`."""
    without = result.repetition.without_loops
    return without is not None and not (
        lower_end(without, num_choices=num_choices) > 1 and without.num_timed >= LEAST_TIMED
    )


def loop_words(result: Result) -> str:
    """How many texts loop, and what the others give; empty where none does."""
    repetition = result.repetition
    without = repetition.without_loops
    if without is None:
        return ""
    left = f"without these {speedup_words(without)}, {number(without.acceptance_length)} tokens per forward"
    if without.speedup is None:
        left = f"no {'prompt' if result.batch_size == 1 else 'batch'} without these was timed"
    whole = len(repetition.texts)
    return f"{repetition.num_looping} of {counted_words(whole, 'text')} repeat more than half of their 4-grams; {left}"


def learnt_words(results: Iterable[Result]) -> str:
    """Says that prompts of these results were prompts of the head's training, and how many at most; empty if none
    were."""
    return learnt_text(max((result.like_training.learnt or 0.0 for result in results), default=0.0))


def learnt_text(share: float | None) -> str:
    """Says that this share of the prompts were prompts of the head's training; empty if none were, or it is unknown."""
    if not share:
        return ""
    is_fine = share < 0.1 or 0.99 < share < 0.9995  # a whole percentage would say none, or all
    words = "fewer than 0.1%" if share < 0.0005 else f"{share:.1%}" if is_fine else f"{share:.0%}"
    return f"{words} of the prompts are prompts that the head was trained on"


def is_doubtful(result: Result) -> bool:
    """Whether passes were disturbed, also when they were measured again, or figures cannot be true."""
    return result.disturbance.num_disturbed > 0 or result.step_medians.is_impossible


def disturbance_words(result: Result) -> str:
    """What disturbed a result; empty where nothing did."""
    noise, medians = result.disturbance, result.step_medians
    words = []
    if noise.num_disturbed:
        why = ", ".join(noise.reasons)
        if noise.others_share is not None:
            why = why.replace(OTHERS, f"{OTHERS}, {noise.others_share:.0%} of the processor on average over all passes")
        words.append(f"{noise.num_disturbed} of {noise.num_passes} passes disturbed ({why})")
    if medians.is_impossible:
        words.append(
            f"verifying takes {number(medians.verify_ms)} ms and a baseline step {number(medians.baseline_verify_ms)} "
            "ms, medians, which cannot be"
        )
    return "; ".join(words)


def lossless_words(result: Result) -> str:
    """A cell: how many texts equal the baseline's or, where drafts are drawn, how well they follow the target."""
    lossless, check = result.lossless, result.sampling_check
    if check and check.p_value is not None:
        if not check.holds:
            return f"p {check.p_value:.2g} DEVIATES"
        return f"p {check.p_value:.2g}" + (
            f" (would find {check.would_see:.0%} tokens wrong in one direction)" if check.would_see else ""
        )
    if not lossless.checked:
        return "sampled"
    words = f"{lossless.identical}/{lossless.checked}"
    if lossless.proved:
        words += f" +{lossless.proved} proved"
    return words + (f", {lossless.unexplained} UNEXPLAINED" if lossless.unexplained else "")
