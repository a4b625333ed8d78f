"""Answers that the target did not write, found by likelihood: they are less typical of it than its own are.

A token that was sampled at temperature T has, in expectation, the log-probability -H, H being the entropy of the
target's distribution at T. What a whole answer deviates from that, over the standard deviation that the distributions
imply, is about normal for the target's own answers, whatever their length, and positive for those that were sampled
more cautiously (a lower temperature, top-p). Another's answers lie below: the further, the lower T. At T = 1 a target
that predicts others' text well finds it as typical as its own, and nothing can tell them apart.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = 0.3  # temperature at which greedy answers are tested: at 0, any near-tie would be impossible
TESTED = (LOWEST, 0.7, 1.0)  # temperatures that are tried where rows do not say theirs
OWN = (0.0, 0.7, 1.0)  # those at which the target answers in the run, for comparison
SPREAD = 3.0  # standard deviations below its own answers from which an answer is not the target's
FITS = -1.0  # typicality that an answer has at about its own temperature or above
MOST = 6.0  # nats by which one token may fall short: a single odd one, of another rounding, condemns no answer
POSITIONS = 256  # whose logits are held at a time


@dataclass(frozen=True)
class OwnAnswers:
    """What the target's own answers of this run have. typicality: of each."""

    temperature: float
    typicality: list[float]

    @property
    def threshold(self) -> float:
        """Below it, an answer at that temperature is not the target's. Three standard deviations, of these answers or
        of theory (mean 0, deviation 1), whichever are further."""
        values = self.typicality
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return min(statistics.fmean(values), 0.0) - SPREAD * max(spread, 1.0)


def temperatures_for(temperature: float | None) -> tuple[float, ...]:
    """The temperatures at which an answer is tested. None: not known."""
    return TESTED if temperature is None else (max(temperature, LOWEST),)


def typicality(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """[2]: what the answer's log-probability exceeds its expectation by, and its variance, at a temperature; of several
    parts they add up.

    Args: logits: [N, V] fp32. tokens: [N] that follow.
    """
    logs = (logits / temperature).log_softmax(-1).clamp(min=-1e4)  # [N, V]; what is impossible stays finite
    probs = logs.exp()
    entropy = -(probs * logs).sum(-1)
    variance = (probs * (logs + entropy[:, None]).square()).sum(-1)
    excess = (logs.gather(-1, tokens[:, None])[:, 0] + entropy).clamp(min=-MOST)
    return torch.stack([excess.sum(), variance.sum()])


def standardised(parts: Tensor) -> float:
    """A typicality as one figure. One square nat is added to the variance: where nothing was left to chance, a token
    of another rounding says little."""
    excess, variance = parts.tolist()
    return excess / (variance + 1.0) ** 0.5


def served_temperature(rows: Sequence[Mapping[str, float]]) -> float:
    """The lowest tested temperature that fits at least a third of the rows, which do not say theirs.

    Args: rows: of each its typicality, by temperature.
    """
    for temperature in TESTED:
        values = sorted(row[str(temperature)] for row in rows)
        if values and values[len(values) - -(-len(values) // 3)] >= FITS:
            return temperature
    return TESTED[-1]


def is_foreign(row: Mapping[str, float], served: float, own: Sequence[OwnAnswers]) -> bool:
    """Args: row: typicality by temperature. served: the temperature of rows that were tested at several."""
    key = str(served) if len(row) > 1 else next(iter(row))
    near = min(own, key=lambda answers: abs(answers.temperature - float(key)))
    return row[key] < near.threshold
