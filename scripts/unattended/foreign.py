"""Finds answers that the target did not write, by their likelihood under the target.

The expected log-probability of a token sampled at temperature T is -H, where H is the entropy of the target's
distribution at T. The typicality of an answer is its total deviation from that, divided by the standard deviation that
the distributions imply. For the target's own answers it is about normal with mean 0 and deviation 1, whatever their
length, and higher if they were sampled more cautiously (a lower temperature, top-p). For answers of others it is lower,
the more so the lower T is. At T = 1, a target that predicts the text of others well finds it as typical as its own, so
they cannot be told apart.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = 0.3  # temperature at which greedy answers are tested; at 0, the other token of a tie would be impossible
TESTED = (LOWEST, 0.7, 1.0)  # temperatures that are tried for rows that do not name theirs
OWN = (0.0, 0.7, 1.0)  # temperatures at which the target itself answers, for comparison
SPREAD = 3.0  # an answer that is so many standard deviations below the target's own ones is foreign
FITS = -1.0  # least typicality of an answer at which a tested temperature fits it
MOST = 6.0  # nats, limit per token, so that a single token that differs by rounding does not make an answer foreign
POSITIONS = 256  # positions whose logits are held at a time


@dataclass(frozen=True)
class OwnAnswers:
    """Answers that the target wrote in this run, for comparison."""

    temperature: float
    typicality: list[float]  # of each answer

    @property
    def threshold(self) -> float:
        """The typicality below which an answer at this temperature is foreign.

        It is SPREAD standard deviations below the mean: of these answers, or 0 and 1 as in theory if that is lower.
        """
        values = self.typicality
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return min(statistics.fmean(values), 0.0) - SPREAD * max(spread, 1.0)


def temperatures_for(temperature: float | None) -> tuple[float, ...]:
    """The temperatures at which an answer is tested. Args: temperature: of its sampling; None: unknown."""
    return TESTED if temperature is None else (max(temperature, LOWEST),)


def typicality(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The numerator and the variance of an answer's typicality, or of a part of the answer.

    Args:
        logits: [N, V] fp32.
        tokens: [N] the tokens predicted by them.
        temperature: at which they are taken to be sampled.

    Returns [2]: log-probability minus its expectation, and the variance of that. Those of several parts can be added.
    """
    logs = (logits / temperature).log_softmax(-1).clamp(min=-1e4)  # [N, V]; what is impossible stays finite
    probs = logs.exp()
    entropy = -(probs * logs).sum(-1)
    variance = (probs * (logs + entropy[:, None]).square()).sum(-1)
    excess = (logs.gather(-1, tokens[:, None])[:, 0] + entropy).clamp(min=-MOST)
    return torch.stack([excess.sum(), variance.sum()])


def standardised(parts: Tensor) -> float:
    """The typicality, from the sums [2] of `typicality` over an answer.

    One square nat is added to the variance: in answers without any uncertainty, a token that differs by rounding means
    little.
    """
    excess, variance = parts.tolist()
    return excess / (variance + 1.0) ** 0.5


def served_temperature(rows: Sequence[Mapping[str, float]]) -> float | None:
    """The lowest temperature of TESTED that fits at least a third of the rows, none of which names its own.

    None if there are no rows, and the highest if none fits.

    Args: rows: the typicality of each by temperature.
    """
    if not rows:
        return None
    for temperature in TESTED:
        values = sorted(row[str(temperature)] for row in rows)
        if values[len(values) - -(-len(values) // 3)] >= FITS:
            return temperature
    return TESTED[-1]


def is_foreign(row: Mapping[str, float], served: float | None, own: Sequence[OwnAnswers]) -> bool:
    """Whether the target did not write an answer.

    Args:
        row: its typicality by temperature.
        served: the temperature assumed for answers that were tested at several.
        own: the target's own answers.
    """
    key = str(served) if len(row) > 1 else next(iter(row))
    near = min(own, key=lambda answers: abs(answers.temperature - float(key)))
    return row[key] < near.threshold
