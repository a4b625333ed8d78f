"""How often guesses were right so far, late observations counting more than early ones."""

from bisect import bisect_right
from collections.abc import Sequence

# Hit rates are counted by class: matches in a row's own text by their length in tokens, guesses with a probability by
# that; the classes' lower edges are listed here. Counts start from the rates, weighted as WEIGHT observations; those of
# matches were measured on answers of SmolLM2-135M-Instruct.
MATCHES = (0, 1, 2, 3, 5, 8, 12)
MATCH_RATES = (0.05, 0.4, 0.5, 0.55, 0.65, 0.72, 0.87)
PROBABILITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PROBABILITY_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.94, 0.985)
WEIGHT = 6.0
MOST_COUNTED = 128  # guesses of a class, after which their counts are halved


class Ratio:
    """A ratio of two sums, to which late observations contribute more than early ones.

    Args: start: the ratio before any observation. weight: of that start, in units of the lower sum. most: lower sum
        beyond which both sums are halved.
    """

    def __init__(self, start: float, *, weight: float, most: float):
        self.upper, self.lower, self.most = start * weight, weight, most

    @property
    def value(self) -> float:
        return self.upper / self.lower

    def add(self, upper: float, lower: float) -> None:
        """Count an observation."""
        self.upper += upper
        self.lower += lower
        if self.lower > self.most:
            self.upper /= 2
            self.lower /= 2


class HitRates:
    """How often guesses were right, by class of certainty: the length of a match in tokens, or a probability.

    Args: edges: the lower edge of each class, ascending from 0. rates: the initial rate of each class.
    """

    def __init__(self, edges: Sequence[float], rates: Sequence[float]):
        self.edges = edges
        self.classes = [Ratio(rate, weight=WEIGHT, most=MOST_COUNTED) for rate in rates]  # right guesses / guesses

    def at(self, certainty: float) -> float:
        """The rate, 0 to 1, of guesses of that certainty."""
        return self.classes[bisect_right(self.edges, certainty) - 1].value

    @property
    def mean(self) -> float:
        """The rate of all guesses."""
        return sum(one.upper for one in self.classes) / sum(one.lower for one in self.classes)

    def add(self, certainty: float, *, is_right: bool) -> None:
        """Count a guess."""
        self.classes[bisect_right(self.edges, certainty) - 1].add(is_right, 1)


class LookupRates:
    """How often look-ups were right, over all rows and texts of an engine: in a row's own text by the length of the
    match, in answers by the guess's share."""

    def __init__(self) -> None:
        self.own = HitRates(MATCHES, MATCH_RATES)
        self.answers = HitRates(PROBABILITIES, PROBABILITY_RATES)
