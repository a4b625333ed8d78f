"""When a head that drafts beside look-ups is asked: where the tokens that it adds are expected to be worth its time."""

from collections.abc import Mapping

from .rates import Ratio

DRAFT_COST = 0.2  # time of a head's chain relative to a round that copies; .19 measured for EAGLE-3 of 3 tokens
FIRST = 32  # first rounds, in which a head is asked in any case, to see what it is worth
EXPLORED = 32  # rounds after which a head that is not asked is asked again, for it may be right by now
MOST_EXPLORED = 256  # the same, doubled each time that it was asked for no other reason
EXPLORED_WEIGHT = 8.0  # such a round counts for so many others, as it is the only one that tells of a change


class Asking:
    """Decides in each round whether a head is asked, by the tokens that this is expected to add to the copies.

    It is asked in the first rounds, and then where these tokens are more than what its time brings otherwise. Three
    averages are kept from round to round: `pace`, tokens per row and time, 1 being the time of a round that copies;
    `copied`, the copied tokens that are expected to be accepted; and `worth`, the tokens that asking added relative to
    those expected of it, so that a head that disappoints is asked less.
    """

    def __init__(self) -> None:
        self.pace = Ratio(1.5, weight=20, most=200)
        self.copied = Ratio(1.0, weight=20, most=200)
        self.worth = Ratio(1.0, weight=50, most=200)
        self.num_rounds = 0  # begun so far
        self.unasked = 0  # rounds since the head was asked
        self.patience = EXPLORED
        self.expected: Mapping[int, float] = {}  # of the round in progress, per row: copied tokens
        self.gain = 0.0  # and tokens that the head adds
        self.is_asked = self.explores = False

    def decide(self, expected: Mapping[int, float], *, rate: float, depth: int) -> bool:
        """Whether to ask the head in this round.

        Args: expected: per row, how many tokens of its copy are expected to be accepted. rate: how often the head's
            guesses were right. depth: number of tokens that it would draft; copies continue them.
        """
        guessed = sum(rate**i for i in range(1, depth + 1)) + rate**depth * self.copied.value
        self.gain = sum(max(guessed - chance, 0.0) for chance in expected.values())
        self.expected = expected
        self.num_rounds += 1
        self.unasked += 1
        pays = self.gain * min(self.worth.value, 1.0) > DRAFT_COST * self.pace.value * len(expected)
        self.explores = bool(expected) and not pays and self.unasked > self.patience
        if pays:
            self.patience = EXPLORED
        elif self.explores:
            self.patience = min(2 * self.patience, MOST_EXPLORED)
        self.is_asked = pays or self.explores or self.num_rounds <= FIRST
        if self.is_asked:
            self.unasked = 0
        return self.is_asked

    def count(self, committed: Mapping[int, int]) -> None:
        """Count the round that `decide` began. committed: per row that grew, tokens, the bonus token included."""
        rows = self.expected.keys() & committed.keys()
        if not rows:
            return
        tokens, copied = sum(committed[row] for row in rows), sum(self.expected[row] for row in rows)
        self.pace.add(tokens, len(rows) * (1 + DRAFT_COST * self.is_asked))
        self.copied.add(copied, len(rows))
        if self.is_asked and self.gain > 0 and rows == self.expected.keys():
            weight = EXPLORED_WEIGHT if self.explores else 1.0
            self.worth.add(weight * (tokens - len(rows) - copied), weight * self.gain)
        self.expected = {}
