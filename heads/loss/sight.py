"""What queries of a row see of its keys, as positions: a mask over all keys takes memory for every pair of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...targets.caches.masks import interval_mask

# queries per block, whose scores exist at a time; smaller blocks skip more of the keys that causality hides
QUERY_BLOCK = {"cpu": 32}
QUERY_BLOCK_ELSEWHERE = 512
# blocks leave out whole parts of so many keys behind a window, as torch's CPU kernel reads keys in such parts
KEY_PART = 512


@dataclass(frozen=True)
class Block:
    """Queries start..stop-1, which see shared keys in begin..extent-1 only."""

    start: int
    stop: int
    extent: int
    begin: int = 0


@dataclass(frozen=True)
class Sight:
    """Which shared keys each query sees: those up to `last`, with a window only the newest of them."""

    last: Tensor  # [B, Q] index in the row
    blocks: Sequence[Block]  # of the queries
    window: int | None = None  # number of keys that end at `last`, 0 or fewer: none; None: no limit

    def mask(self, block: Block, dtype: torch.dtype) -> Tensor:
        """[B, 1, q, extent - begin] additive, of a block's queries over the keys that the block sees."""
        last = self.last[:, block.start : block.stop]
        first = None if self.window is None else last - self.window + 1
        return interval_mask(first, last, extent=block.extent, begin=block.begin, dtype=dtype)

    def behind(self, num: int) -> "Sight":
        """The sight of queries that stand `num` positions behind these, with keys of their own in between."""
        return self if self.window is None else replace(self, window=self.window - num)


def blocks_of(last_seen: Sequence[int], device: torch.device) -> list[Block]:
    """Blocks of queries, given the last shared key that each may see; extents never decrease from block to block."""
    size = QUERY_BLOCK.get(device.type, QUERY_BLOCK_ELSEWHERE)
    blocks, extent = [], 1
    for start in range(0, len(last_seen), size):
        stop = min(start + size, len(last_seen))
        extent = max(extent, *(last + 1 for last in last_seen[start:stop]))
        blocks.append(Block(start, stop, extent))
    return blocks


def behind_window(blocks: Sequence[Block], oldest: Sequence[int], window: int | None) -> list[Block]:
    """Blocks of queries without the keys that a window hides from all of them.

    Args: oldest: for each query, the last key that it sees, the smallest of all rows. window: in tokens; None: none.
    """
    if window is None:
        return list(blocks)
    first = [min(*oldest[block.start : block.stop], block.extent - 1) - window + 1 for block in blocks]
    return [replace(x, begin=max(0, at) // KEY_PART * KEY_PART) for x, at in zip(blocks, first, strict=True)]
