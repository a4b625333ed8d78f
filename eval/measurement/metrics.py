"""The definitions, from raw per-round records. docs/report_schema.md says them in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import fmean

from torch import Tensor

from ...heads.base import ChainStarts
from ..generate import Round

LEAST_TIMED = 4  # prompts or batches from which the intervals hold what they promise


@dataclass
class Acceptance:
    """Counts over rounds; a row of a batch counts as a round of its own while it is active, the prefill never."""

    num_rounds: int  # target forwards
    num_committed: int  # tokens they gave, bonus tokens included
    # how often each draft position was reached: all before it accepted, the text not ended, and the draft verified
    tried: list[int]
    taken: list[int]  # and how often it was accepted
    num_offered: int = 0  # drafts that were verified

    @classmethod
    def nothing(cls, num_draft_tokens: int) -> "Acceptance":
        """Of no round."""
        return cls(0, 0, [0] * num_draft_tokens, [0] * num_draft_tokens)

    @property
    def length(self) -> float | None:
        """acceptance_length: mean tokens committed per target forward, bonus token included."""
        return self.num_committed / self.num_rounds if self.num_rounds else None

    @property
    def rate(self) -> list[float | None]:
        """acceptance_rate[k]: P(draft position k accepted | reached and verified); None where never reached."""
        return [taken / tried if tried else None for taken, tried in zip(self.taken, self.tried, strict=True)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Of both together, drafts of one length."""
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


def acceptance(rounds: Iterable[Round], *, num_draft_tokens: int) -> Acceptance:
    """Count the rounds of one or more generations; prefills (nothing drafted) are left out."""
    counted = Acceptance.nothing(num_draft_tokens)
    for round_ in rounds:
        if round_.num_drafted == 0:
            continue
        for accepted, committed, offered in row_counts(round_):
            if committed:
                counted.add(accepted, committed, offered)
    return counted


def row_counts(done: Round) -> list[tuple[int, int, int]]:
    """Of each row: tokens accepted, committed, and drafted ones verified."""
    offered = done.num_offered or [done.num_drafted] * len(done.num_accepted)
    return list(zip(done.num_accepted, done.num_committed, offered, strict=True))


@dataclass(frozen=True)
class Calibration:
    """Drafts that were reached and verified, by tenths of their estimates: `num_drafts` with an estimate in each, the
    mean `estimated`, and the share `accepted`, None where there are none. brier: the mean of (estimate - accepted)^2
    (Brier 1950); 0 is to know, 0.25 is to say a half to everything."""

    brier: float
    num_drafts: list[int]
    estimated: list[float | None]
    accepted: list[float | None]


def calibration(rounds: Iterable[Round]) -> Calibration | None:
    """How true the estimates of rounds were; None where there were none."""
    tenths: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for done in rounds:
        for (accepted, committed, offered), estimates in zip(row_counts(done), done.estimates, strict=False):
            for k, estimate in enumerate(estimates[: min(accepted + 1, committed, offered)]):
                tenths[min(int(10 * estimate), 9)].append((estimate, k < accepted))
    every = [pair for pairs in tenths for pair in pairs]
    if not every:
        return None
    means = [[round(fmean(each), 4) for each in zip(*pairs, strict=True)] or [None, None] for pairs in tenths]
    brier = fmean((estimate - is_taken) ** 2 for estimate, is_taken in every)
    estimated, accepted_share = zip(*means, strict=True)
    return Calibration(round(brier, 4), list(map(len, tenths)), list(estimated), list(accepted_share))


def expected_acceptance(starts: ChainStarts, hits: Tensor, *, num_draft_tokens: int) -> Acceptance:
    """What decoding the given text would have counted, from teacher-forced drafts: the rounds are walked.

    A round at chain start t accepts the run of hits from depth 0 on, commits one more (the bonus) unless the text ends,
    and the next round starts that many positions on. On text that the target itself wrote, greedily or sampled, this
    equals real decoding with greedy drafts; on other text it answers as if the target had written it.

    Args:
        starts, hits: of `DraftHead.loss`.
        num_draft_tokens: K, at most the depths that were unrolled.
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


def ratio_and_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, list[float] | list[None]]:
    """Ratio of sums over paired entries (one per prompt or batch), and its 95 % interval; of one entry there is none.

    A t interval on the log ratio. Its variance is that of the linearised ratio, each entry's deviation divided by what
    the others weigh, as leaving it out would have it (HC3: MacKinnon & White 1985); its degrees of freedom are those of
    the effective number of entries (Kish 1965), since long answers weigh more. Below 8 entries bootstraps are far too
    narrow: docs/LOG.md has the simulation.
    """
    from scipy.special import stdtrit

    above, below = sum(numerators), sum(denominators)
    shares = [(a / above, b / below) for a, b in zip(numerators, denominators, strict=True)]
    weights = [(a + b) / 2 for a, b in shares]
    if max(weights) > 1 - 1e-12:  # nothing but one entry
        return above / below, [None, None]
    variance = sum(((a - b) / (1 - weight)) ** 2 for (a, b), weight in zip(shares, weights, strict=True))
    effective = 1 / sum(weight**2 for weight in weights)
    width = float(stdtrit(max(effective - 1, 1.0), 0.975)) * sqrt(variance)
    return above / below, [above / below * exp(-width), above / below * exp(width)]
