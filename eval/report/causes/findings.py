"""What a finding is, and whether one acceptance length is lower than another by more than chance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import attrgetter, mul

from ...figures.environment import TargetInfo
from ...figures.metrics import AcceptancePart
from ...figures.recorded_training import RecordedTraining
from ...measurement.result import Result

LOW_ACCEPTANCE = 0.5  # share of drafted positions that are accepted, below which acceptance counts as low
LEAST_FALL = 0.1  # relative differences of acceptance_length below it are not worth a finding
STANDARD_ERRORS = 3.0


@dataclass(frozen=True)
class Finding:
    """cause: a heading; advice: what it means and what to do, the same for all results. figures: of this result."""

    cause: str
    advice: str
    figures: str


@dataclass(frozen=True)
class Case:
    """A result to explain. peers: all results of our engine in the report. target: what was measured, if known."""

    result: Result
    peers: Sequence[Result] = ()
    target: TargetInfo | None = None

    @property
    def trained(self) -> RecordedTraining:
        """The record of the head's training; empty where there is none."""
        return self.result.trained or RecordedTraining({})

    @property
    def alike(self) -> list[Result]:
        """Peers with the same drafter, batch size, temperature, accept rule and verify cost."""
        key = attrgetter("drafter", "batch_size", "temperature", "accept", "verify_cost")
        return [peer for peer in self.peers if key(peer) == key(self.result)]


Rule = Callable[[Case], Finding | None]
Accepted = Result | AcceptancePart  # acceptance over some rounds


def tokens(part: Accepted) -> str:
    return f"{part.acceptance_length:.2f} tokens per forward"


def accepted_share(case: Case) -> float | None:
    """Accepted drafts per drafted position of a path, 0 to 1; positions beyond those that were trained left out."""
    result = case.result
    if result.acceptance_length is None:
        return None
    depth = min(result.num_draft_tokens, case.trained.num_depths or result.num_draft_tokens)
    part = result if depth == result.num_draft_tokens else at_depth(result, depth)
    return ((part.acceptance_length or 1.0) - 1) / depth


def joint_rates(part: Accepted) -> list[float]:
    """P(the first k + 1 drafts all accepted), per round, from the conditional rates."""
    return list(accumulate((rate or 0.0 for rate in part.acceptance_rate), mul))


def at_depth(part: Accepted, depth: int) -> AcceptancePart:
    """The acceptance of a chain of `depth` drafts: the rates are conditional, so K does not change them.

    The length is computed from the rates, without the tokens that a text's end takes off last rounds."""
    length = 1 + sum(joint_rates(part)[:depth])
    return AcceptancePart(part.num_rounds, length, part.acceptance_rate[:depth])


def merged(parts: Sequence[Accepted]) -> AcceptancePart | None:
    """Several parts of a result together; None if they have no round."""
    total = sum(part.num_rounds for part in parts)
    if not total:
        return None
    counts = zip(*([part.num_rounds * share for share in [1.0, *joint_rates(part)]] for part in parts), strict=True)
    reached = [sum(at_depth) for at_depth in counts]  # by k, rounds in which at least k drafts were accepted
    rates = [taken / tried if tried else None for tried, taken in zip(reached, reached[1:], strict=False)]
    return AcceptancePart(total, sum(part.num_rounds * (part.acceptance_length or 0) for part in parts) / total, rates)


def standard_error(part: Accepted) -> float:
    """Standard error of an acceptance_length, in tokens, from its rates, assuming independent rounds."""
    reached, mean, square = 1.0, 0.0, 0.0
    for accepted, rate in enumerate([*(rate or 0.0 for rate in part.acceptance_rate), 0.0]):
        probability = reached * (1 - rate)  # of exactly this many accepted drafts
        mean, square, reached = mean + probability * accepted, square + probability * accepted**2, reached * rate
    return sqrt(max(square - mean**2, 0.0) / max(part.num_rounds, 1))


def is_lower(part: Accepted, than: Accepted) -> bool:
    """Whether an acceptance_length is below another by a tenth, and by more than chance explains."""
    low, high = part.acceptance_length, than.acceptance_length
    if not low or not high or low > (1 - LEAST_FALL) * high:
        return False
    return high - low > STANDARD_ERRORS * sqrt(standard_error(part) ** 2 + standard_error(than) ** 2)


def validated(case: Case) -> AcceptancePart | None:
    """The validation at the end of the head's training; None if there was none, or it is not known.

    The lower of its teacher-forced and its decoded length: where rows are not what the target writes, the two differ,
    and only what is below both is below what the head has reached.
    """
    validation = case.trained.validation
    parts = (validation, validation.decoded) if validation else ()
    return min((part for part in parts if part and part.acceptance_length), key=sortable_length, default=None)


def sortable_length(part: Accepted) -> float:
    return part.acceptance_length or 0.0


def below_validation(case: Case, part: Accepted | None = None) -> str | None:
    """The figures in words, where the result, or a part of it, has a lower length than the validation; else None.

    Where one has more drafts than the other, both are taken over as many as the shorter has.
    """
    before, now = validated(case), part or case.result
    if before is None or now.acceptance_length is None:
        return None
    depth, over = min(len(before.acceptance_rate), len(now.acceptance_rate)), ""
    if len(before.acceptance_rate) != len(now.acceptance_rate):
        before, now, over = at_depth(before, depth), at_depth(now, depth), f", of {depth} drafts each"
    if not is_lower(now, before):
        return None
    return f"{tokens(now)} here, {tokens(before)} in the validation of its training{over}"


def low_acceptance(case: Case) -> str | None:
    """The figures in words, where acceptance is below validation or, without a validation, low; else None."""
    share = accepted_share(case)
    if share is None or validated(case):
        return None if share is None else below_validation(case)
    return tokens(case.result) if share < LOW_ACCEPTANCE else None
