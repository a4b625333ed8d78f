"""Masked attention of many queries on a CPU, as of a prompt: a block of queries reads only the keys that any of them
sees, so that a causal mask costs half and a sliding window costs its width."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FEWEST_QUERIES = 128  # fewer are verified drafts, which share their keys by groups
QUERY_BLOCK = 256
KEY_STEP = 64  # what a block reads begins at a multiple

_ranges = WeakTensorKeyDictionary()  # by mask, which all layers of a kind are given


def is_prompt(query: Tensor) -> bool:
    """Whether queries [B, N, Q, H] are at least FEWEST_QUERIES, on a CPU, and not being compiled."""
    return query.device.type == "cpu" and query.shape[2] >= FEWEST_QUERIES and not torch.compiler.is_compiling()


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention [B, N, Q, H of values] of queries [B, N, Q, H] over keys and values [B, Nkv, P, ...]; the mask
    [B, 1, Q, P] is additive or bool."""
    groups, mixed = query.shape[1] // key.shape[1], list[Tensor]()
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    queries, masks = (x.split(QUERY_BLOCK, 2) for x in (query, mask))
    for block, hidden, (begin, end) in zip(queries, masks, ranges_of(mask), strict=True):
        keys, values, hidden = key[:, :, begin:end], value[:, :, begin:end], hidden[..., begin:end]
        mixed.append(F.scaled_dot_product_attention(block, keys, values, attn_mask=hidden, scale=scale))
    return torch.cat(mixed, 2)


def ranges_of(mask: Tensor) -> list[tuple[int, int]]:
    """Per block of queries of a mask [B, 1, Q, P] the keys begin..end-1, outside of which none of them sees any."""
    if (known := _ranges.get(mask)) is None:
        known = _ranges[mask] = [range_of(block) for block in mask.split(QUERY_BLOCK, 2)]
    return known


def range_of(block: Tensor) -> tuple[int, int]:
    """`ranges_of` of one block [B, 1, q, P]; of queries that see nothing, as those of padding, all keys."""
    seen = block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min
    at = seen.flatten(0, 2).any(0).nonzero()
    return (int(at[0]) // KEY_STEP * KEY_STEP, int(at[-1]) + 1) if len(at) else (0, block.shape[-1])
