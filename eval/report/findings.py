"""What a finding is, and how acceptance lengths are compared: by their standard errors, over equally many drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

from .recommendation import Result

LOW_ACCEPTANCE = 0.5  # share of drafted positions that are accepted, below which acceptance counts as low
LEAST_FALL = 0.1  # relative differences of acceptance_length below it are not worth a finding
STANDARD_ERRORS = 3.0


@dataclass(frozen=True)
class Finding:
    """cause, advice: a heading, and what it means, alike for all results. words: the figures of one that say so."""

    cause: str
    advice: str
    words: str


Rule = Callable[[Result, Sequence[Result]], Finding | None]


def trained(entry: Result) -> dict[str, Any]:
    """What the head says of its training; empty where it says nothing."""
    return entry.get("trained") or {}


def accepted_share(entry: Result) -> float | None:
    """Accepted drafts per drafted position of a path, 0 to 1; positions beyond those that were trained left out."""
    if entry["acceptance_length"] is None:
        return None
    most = entry["num_draft_tokens"]
    depth = min(most, trained(entry).get("num_depths", most))
    length = entry["acceptance_length"] if depth == most else at_depth(entry, depth)["acceptance_length"]
    return (length - 1) / depth


def tokens(part: dict[str, Any]) -> str:
    """An acceptance_length in words."""
    return f"{part['acceptance_length']:.2f} tokens per forward"


def joint(part: dict[str, Any]) -> list[float]:
    """P(the first k + 1 drafts all accepted), per round, from the conditional rates."""
    return list(accumulate((rate or 0.0 for rate in part["acceptance_rate"]), mul))


def at_depth(part: dict[str, Any], depth: int) -> dict[str, Any]:
    """The figures that a chain of so many drafts would have had: the rates are conditional, so K does not change them.

    The length is that of the rates, without the tokens that a text's end takes off last rounds."""
    short = {"num_rounds": part["num_rounds"], "acceptance_rate": part["acceptance_rate"][:depth]}
    return {**short, "acceptance_length": 1 + sum(joint(short))}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Several parts of one result as one; None where they have no round."""
    total = sum(part["num_rounds"] for part in parts)
    if not total:
        return None
    counts = zip(*([part["num_rounds"] * one for one in [1.0, *joint(part)]] for part in parts), strict=True)
    reached = [sum(each) for each in counts]  # rounds in which so many drafts were accepted
    rates = [taken / tried if tried else None for tried, taken in zip(reached, reached[1:], strict=False)]
    length = sum(part["num_rounds"] * part["acceptance_length"] for part in parts) / total
    return {"num_rounds": total, "acceptance_length": length, "acceptance_rate": rates}


def standard_error(part: dict[str, Any]) -> float:
    """Of an acceptance_length, from its rates: rounds taken as independent. Tokens."""
    reached, mean, square = 1.0, 0.0, 0.0
    for accepted, rate in enumerate([*(rate or 0.0 for rate in part["acceptance_rate"]), 0.0]):
        chance = reached * (1 - rate)  # of exactly so many accepted drafts
        mean, square, reached = mean + chance * accepted, square + chance * accepted**2, reached * rate
    return sqrt(max(square - mean**2, 0.0) / max(part["num_rounds"], 1))


def is_lower(part: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether an acceptance_length lies below another by a tenth, and by more than chance explains."""
    low, high = part["acceptance_length"], than["acceptance_length"]
    if not low or not high or low > (1 - LEAST_FALL) * high:
        return False
    return high - low > STANDARD_ERRORS * sqrt(standard_error(part) ** 2 + standard_error(than) ** 2)


def validated(entry: Result) -> dict[str, Any] | None:
    """The figures of the validation at the end of the head's training; None where it says of none.

    Of what it taught and what it decoded the lower: where rows are not what the target writes, the two part, and only
    what lies below both is below what the head was seen to reach.
    """
    validation = trained(entry).get("validation") or {}
    known = [one for one in (validation, validation.get("decoded")) if one and one["acceptance_length"]]
    return min(known, key=lambda one: one["acceptance_length"], default=None)


def below_validation(entry: Result, part: dict[str, Any] | None = None) -> str | None:
    """The figures, where a result, or a part of it, has a lower length than the validation; None where it has not.

    Where one has more drafts than the other, both are taken over as many as the shorter has.
    """
    before, now = validated(entry), part or entry
    if before is None or now["acceptance_length"] is None:
        return None
    there, here = len(before["acceptance_rate"]), len(now["acceptance_rate"])
    depth, over = min(there, here), ""
    if there != here:
        before, now, over = at_depth(before, depth), at_depth(now, depth), f", of {depth} drafts each"
    if not is_lower(now, before):
        return None
    return f"{tokens(now)} here, {tokens(before)} in the validation of its training{over}"


def same_but(entry: Result, peers: Sequence[Result], key: str) -> list[Result]:
    """Peers that differ in one key and agree in all else that was chosen."""
    chosen = {"drafter", "suite", "tree", "num_draft_tokens", "temperature", "accept", "batch_size"} - {key}
    return [one for one in peers if one[key] != entry[key] and all(one[name] == entry[name] for name in chosen)]


def is_twin(one: Result, entry: Result) -> bool:
    """Whether two results have the same drafter, suite, batch size and sampling."""
    return all(one[key] == entry[key] for key in ("drafter", "suite", "batch_size", "temperature", "accept"))
