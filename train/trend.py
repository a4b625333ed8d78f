"""Where a run is heading: a loss that diverges, and the acceptance length that more steps would give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, median

import torch
from torch import Tensor

WINDOW, FACTOR = 3, 3.0
ADVICE = "take a lower train.learning_rate, in another train.output_dir, or check the data"

COVERED = 0.8  # probability that the interval of a forecast has the length
ROUNDS = 2000  # of the validations that `spread` is for
ANYWHERE = 3.0  # standard deviation of the limit: it may be anything


@dataclass
class Trend:
    """The losses of a run; it diverges while the median of the last three is above three times the first."""

    first: float = 0.0
    last: list[float] = field(default_factory=list)
    diverges_since: int = 0  # the step at which it was seen; 0: it does not diverge

    def take(self, step: int, loss: float) -> bool:
        """Record the loss of a step (1-based); returns whether divergence starts here. A loss of 0, of a step without
        supervised tokens, is ignored."""
        if loss == 0:
            return False
        self.first = self.first or loss
        self.last = [*self.last, loss][-WINDOW:]
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


@dataclass(frozen=True)
class CurvePrior:
    """What is expected of a learning curve, of steps of 8 rows.

    By step s, log L = limit - slope / sqrt(s) + a remainder, which moves randomly as 1 / sqrt(s) falls to 0.
    """

    slope: float  # mean over heads
    slope_deviation: float
    drift: float  # standard deviation of the remainder, per square root of 1 / sqrt(s)
    spread: float  # of a validation of ROUNDS rounds
    doubling: float  # what twice the answers add to log L
    doubling_deviation: float

    def over(self, course: Sequence[Validated]) -> tuple[Tensor, Tensor]:
        """[n] mean and [n, n] covariance of log L in n validations, whatever their acceptance lengths are."""
        inputs = torch.tensor([part.step for part in course], dtype=torch.double) ** -0.5
        num_rounds = torch.tensor([part.num_rounds for part in course], dtype=torch.double)
        law = ANYWHERE**2 + self.slope_deviation**2 * inputs.outer(inputs)
        remainder = self.drift**2 * torch.minimum(inputs, inputs[:, None])
        return -self.slope * inputs, law + remainder + (self.spread**2 * ROUNDS / num_rounds).diag()


PRIOR = CurvePrior(1.5, 0.4, 0.1, 0.002, 0.046, 0.015)  # benchmarks/data_figures.py fits it to docs/results/data.json


def forecast(course: Sequence[Validated], step: int, *, answers: float = 1.0) -> Forecast:
    """The acceptance length after `step` steps, from earlier validations of the same rows.

    Learning curves are power laws (Hestness et al. 2017, arXiv 1712.00409), extrapolated from their beginnings by a
    prior over their parameters (Domhan et al. 2015); here the prior is a Gaussian process (Rasmussen and Williams 2006,
    equations 2.22 to 2.24), so that the posterior is a normal distribution.

    Args:
        course: one validation or more, of steps above 0.
        answers: times as many answers to learn from as in these validations.
    """
    mean, covariance = PRIOR.over([*course, replace(course[-1], step=step)])
    logs = log_lengths(course)
    across = covariance[-1, :-1]
    weights = torch.linalg.solve(covariance[:-1, :-1], across)
    more = math.log2(answers)
    middle = float(mean[-1] + weights @ (logs - mean[:-1])) + more * PRIOR.doubling
    variance = float(covariance[-1, -1] - weights @ across) + (more * PRIOR.doubling_deviation) ** 2
    reach = NormalDist().inv_cdf((1 + COVERED) / 2) * math.sqrt(variance)
    return Forecast(*(round(math.exp(log), 4) for log in (middle, middle - reach, middle + reach)))


def log_lengths(course: Sequence[Validated]) -> Tensor:
    """[n] log L of n validations."""
    return torch.tensor([part.acceptance_length for part in course], dtype=torch.double).log()
