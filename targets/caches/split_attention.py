"""Masked attention of few queries over a cache; on a GPU the parts of a long cache are read in parallel."""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_PART, LARGE_PART = 64, 128  # slots per part of a cache
LONG = 2048  # slots from which parts are large
FEWEST_FUSED = 2 * SMALL_PART  # slots that compiled layers read in parts
FEWEST = 1024  # slots that others do: there each step over the parts is a launch of its own
ENOUGH_BLOCKS = 64  # thread blocks: rows times key heads that keep a GPU busy without parts
MOST_QUERIES = 256  # per key head; more keep a GPU busy without parts


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention [B, Nkv, M, H] of queries of that shape over keys and values [B, Nkv, P, H]; mask [B, 1, M, P]."""
    if query.is_cuda and reads_in_parts(query, key):
        return attention_in_parts(query, key, value, mask, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def reads_in_parts(query: Tensor, key: Tensor) -> bool:
    """Whether one block per key head and row would leave most of a GPU idle, and parts gain more than they cost.

    Args: query: [B, Nkv, M, H]. key: [B, Nkv, P, H].
    """
    num_thread_blocks, num_slots = key.shape[0] * key.shape[1], key.shape[2]
    fewest = FEWEST_FUSED if torch.compiler.is_compiling() else FEWEST
    is_long = num_slots >= fewest and num_slots % SMALL_PART == 0
    return is_long and num_thread_blocks < ENOUGH_BLOCKS and query.shape[2] <= MOST_QUERIES


def part_size(num_slots: int) -> int:
    """Slots per part; an H200's times by size: docs/log/gpu.md, 2026-11-28."""
    return LARGE_PART if num_slots >= LONG and num_slots % LARGE_PART == 0 else SMALL_PART


def attention_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None
) -> Tensor:
    """`masked_attention` in parts: each part has its own softmax and is weighted by its share of the whole softmax's
    denominator (Flash-Decoding, Dao et al. 2023)."""
    mixed, size = [], part_size(key.shape[2])
    for queries, keys, values, hidden in zip(query, key, value, mask, strict=True):  # by row, to split without a copy
        keys, values = (x.unflatten(1, (-1, size)).transpose(0, 1) for x in (keys, values))  # [C, Nkv, P / C, H]
        hidden = hidden.unflatten(-1, (-1, size)).permute(2, 0, 1, 3)  # [C, 1, M, P / C]
        queries = queries.expand(len(keys), -1, -1, -1)
        parts, normalisers = with_normalisers(queries, keys, values, hidden.expand(-1, keys.shape[1], -1, -1), scale)
        normalisers = normalisers[..., None]
        if torch.compiler.is_compiling():  # of the parts' shape, so that one kernel has the softmax and the sum
            normalisers = normalisers.expand_as(parts)
        mixed.append((parts.float() * normalisers.softmax(0)).sum(0))  # [Nkv, M, H]
    return torch.stack(mixed).to(query.dtype)


def with_normalisers(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [C, Nkv, M, H], and the log-sum-exps of its scores [C, Nkv, M] fp32."""
    if query.is_cuda:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        mixed, normalisers, *_ = kernel(query, key, value, mask, True, scale=scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, normalisers = kernel(query, key, value, attn_mask=mask, scale=scale)
    return mixed, normalisers[..., : query.shape[2]].float()  # padded to whole blocks on a GPU
