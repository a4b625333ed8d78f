"""Where a run is heading: a loss that diverges, and the acceptance length that more steps would give."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import torch

WINDOW, FACTOR = 3, 3.0
ADVICE = "take a lower train.learning_rate, in another train.output_dir, or check the data"

# the accepted drafts of a round, L - 1, by step s: log(L - 1) = limit - slope / sqrt(s). Mean and standard deviation of
# the slope over heads, the deviation of a validation of SPREAD_ROUNDS rounds from the curve, and what twice the answers
# add to log(L - 1): fitted by benchmarks/data_figures.py to docs/results/data.json, of steps of 8 rows
SLOPE, SLOPE_DEVIATION = 3.5, 1.4
SPREAD, SPREAD_ROUNDS = 0.02, 2000
DOUBLING, DOUBLING_DEVIATION = 0.085, 0.03
LEAST = 0.01  # accepted drafts of a round, lower limit: those of a head that knows nothing have no logarithm
COVERED = 0.8  # probability that the interval of a forecast has the length


class Trend:
    """The losses of a run; it diverges while the median of the last three is above three times the first."""

    def __init__(self) -> None:
        self.first = 0.0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.diverges_since = 0  # the step at which it was seen; 0: it does not diverge

    def take(self, step: int, loss: float) -> bool:
        """Record the loss of a step (1-based); returns whether divergence starts here. A loss of 0, of a step without
        supervised tokens, is ignored."""
        if loss == 0:
            return False
        self.first = self.first or loss
        self.last.append(loss)
        if len(self.last) < WINDOW or median(self.last) <= FACTOR * self.first:
            self.diverges_since = 0
            return False
        self.diverges_since = self.diverges_since or step
        return self.diverges_since == step

    def __str__(self) -> str:
        losses = ", ".join(f"{loss:.4g}" for loss in self.last)
        return f"losses of late {losses}; of the first step {self.first:.4g}" if losses else "no loss before"


@dataclass(frozen=True)
class Validated:
    """The acceptance length of a head after so many optimizer steps, over so many rounds of held-out rows."""

    step: int
    acceptance_length: float
    num_rounds: int


@dataclass(frozen=True)
class Forecast:
    """An acceptance length that is expected, and the ends of its 80 % interval."""

    acceptance_length: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.acceptance_length:.2f} [{self.low:.2f}, {self.high:.2f}]"


def forecast(course: Sequence[Validated], step: int, *, answers: float = 1.0) -> Forecast:
    """The acceptance length after `step` steps, from earlier validations of the same rows.

    Learning curves are power laws (Hestness et al. 2017, arXiv 1712.00409), extrapolated from their beginnings by a
    prior over their parameters (Domhan et al. 2015). Here the power is fixed and the rest linear, so that the posterior
    is a normal distribution: Bayesian linear regression (Bishop 2006, equations 3.50 to 3.59).

    Args:
        course: one validation or more, of steps above 0.
        answers: times as many answers to learn from as in these validations.
    """
    inputs = torch.tensor([[1.0, -(each.step**-0.5)] for each in course], dtype=torch.double)  # [n, 2]
    logs = torch.tensor([log_accepted(each.acceptance_length) for each in course], dtype=torch.double)  # [n]
    weights = torch.tensor([each.num_rounds / SPREAD_ROUNDS for each in course], dtype=torch.double) / SPREAD**2  # [n]
    prior = torch.tensor([0.0, SLOPE_DEVIATION**-2], dtype=torch.double)  # precisions; the limit may be anything
    precision = (inputs * weights[:, None]).T @ inputs + prior.diag()
    mean = torch.linalg.solve(precision, inputs.T @ (weights * logs) + prior * SLOPE)
    asked = torch.tensor([1.0, -(step**-0.5)], dtype=torch.double)
    more = math.log2(answers)
    variance = float(asked @ torch.linalg.solve(precision, asked)) + 1 / float(weights[-1])
    deviation = math.sqrt(variance + (more * DOUBLING_DEVIATION) ** 2)
    middle, reach = float(asked @ mean) + more * DOUBLING, NormalDist().inv_cdf((1 + COVERED) / 2) * deviation
    return Forecast(*(round(1 + math.exp(log), 4) for log in (middle, middle - reach, middle + reach)))


def log_accepted(acceptance_length: float) -> float:
    """The logarithm of the accepted drafts of a round."""
    return math.log(max(acceptance_length - 1, LEAST))
