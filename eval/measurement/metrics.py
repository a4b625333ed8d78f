"""The definitions, from raw per-round records. docs/report_schema.md says them in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt

from torch import Tensor

from ...heads.base import ChainStarts
from ..generate import Round

LEAST_TIMED = 4  # prompts or batches from which the intervals hold what they promise


@dataclass
class Acceptance:
    """Counts over rounds; a row of a batch counts as a round of its own while it is active, the prefill never."""

    num_rounds: int  # target forwards
    num_committed: int  # tokens they gave, bonus tokens included
    tried: list[int]  # how often each draft position was reached: all before it accepted, the text not ended
    taken: list[int]  # and how often it was accepted

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
        """acceptance_rate[k]: P(draft position k accepted | reached); None where never reached."""
        return [taken / tried if tried else None for taken, tried in zip(self.taken, self.tried, strict=True)]

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Of both together, drafts of one length."""
        tried, taken = zip(self.tried, other.tried, strict=True), zip(self.taken, other.taken, strict=True)
        rounds, committed = self.num_rounds + other.num_rounds, self.num_committed + other.num_committed
        return Acceptance(rounds, committed, [a + b for a, b in tried], [a + b for a, b in taken])

    def add(self, accepted: int, committed: int) -> None:
        """One round of one row."""
        self.num_rounds += 1
        self.num_committed += committed
        for k in range(min(accepted + 1, len(self.tried), committed)):
            self.tried[k] += 1
            self.taken[k] += k < accepted


def acceptance(rounds: Iterable[Round], *, num_draft_tokens: int) -> Acceptance:
    """Count the rounds of one or more generations; prefills (nothing drafted) are left out."""
    counted = Acceptance.nothing(num_draft_tokens)
    for round_ in rounds:
        if round_.num_drafted == 0:
            continue
        for accepted, committed in zip(round_.num_accepted, round_.num_committed, strict=True):
            if committed:
                counted.add(accepted, committed)
    return counted


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
