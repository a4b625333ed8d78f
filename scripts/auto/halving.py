"""Successive halving (Jamieson and Talwalkar 2016): each rung has the same time and half as many candidates.

Within a rung, every candidate is trained once, for an equal share of the rung's time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_STEPS = 10  # optimizer steps per candidate and rung, lower limit


@dataclass(frozen=True)
class Pace:
    """Training speed of a candidate on this machine."""

    step: float  # seconds per optimizer step
    overhead: float  # seconds per rung besides the steps: starting the process, decoding for validation


def rung_sizes(num_candidates: int) -> list[int]:
    """Number of candidates in each rung: 4 -> [4, 2], 3 -> [3, 2]. Empty for fewer than two candidates."""
    sizes, left = [], num_candidates
    while left > 1:
        sizes.append(left)
        left = -(-left // 2)
    return sizes


def rung_seconds(seconds: float, num_candidates: int) -> float:
    """Seconds of each rung. Args: seconds: for all rungs together."""
    return seconds / max(len(rung_sizes(num_candidates)), 1)


def starting_candidates(ranked: Sequence[str], paces: Mapping[str, Pace], seconds: float) -> list[str]:
    """The candidates of the first rung: as many of the best-ranked ones as can each train LEAST_STEPS steps per rung.

    Args:
        ranked: names, most promising first.
        seconds: for all rungs together.

    Returns at least one name.
    """
    for size in range(len(ranked), 1, -1):
        chosen = ranked[:size]
        each = rung_seconds(seconds, size) / size
        if all(paces[name].overhead + LEAST_STEPS * paces[name].step <= each for name in chosen):
            return list(chosen)
    return list(ranked[:1])


def steps_within(seconds: float, pace: Pace) -> int:
    """Optimizer steps that a candidate can do in its share of a rung; at least LEAST_STEPS."""
    return max(int((seconds - pace.overhead) / pace.step), LEAST_STEPS)


def survivors(scores: Mapping[str, float]) -> list[str]:
    """The better half by score (rounded up), best first; ties keep the order of the mapping."""
    order = sorted(scores, key=lambda name: -scores[name])
    return order[: -(-len(order) // 2)]
