"""Predicts a head's speedup from the cost of its drafts here and their acceptance. Pure functions of figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...eval.measurement.step_times import interpolate

GENEROUS = 0.8  # acceptance rate of every draft position, beyond which few heads get in a short training
LEAST_GAIN = 1.05  # a speedup that is worth training for


@dataclass(frozen=True)
class RoundCost:
    """A round that drafts a chain of that length, in steps of the target without drafts."""

    num_draft_tokens: int
    steps: float


def cost_of(costs: Sequence[RoundCost], num_draft_tokens: int) -> float:
    """The cost of a round of that length, interpolated linearly between the measured ones."""
    points = [(float(cost.num_draft_tokens), cost.steps) for cost in costs]
    return interpolate(sorted(points), num_draft_tokens)


def expected_length(rates: Sequence[float | None], num_draft_tokens: int) -> float:
    """Tokens per round, the target's own included: 1 + sum over k of the product of the first k rates.

    Leviathan et al. 2023, equation 1, with a rate per position. Positions that were never reached add nothing.
    """
    length = reached = 1.0
    for rate in rates[:num_draft_tokens]:
        reached *= rate or 0.0
        length += reached
    return length


@dataclass(frozen=True)
class Predicted:
    """The best chain of a head, and its speedup over no drafts."""

    num_draft_tokens: int
    speedup: float


def predict(rates: Sequence[float | None], costs: Sequence[RoundCost]) -> Predicted:
    """The chain length with the highest predicted speedup, of those with a rate; of equal ones the shortest."""
    lengths = range(1, len(rates) + 1)
    speedups = [Predicted(k, round(expected_length(rates, k) / cost_of(costs, k), 4)) for k in lengths]
    return max(speedups, key=lambda one: (one.speedup, -one.num_draft_tokens))


def bound(costs: Sequence[RoundCost], most: int) -> Predicted:
    """The speedup, were GENEROUS of the drafts accepted at every position. most: the longest chain."""
    return predict([GENEROUS] * most, costs)
