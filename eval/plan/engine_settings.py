"""A plan as serving engines take it: vLLM's K by batch size, SGLang's flags."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...heads.drafting import DynamicTree, StaticTree
from ...heads.export.write import sglang_flags
from .prediction import LEAST_GAIN, Accepted, StepTimes, recommend, speedup, steady_speedup


def measured_lengths(cells: Sequence[dict[str, Any]]) -> dict[int, int]:
    """K of the fastest chain at each batch size where chains were measured; 0 where none is faster than no drafts."""
    chains = [one for one in cells if one["measured_speedup"] and one["tree"] == "chain"]
    return {
        advice["batch_size"]: 0 if advice["off"] else advice["num_draft_tokens"]
        for advice in recommend(chains)
        if advice["load"] == "prompts"
    }


def schedule(
    accepted: Sequence[Accepted],
    times: StepTimes,
    *,
    max_batch_size: int,
    context: float,
    measured: Mapping[int, int] | None = None,
) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [from, to, K] over batch sizes, both included; K = 0 is off.

    Of chains only, by the speedup with all rows busy. K is kept from one batch size to the next while it is within
    LEAST_GAIN of the best, so that it does not change back and forth.

    Args: measured: K by batch size, which stands; between two of them only theirs are chosen from.
    """
    known = {one.setting.num_draft_tokens: one for one in accepted if one.setting.tree is None}
    measured = measured or {}
    ranges: list[list[int]] = []
    for size in range(1, max_batch_size + 1):
        below, above = range(size, 0, -1), range(size, max_batch_size + 1)
        around = {next((at for at in order if at in measured), None) for order in (below, above)}
        lengths = {0, *known} if None in around else {measured[at] for at in around if at is not None}
        gains = {
            length: steady_speedup(known[length], times, batch_size=size, context=context) if length else 1.0
            for length in lengths
        }
        best = max(gains, key=lambda length: (gains[length], -length))
        kept = ranges[-1][2] if ranges else best
        if kept in gains and gains[kept] >= gains[best] * (1 - LEAST_GAIN):
            best = kept
        if ranges and ranges[-1][2] == best:
            ranges[-1][1] = size
        else:
            ranges.append([size, size, best])
    return ranges


def for_sglang(accepted: Sequence[Accepted], cells: Sequence[dict[str, Any]], family: str) -> str | None:
    """SGLang's flags for the best setting over all batch sizes, by geometric mean; it has one for all.

    Of chains and dynamic trees, which it drafts. None where it does not load the family, or nothing helps.
    """
    gains: dict[str, float] = {}
    for one in cells:
        if one["load"] == "prompts":
            gains[one["setting"]] = gains.get(one["setting"], 1.0) * speedup(one)
    known = [one.setting for one in accepted if not isinstance(one.setting.tree, StaticTree)]
    best = max(known, key=lambda setting: gains[setting.name], default=None)
    if best is None or gains[best.name] <= 1:
        return None
    folder = "" if family == "mtp" else "HEAD"
    if isinstance(best.tree, DynamicTree):
        size = best.tree.num_nodes
        return sglang_flags(family, best.num_draft_tokens, folder=folder, top_k=best.tree.top_k, num_nodes=size)
    return sglang_flags(family, best.num_draft_tokens, folder=folder)
