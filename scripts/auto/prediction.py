"""Predicts a head's speedup from the measured cost of its rounds and the acceptance rates of its drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...eval.measurement.step_times import interpolate

GENEROUS = 0.8  # acceptance rate assumed for every draft position by `bound`; short trainings seldom reach it
LEAST_GAIN = 1.05  # speedup below which a head is not worth training


@dataclass(frozen=True)
class RoundCost:
    """Measured cost of a round that drafts a chain."""

    num_draft_tokens: int
    steps: float  # duration of the round, in baseline steps


def cost_of(costs: Sequence[RoundCost], num_draft_tokens: int) -> float:
    """Cost of a round in baseline steps, interpolated linearly between the measured chain lengths."""
    points = [(float(cost.num_draft_tokens), cost.steps) for cost in costs]
    return interpolate(sorted(points), num_draft_tokens)


def expected_length(rates: Sequence[float | None], num_draft_tokens: int) -> float:
    """Expected tokens per round, bonus token included: 1 + the sum over k of the product of the first k rates.

    This is equation 1 of Leviathan et al. 2023 with a rate per position. A rate of None (position never reached) counts
    as 0.
    """
    length = reached = 1.0
    for rate in rates[:num_draft_tokens]:
        reached *= rate or 0.0
        length += reached
    return length


@dataclass(frozen=True)
class Predicted:
    """The best chain length of a head, and its predicted speedup over decoding without drafts."""

    num_draft_tokens: int
    speedup: float


def predict(rates: Sequence[float | None], costs: Sequence[RoundCost]) -> Predicted:
    """The chain length, 1 to len(rates), with the highest predicted speedup; the shortest of equal ones.

    Args: rates: acceptance rate by draft position.
    """
    lengths = range(1, len(rates) + 1)
    speedups = [Predicted(k, round(expected_length(rates, k) / cost_of(costs, k), 4)) for k in lengths]
    return max(speedups, key=lambda predicted: (predicted.speedup, -predicted.num_draft_tokens))


def bound(costs: Sequence[RoundCost], max_draft_tokens: int) -> Predicted:
    """An optimistic prediction: the speedup if every draft position had the acceptance rate GENEROUS."""
    return predict([GENEROUS] * max_draft_tokens, costs)
