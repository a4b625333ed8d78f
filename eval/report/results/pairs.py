"""Settings beside the fastest one on the same prompts: ratios of speed and of acceptance length, paired prompt by
prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...figures.metrics import Ends, relative_and_interval
from ...measurement.result import Result
from .one_result import grouped


@dataclass(frozen=True)
class Pair:
    """A setting beside another that decoded the same prompts in turns with it.

    speed, length: its decoding speed and its acceptance length over the other's, ratios; with 95 % intervals, paired
    over the prompts (at batch size > 1 batches) that both were timed on.
    """

    setting: Result
    other: Result
    speed: float
    speed_ci95: Ends
    length: float
    length_ci95: Ends

    @property
    def is_undecided(self) -> bool:
        """Whether neither is shown to be the faster one."""
        low, high = self.speed_ci95
        return low is None or high is None or low <= 1 <= high


def pair_of(setting: Result, other: Result) -> Pair | None:
    """None unless both were timed, by turns, on two or more of the same prompts. Args: both of our engine."""
    of_other = {tuple(seen.prompts): seen for seen in other.observations}
    both = [(seen, of_other[key]) for seen in setting.observations if (key := tuple(seen.prompts)) in of_other]
    if len(both) < 2:
        return None
    ours, theirs = zip(*both, strict=True)
    speed, speed_interval = relative_and_interval(
        ([seen.baseline_seconds for seen in ours], [seen.seconds for seen in ours]),
        ([seen.baseline_seconds for seen in theirs], [seen.seconds for seen in theirs]),
    )
    length, length_interval = relative_and_interval(
        ([seen.num_committed for seen in ours], [seen.num_rounds for seen in ours]),
        ([seen.num_committed for seen in theirs], [seen.num_rounds for seen in theirs]),
    )
    return Pair(setting, other, speed, speed_interval, length, length_interval)


def beside_fastest(results: Sequence[Result]) -> list[Pair]:
    """On each kind of traffic every setting beside the one with the highest speedup; only those of one report."""
    pairs = []
    timed = [result for result in results if result.speedup is not None and result.observations]
    for same in grouped(timed, traffic).values():
        fastest = max(same, key=lambda result: result.speedup or 0.0)
        pairs += [pair_of(result, fastest) for result in same if result is not fastest]
    return [pair for pair in pairs if pair is not None]


def not_told_apart(best: Result, results: Sequence[Result]) -> list[Result]:
    """The results on the same traffic that are neither shown to be faster nor slower than one of them."""
    pairs = [pair_of(result, best) for result in results if traffic(result) == traffic(best) and result is not best]
    return [pair.setting for pair in pairs if pair and pair.is_undecided]


def traffic(result: Result) -> tuple[Any, ...]:
    """What has to be the same for two results to be paired."""
    return result.suite, result.suite_digest, result.batch_size, result.temperature, result.accept
