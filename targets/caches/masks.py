"""Additive attention masks, from the positions that each query sees."""

from typing import cast

import torch
from torch import Tensor


def first_visible(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first position that queries at `positions` (any shape) see, with a sliding window or in chunks, as below."""
    return positions - window + 1 if window is not None else positions - positions % cast(int, chunk)


def visibility_mask(
    positions: Tensor, *, extent: int, dtype: torch.dtype, window: int | None = None, chunk: int | None = None
) -> Tensor:
    """The additive attention mask of queries at `positions` over slots 0..extent-1.

    Additive floats, because a boolean 4D mask is silently wrong under transformers' eager attention.

    Args:
        positions: [B, Q].
        window: with a sliding window of W tokens, a query at p sees p-W+1..p. chunk: in chunks of C tokens, it sees
            those of its own chunk up to p.

    Returns: [B, 1, Q, extent], 0 where visible and the dtype's minimum elsewhere.
    """
    is_limited = window is not None or chunk is not None
    first = first_visible(positions, window, chunk) if is_limited else None
    return interval_mask(first, positions, extent=extent, dtype=dtype)


def interval_mask(first: Tensor | None, last: Tensor, *, extent: int, dtype: torch.dtype, begin: int = 0) -> Tensor:
    """The additive mask [B, 1, Q, extent - begin] of queries that see first..last [B, Q], over slots begin..extent-1.

    Args: first: None: from the first slot on.
    """
    slots = torch.arange(begin, extent, dtype=last.dtype, device=last.device)
    hidden = slots > last[:, None, :, None]  # [B, 1, Q, extent - begin]
    if first is not None:
        hidden |= slots < first[:, None, :, None]
    return hiding(hidden, dtype=dtype)


def hiding(hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The additive mask of hidden positions (bool, any shape): the dtype's minimum where hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)
