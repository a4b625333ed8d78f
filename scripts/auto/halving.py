"""Successive halving (Jamieson and Talwalkar 2016): rungs of equal time, each with half as many candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_STEPS = 10  # optimizer steps that a candidate takes in a rung, at least


@dataclass(frozen=True)
class Pace:
    """Training speed of a candidate here, in seconds: per optimizer step, and per visit besides its steps."""

    step: float
    visit: float


def rung_sizes(num_candidates: int) -> list[int]:
    """How many candidates each rung has; none if there is nothing to choose. 4 -> [4, 2]; 3 -> [3, 2]."""
    sizes, left = [], num_candidates
    while left > 1:
        sizes.append(left)
        left = -(-left // 2)
    return sizes


def rung_seconds(seconds: float, num_candidates: int) -> float:
    """The time of each rung, from the total for all rungs."""
    return seconds / max(len(rung_sizes(num_candidates)), 1)


def field(ranked: Sequence[str], paces: Mapping[str, Pace], seconds: float) -> list[str]:
    """The first of the ranked candidates, as many (at least one) as can train LEAST_STEPS each in that time."""
    for size in range(len(ranked), 1, -1):
        chosen = ranked[:size]
        each = rung_seconds(seconds, size) / size
        if all(paces[name].visit + LEAST_STEPS * paces[name].step <= each for name in chosen):
            return list(chosen)
    return list(ranked[:1])


def steps_within(seconds: float, pace: Pace) -> int:
    """Optimizer steps of a visit of that many seconds; at least LEAST_STEPS."""
    return max(int((seconds - pace.visit) / pace.step), LEAST_STEPS)


def survivors(scores: Mapping[str, float]) -> list[str]:
    """The better half, the best first; of equal ones those named first."""
    order = sorted(scores, key=lambda name: -scores[name])
    return order[: -(-len(order) // 2)]
