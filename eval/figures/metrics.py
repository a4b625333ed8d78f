"""The definitions of the figures, from per-round records; docs/reference/report_schema.md has them in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, pi, prod, sqrt
from statistics import fmean

from torch import Tensor

from ...heads.base import ChainStarts
from ..decoding.loop import Round

Ends = tuple[float | None, float | None]  # of a 95 % interval; None, None: there is none
WIDEST = 600.0  # of an interval's half, in log ratio: two entries and many choices would overflow
LEAST_TIMED = 4  # prompts or batches needed for the intervals to have their nominal coverage


@dataclass
class Acceptance:
    """Counts over rounds. Each active row of a batch counts as one round; prefills do not count."""

    num_rounds: int  # target forwards
    num_committed: int  # tokens committed, bonus tokens included
    tried: list[int]  # per draft position: it was verified, all before it were accepted, and the text had not ended
    taken: list[int]  # per draft position: it was also accepted
    num_offered: int = 0  # drafts that were verified

    @classmethod
    def nothing(cls, num_draft_tokens: int) -> "Acceptance":
        return cls(0, 0, [0] * num_draft_tokens, [0] * num_draft_tokens)

    @property
    def length(self) -> float | None:
        """acceptance_length: mean tokens committed per target forward, bonus token included."""
        return self.num_committed / self.num_rounds if self.num_rounds else None

    @property
    def rate(self) -> list[float | None]:
        """acceptance_rate[k]: P(draft position k accepted | reached and verified); None if never reached."""
        return [taken / tried if tried else None for taken, tried in zip(self.taken, self.tried, strict=True)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        tried, taken = zip(self.tried, other.tried, strict=True), zip(self.taken, other.taken, strict=True)
        rounds, committed = self.num_rounds + other.num_rounds, self.num_committed + other.num_committed
        offered = self.num_offered + other.num_offered
        return Acceptance(rounds, committed, [a + b for a, b in tried], [a + b for a, b in taken], offered)

    def add(self, accepted: int, committed: int, offered: int | None = None) -> None:
        """One round of one row. Args: offered: drafts that were verified; None: all."""
        offered = len(self.tried) if offered is None else offered
        self.num_rounds += 1
        self.num_committed += committed
        self.num_offered += offered
        for k in range(min(accepted + 1, len(self.tried), committed, offered)):
            self.tried[k] += 1
            self.taken[k] += k < accepted


@dataclass(frozen=True)
class AcceptancePart:
    """Acceptance over some of the rounds."""

    num_rounds: int
    acceptance_length: float | None
    acceptance_rate: list[float | None]  # by draft position, conditional


def acceptance(rounds: Iterable[Round], *, num_draft_tokens: int, rows: Sequence[bool] | None = None) -> Acceptance:
    """Count the rounds of one or more generations; prefills (nothing drafted) are left out.

    Args: rows: whether each row of the batch counts; None: all do."""
    counted = Acceptance.nothing(num_draft_tokens)
    for round_ in rounds:
        if round_.num_drafted == 0:
            continue
        for row, (accepted, committed, offered) in enumerate(row_counts(round_)):
            if committed and (rows is None or rows[row]):
                counted.add(accepted, committed, offered)
    return counted


def row_counts(round_: Round) -> list[tuple[int, int, int]]:
    """For each row the numbers of tokens accepted, committed, and drafted tokens verified."""
    offered = round_.num_offered or [round_.num_drafted] * len(round_.num_accepted)
    return list(zip(round_.num_accepted, round_.num_committed, offered, strict=True))


def row_seconds(round_: Round) -> float:
    """The time of a round that its rows are charged, if each takes an equal part: not that of rows which had ended.

    A server would give their places to other requests."""
    return round_.seconds * sum(num > 0 for num in round_.num_committed) / len(round_.num_committed)


@dataclass(frozen=True)
class Calibration:
    """Calibration of the estimates of drafts that were reached and verified. For each tenth of the estimates: number of
    drafts, mean estimate, and share accepted, None if empty.

    error: the expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3): |estimated - accepted|, averaged
    over the drafts by the tenths that they are in. error_by_chance: what estimates without any error would show on
    average with so few drafts. verified: mean drafts that a round verified per row, those not reached included."""

    num_drafts: list[int]
    estimated: list[float | None]
    accepted: list[float | None]
    error: float | None = None  # the last three are None in older reports
    error_by_chance: float | None = None
    verified: float | None = None


def calibration(rounds: Iterable[Round], *, verified: float | None) -> Calibration | None:
    """The calibration of the estimates of rounds; None if there are none. Args: verified: as `Calibration` has it."""
    every: list[tuple[float, bool]] = []  # of drafts that were reached and verified: the estimate, whether accepted
    for round_ in rounds:
        for (accepted, committed, offered), estimates in zip(row_counts(round_), round_.estimates, strict=False):
            reached = estimates[: min(accepted + 1, committed, offered)]
            every += [(estimate, k < accepted) for k, estimate in enumerate(reached)]
    if not every:
        return None
    tenths: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for pair in every:
        tenths[min(int(10 * pair[0]), 9)].append(pair)
    apart = sum(abs(sum(estimate - is_taken for estimate, is_taken in tenth)) for tenth in tenths)
    # a tenth's accepted drafts are off by a normal number with the variance of so many coins, whose mean size is
    # sqrt(2 / pi) standard deviations
    by_chance = sum(sqrt(2 / pi * sum(estimate * (1 - estimate) for estimate, _ in tenth)) for tenth in tenths)
    return Calibration(
        [len(tenth) for tenth in tenths],
        [round(fmean(estimate for estimate, _ in tenth), 4) if tenth else None for tenth in tenths],
        [round(fmean(is_taken for _, is_taken in tenth), 4) if tenth else None for tenth in tenths],
        round(apart / len(every), 4),
        round(by_chance / len(every), 4),
        verified,
    )


def expected_acceptance(starts: ChainStarts, hits: Tensor, *, num_draft_tokens: int) -> Acceptance:
    """The acceptance that decoding the given text would have had, computed from teacher-forced drafts.

    A round at chain start t accepts the consecutive hits from depth 0 on and commits one token more (the bonus) unless
    the text ends; the next round starts that many positions later. On text that the target itself wrote, greedily or
    sampled, this equals real decoding with greedy drafts; other text is treated as if the target had written it.

    Args:
        starts, hits: from `DraftHead.loss`.
        num_draft_tokens: K, at most the number of depths in `hits`.
    """
    counted = Acceptance.nothing(num_draft_tokens)
    accepted = hits[..., :num_draft_tokens].long().cumprod(-1).sum(-1)  # [B, S]
    room = starts.valid[..., :num_draft_tokens].sum(-1)  # [B, S] supervised tokens that follow, up to K
    for positions, takes, rooms in zip(starts.positions.tolist(), accepted.tolist(), room.tolist(), strict=True):
        rooms_at = dict(zip(positions, rooms, strict=True))
        following = -1
        for t, take, left in zip(positions, takes, rooms, strict=True):
            if left == 0 or t < following:
                continue
            goes_on = left == num_draft_tokens == rooms_at.get(t + 1)  # a token follows even the longest chain
            ends = take == left and not goes_on  # the text's last token was accepted: no bonus
            committed = take + (0 if ends else 1)
            counted.add(take, committed)
            following = t + committed
    return counted


@dataclass(frozen=True)
class Observation:
    """One prompt, or one batch, as the intervals count them: rounds, committed tokens, and the seconds of both sides
    for equal tokens, prefills left out. prompts: their numbers in the suite."""

    prompts: list[int]
    num_rounds: int
    num_committed: int
    baseline_seconds: float
    seconds: float


Sums = tuple[Sequence[float], Sequence[float]]  # a ratio of sums: numerators and denominators, paired


def ratio_and_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, num_choices: int = 1
) -> tuple[float, Ends]:
    """Ratio of sums over paired entries (one per prompt or batch), and its 95 % interval.

    Fewer than LEAST_TIMED entries have no interval, as theirs would say nothing.

    A t interval on the log ratio. Its variance is that of the linearised ratio with leave-one-out weights (HC3,
    MacKinnon & White 1985); its degrees of freedom come from the effective number of entries (Kish 1965), since long
    answers weigh more. With fewer than 8 entries bootstrap intervals are far too narrow: see the simulation in
    docs/log/measurement.md.

    Args: num_choices: ratios of which this one was chosen after the fact; all their intervals together hold with 95 %
        (Bonferroni; Dunn 1961).
    """
    return _interval([numerators], [denominators], num_choices)


def relative_and_interval(first: Sums, second: Sums) -> tuple[float, Ends]:
    """A ratio of sums over another of the same entries, and its 95 % interval, by the method of `ratio_and_interval`.

    It is paired: what makes an entry easy or hard for both moves neither the quotient nor its interval."""
    return _interval([first[0], second[1]], [first[1], second[0]], num_choices=1)


def _interval(
    above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], num_choices: int
) -> tuple[float, Ends]:
    """The product of the sums above over that of the sums below, and its interval."""
    from scipy.special import stdtrit

    ratio = prod(map(sum, above)) / prod(map(sum, below))
    shares_above = [[value / sum(values) for value in values] for values in above]
    shares_below = [[value / sum(values) for value in values] for values in below]
    weights = [fmean(shares) for shares in zip(*shares_above, *shares_below, strict=True)]
    if sum(weight > 0 for weight in weights) < LEAST_TIMED or max(weights) > 1 - 1e-12:
        return ratio, (None, None)
    changes = [  # of the log ratio, by entry
        sum(a) - sum(b) for a, b in zip(zip(*shares_above, strict=True), zip(*shares_below, strict=True), strict=True)
    ]
    variance = sum((change / (1 - weight)) ** 2 for change, weight in zip(changes, weights, strict=True))
    effective = 1 / sum(weight**2 for weight in weights)
    width = float(stdtrit(max(effective - 1, 1.0), 1 - 0.025 / num_choices)) * sqrt(variance)
    width = min(width, WIDEST)
    return ratio, (ratio * exp(-width), ratio * exp(width))


def speedup_of(seconds: Sequence[tuple[float, float]]) -> tuple[float | None, Ends]:
    """Summed baseline time over summed speculative time, and its 95 % interval; None if nothing was timed."""
    if not seconds:
        return None, (None, None)
    ratio, (low, high) = ratio_and_interval(*zip(*seconds, strict=True))
    if low is None or high is None:
        return rounded(ratio), (None, None)
    return rounded(ratio), (max(round(low, 4), 1e-4), round(high, 4))  # never 0: a ratio


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
