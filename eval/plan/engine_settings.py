"""A plan as serving engines take it: vLLM's K by batch size, SGLang's and llama-server's flags."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ...engines import llamacpp, sglang
from ...heads.base import DraftHead
from ...heads.drafting.trees import DynamicTree
from ...heads.drafting.windowed import Windowed
from ..decoding.draft_setting import DraftSetting
from ..measurement.step_times import StepTable
from ..report.results.one_result import grouped
from .prediction import LEAST_GAIN, Accepted, Cell, recommend_cells, steady_speedup


class ScheduleRange(NamedTuple):
    """K = num_draft_tokens from batch size `first` to `last`, both included; 0 is off."""

    first: int
    last: int
    num_draft_tokens: int


def measured_lengths(cells: Sequence[Cell]) -> dict[int, int]:
    """K of the fastest chain at each batch size where chains were measured; 0 where none is faster than no drafts."""
    chains = [cell for cell in cells if cell.measured_speedup and is_fixed_chain(cell.setting)]
    return {
        advice.cell.batch_size: 0 if advice.is_off else advice.cell.setting.num_draft_tokens
        for advice in recommend_cells(chains)
    }


def schedule_for_vllm(
    accepted: Sequence[Accepted],
    times: StepTable,
    *,
    batch_sizes: Sequence[int],
    context: float,
    measured: Mapping[int, int] = {},
) -> list[ScheduleRange]:
    """vLLM's `num_speculative_tokens_per_batch_size`, by the speedup of chains with all rows busy.

    K is kept from one batch size to the next while it is within LEAST_GAIN of the best, so that it does not change back
    and forth. Of fewer rows than were planned for nothing is known: vLLM wants a K there, and gets that of the fewest.

    Args:
        batch_sizes: those planned for.
        measured: K by batch size, which is kept; between two of them only theirs are chosen from.
    """
    chains = {one.setting.num_draft_tokens: one for one in accepted if one.setting.tree is None}
    ranges: list[ScheduleRange] = []
    for size in range(min(batch_sizes), max(batch_sizes) + 1):
        below = next((at for at in range(size, 0, -1) if at in measured), None)
        above = next((at for at in range(size, max(batch_sizes) + 1) if at in measured), None)
        lengths = {0, *chains} if below is None or above is None else {measured[below], measured[above]}
        gains = dict.fromkeys(lengths, 1.0)
        for length in lengths - {0}:
            gains[length] = steady_speedup(chains[length], times, batch_size=size, context=context)
        best = max(gains, key=lambda length: (gains[length], -length))
        previous = ranges[-1].num_draft_tokens if ranges else best
        if previous in gains and gains[previous] >= gains[best] * (1 - LEAST_GAIN):
            best = previous
        if ranges and previous == best:
            ranges[-1] = ranges[-1]._replace(last=size)
        else:
            ranges.append(ScheduleRange(size if ranges else 1, size, best))
    return ranges


def is_fixed_chain(setting: DraftSetting) -> bool:
    """Whether every round drafts and verifies the same number of tokens."""
    return setting.tree is None and setting.verify_cost is None


def for_sglang(cells: Sequence[Cell], head: DraftHead | None) -> str | None:
    """SGLang's flags for the best setting over all batch sizes, by geometric mean; it has one for all.

    Of chains and dynamic trees, which it drafts. None if it does not draft so, or nothing helps.
    """
    has_trees = head is not None and head.method not in sglang.CHAINS
    best = best_for_all(cells, lambda one: (has_trees and isinstance(one.tree, DynamicTree)) or is_fixed_chain(one))
    if best is None or head is None:
        return None
    top_k, num_nodes = (best.tree.top_k, best.tree.num_nodes) if isinstance(best.tree, DynamicTree) else (1, 0)
    told = sglang.flags(head.method, best.num_draft_tokens, folder="HEAD", top_k=top_k, num_nodes=num_nodes)
    window = sglang.window_flags(head.method, head.draft_window if isinstance(head, Windowed) else None)
    return None if told is None or window is None else told + window


def for_llamacpp(cells: Sequence[Cell], head: DraftHead | None) -> str | None:
    """llama-server's flags for the best chain over all batch sizes; None where `for_sglang` gives none."""
    best = best_for_all(cells, is_fixed_chain)
    if best is None or head is None or getattr(head, "draft_window", None):
        return None
    return llamacpp.flags(head.method, best.num_draft_tokens, file="HEAD.gguf")


def best_for_all(cells: Sequence[Cell], is_drafted: Callable[[DraftSetting], bool]) -> DraftSetting | None:
    """The setting with the highest geometric mean speedup, of those that an engine drafts and that were measured at the
    most batch sizes; None if none helps."""
    drafted = [cell for cell in cells if is_drafted(cell.setting)]

    def rank(same: Sequence[Cell]) -> tuple[int, float]:
        """Measured ones first, as a lower end cannot be held against what is only predicted."""
        return sum(cell.measured_speedup is not None for cell in same), prod(cell.ranked_speedup for cell in same)

    best = max(grouped(drafted, lambda cell: cell.setting).values(), key=rank, default=None)
    return None if best is None or prod(cell.assured_speedup for cell in best) <= 1 else best[0].setting
