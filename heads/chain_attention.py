"""Attention of unrolled draft chains: one softmax over shared keys and each query's own drafted ones, no scores kept.

A query of the chain at start t attends to the shared keys at positions <= t and, at depth k, to its own keys of depths
1..k. The softmax over both is two of them merged by their log-sum-exps; backward recomputes scores from the merged
log-sum-exp, block by block of queries (as FlashAttention does, Dao et al. 2022), so what a depth keeps is linear in the
number of positions. Query heads that share a key head read one copy of it, and all heads one mask.

Shapes as in base.py; P shared keys, of which a block of queries sees the first `extent`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# queries whose scores exist at a time: the fewer, the more of what causality hides is skipped
QUERY_BLOCK = {"cpu": 32}
QUERY_BLOCK_ELSEWHERE = 512

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Block:
    """Queries start..stop-1, which see no shared key from extent on."""

    start: int
    stop: int
    extent: int


def blocks_of(last_seen: Sequence[int], device: torch.device) -> list[Block]:
    """Blocks of queries, given the last shared key that each may see; later ones see as much as earlier ones."""
    size = QUERY_BLOCK.get(device.type, QUERY_BLOCK_ELSEWHERE)
    blocks, extent = [], 1
    for start in range(0, len(last_seen), size):
        stop = min(start + size, len(last_seen))
        extent = max(extent, *(last + 1 for last in last_seen[start:stop]))
        blocks.append(Block(start, stop, extent))
    return blocks


def attend_chains(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    blocks: Sequence[Block],
    drafted: Sequence[tuple[Tensor, Tensor]] = (),
    scale: float | None = None,
) -> Tensor:
    """[B, N, Q, H]: queries [B, N, Q, H] over keys, values [B, Nkv, P, H] and their own ones, [B, Nkv, Q, H] per depth.

    Args: mask: [B, 1, Q, P] additive, of the shared keys. scale: of the scores; None: 1 / sqrt(H).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    own = [part for pair in drafted for part in pair]
    return ChainAttention.apply(scale, blocks, mask, query, key, value, *own)  # pyright: ignore[reportReturnType]


class ChainAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and its log-sum-exps for backward."""

    @staticmethod
    def forward(
        ctx: Any, scale: float, blocks: Sequence[Block], mask: Tensor, query: Tensor, key: Tensor, value: Tensor, *own
    ) -> Tensor:
        mask = mask.to(query.dtype)
        parts = [shared_forward(block, query, key, value, mask, scale=scale) for block in blocks]
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))  # [B, N, Q, H], [B, N, Q] fp32
        if own:
            scores = [own_scores(query, keys, scale) for keys in own[::2]]  # [B, N, Q] each
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out = out * (lse - merged).exp()[..., None]
            for score, values in zip(scores, own[1::2], strict=True):
                out += grouped(values, out.shape[1]) * (score - merged).exp()[..., None]
            lse, out = merged, out.to(query.dtype)
        ctx.save_for_backward(mask, query, key, value, out, lse, *own)
        ctx.scale, ctx.blocks = scale, blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask, query, key, value, out, lse, *own = ctx.saved_tensors
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (key, value))
        for block in ctx.blocks:
            saved = (grad, query, key, value, out, lse, mask)
            for_query, for_key, for_value = shared_backward(block, *saved, scale=ctx.scale)
            grad_query[:, :, block.start : block.stop] = for_query
            grad_key[:, :, : block.extent] += for_key
            grad_value[:, :, : block.extent] += for_value
        grads: list[Tensor] = []
        if own:
            delta = (grad.float() * out).sum(-1)  # [B, N, Q]
        for keys, values in zip(own[::2], own[1::2], strict=True):
            weights = (own_scores(query, keys, ctx.scale) - lse).exp()  # [B, N, Q]
            scores = weights * ((grouped(values, grad.shape[1]) * grad).float().sum(-1) - delta) * ctx.scale
            grad_query += (scores[..., None] * grouped(keys, query.shape[1])).to(query.dtype)
            grads += [over_groups(scores[..., None] * query, keys), over_groups(weights[..., None] * grad, values)]
        return None, None, None, grad_query, grad_key, grad_value, *grads


def grouped(shared: Tensor, num_heads: int) -> Tensor:
    """[B, Nkv, Q, H] as seen by num_heads query heads, [B, N, Q, H]."""
    groups = num_heads // shared.shape[1]
    return shared if groups == 1 else shared.repeat_interleave(groups, 1)


def over_groups(per_head: Tensor, like: Tensor) -> Tensor:
    """[B, N, Q, H] -> [B, Nkv, Q, H] as `like`: the sum over query heads that share a key head."""
    return per_head.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)


def own_scores(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[B, N, Q] fp32 scores of each query [B, N, Q, H] with its own key [B, Nkv, Q, H]."""
    return (query * grouped(keys, query.shape[1])).float().sum(-1) * scale


def shared_forward(
    block: Block, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """A block's attention over the shared keys it can see, and the log-sum-exps of its scores, [B, N, q] fp32."""
    query, mask = query[:, :, block.start : block.stop], mask[:, :, block.start : block.stop, : block.extent]
    key, value = key[:, :, : block.extent], value[:, :, : block.extent]
    if is_flash(query, value):
        return flash(query, key, value, attn_mask=mask, scale=scale)
    scores = block_scores(query, key, mask, scale)  # [B, Nkv, G, q, extent]
    lse = scores.logsumexp(-1)  # [B, Nkv, G, q]
    weights = scores.sub_(lse[..., None]).exp_().to(query.dtype)
    mixed = (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])  # [B, Nkv, G, q, H of values]
    return mixed.flatten(1, 2), lse.flatten(1, 2)


def shared_backward(
    block: Block,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's queries, and of the keys and values it can see, given the merged output and its lse."""
    grad, query, out, lse = (x[:, :, block.start : block.stop] for x in (grad, query, out, lse))
    mask = mask[:, :, block.start : block.stop, : block.extent]
    key, value = key[:, :, : block.extent], value[:, :, : block.extent]
    if is_flash(query, value):
        return flash_backward(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    weights = block_scores(query, key, mask, scale).sub_(lse.unflatten(1, groups)[..., None]).exp_()
    flat_grad, flat_query = (x.unflatten(1, groups).flatten(2, 3) for x in (grad, query))  # [B, Nkv, G * q, H]
    delta = (grad.float() * out).sum(-1).unflatten(1, groups)[..., None]  # [B, Nkv, G, q, 1]
    scores = (flat_grad @ value.transpose(-1, -2)).float().view(weights.shape)
    scores = scores.sub_(delta).mul_(weights).mul_(scale).to(query.dtype).flatten(2, 3)
    weights = weights.to(query.dtype).flatten(2, 3)
    grad_key, grad_value = (x.transpose(-1, -2) @ y for x, y in ((scores, flat_query), (weights, flat_grad)))
    return (scores @ key).view(query.shape), grad_key, grad_value


def is_flash(query: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel for these: a CPU's, where keys and values are of one size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def block_scores(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, Nkv, G, q, extent] fp32."""
    num_kv_heads, num_queries = key.shape[1], query.shape[2]
    flat = query.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, Nkv, G * q, H]
    scores = (flat @ key.transpose(-1, -2)).unflatten(2, (-1, num_queries)).float() * scale
    return scores.add_(mask[:, :, None])
