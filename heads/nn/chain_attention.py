"""Attention of unrolled draft chains: one softmax over shared keys and each query's own drafted keys, scores not kept.

A query of the chain at start t attends to the shared keys at positions <= t and, at depth k, to its own keys of depths
1..k. The two softmaxes are merged by their log-sum-exps. Backward recomputes scores from the merged log-sum-exp, one
block of queries at a time (as FlashAttention does, Dao et al. 2022), and masks are made for a block at a time too, so
the memory that a depth keeps is linear in the number of positions. Query heads that share a key head read one copy of
it, and all heads share one mask.

Shapes as in base.py, with P shared keys, of which a block of queries sees those in begin..extent-1.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..loss.fusing import Fusable
from ..loss.sight import Block, Sight

# elements of the products of queries with one own key each that exist at a time; on a CPU few enough for its cache
OWN_PRODUCTS = {"cpu": 2**19}
OWN_PRODUCTS_ELSEWHERE = 2**24

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_recomputing = 0  # number of open `recomputing` contexts in the process; not thread-local, as backward has own threads


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark what backward recomputes instead of keeping, so that it is not counted as the model's own operations."""
    global _recomputing
    _recomputing += 1
    try:
        yield
    finally:
        _recomputing -= 1


def is_recomputing() -> bool:
    return _recomputing > 0


def attend_chains(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    *,
    drafted: Sequence[tuple[Tensor, Tensor]] = (),
    scale: float | None = None,
) -> Tensor:
    """Attention [B, N, Q, H] of queries [B, N, Q, H] over shared keys and values [B, Nkv, P, H] and the queries' own.

    Args:
        sight: of the queries, over the shared keys.
        drafted: per depth the queries' own keys and values, [B, Nkv, Q, H] each.
        scale: of the scores; None: 1 / sqrt(H).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    own = [part for pair in drafted for part in pair]
    return ChainAttention.apply(scale, sight, query, key, value, *own)  # pyright: ignore[reportReturnType]


class ChainAttention(torch.autograd.Function):
    """`attend_chains`; keeps queries, keys, values, the output and its log-sum-exps for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        sight: Sight,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *own: Tensor,
    ) -> Tensor:
        parts = [shared_forward(block, query, key, value, sight, scale=scale) for block in sight.blocks]
        out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))  # [B, N, Q, H], [B, N, Q] fp32
        if own:
            out = out.contiguous()
            for at in spans(query):
                shared, normaliser, queries = (x[:, :, at] for x in (out, lse, query))
                merged = with_own(shared, normaliser, queries, [x[:, :, at] for x in own], scale=scale)
                out[:, :, at], lse[:, :, at] = merged
        ctx.save_for_backward(query, key, value, out, lse, *own)
        ctx.scale, ctx.sight = scale, sight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, *own = ctx.saved_tensors
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (key, value))
        for block in ctx.sight.blocks:
            saved = (grad, query, key, value, out, lse)
            for_query, for_key, for_value = shared_backward(block, saved, ctx.sight, scale=ctx.scale)
            grad_query[:, :, block.start : block.stop] = for_query
            grad_key[:, :, block.begin : block.extent] += for_key
            grad_value[:, :, block.begin : block.extent] += for_value
        grads = [torch.empty_like(x) for x in own]
        for at in spans(query) if own else ():
            parts = [x[:, :, at] for x in (grad, query, out, lse)]
            for_query, for_own = own_backward(parts, [x[:, :, at] for x in own], scale=ctx.scale)
            grad_query[:, :, at] += for_query
            for whole, part in zip(grads, for_own, strict=True):
                whole[:, :, at] = part
        return None, None, grad_query, grad_key, grad_value, *grads


def spans(query: Tensor) -> Iterator[slice]:
    """Queries [B, N, Q, H] in spans, whose products with their own keys exist at a time."""
    num_rows, num_heads, num_queries, head_dim = query.shape
    most = OWN_PRODUCTS.get(query.device.type, OWN_PRODUCTS_ELSEWHERE)
    size = max(1, most // (num_rows * num_heads * head_dim))
    return (slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size))


def with_own(out: Tensor, lse: Tensor, query: Tensor, own: Sequence[Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over the shared keys [B, N, Q, H] and its log-sum-exps [B, N, Q], merged with that over own keys and
    values, in turns [B, Nkv, Q, H] each."""
    num_kv_heads = own[0].shape[1]
    queries, lse = by_channel(query, num_kv_heads), lse.unflatten(1, (num_kv_heads, -1))
    scores = [own_scores(queries, by_channel(keys), scale) for keys in own[::2]]  # [B, Nkv, G, Q] each
    merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
    mixed = by_channel(out, num_kv_heads) * (lse - merged).exp()[..., None, :]  # [B, Nkv, G, H, Q]
    for score, values in zip(scores, own[1::2], strict=True):
        mixed += by_channel(values) * (score - merged).exp()[..., None, :]
    return mixed.flatten(1, 2).transpose(-1, -2).to(query.dtype), merged.flatten(1, 2)


def own_backward(saved: Sequence[Tensor], own: Sequence[Tensor], *, scale: float) -> tuple[Tensor, list[Tensor]]:
    """What own keys add to the gradient of queries, and the gradients of own keys and values.

    Args: saved: the output's gradient, queries, the merged output and its log-sum-exps.
    """
    grad, query, out, lse = saved
    num_kv_heads, grads = own[0].shape[1], list[Tensor]()
    queries, grad, out = (by_channel(x, num_kv_heads) for x in (query, grad, out))  # [B, Nkv, G, H, Q]
    lse, delta = lse.unflatten(1, (num_kv_heads, -1)), (grad.float() * out).sum(-2)  # [B, Nkv, G, Q]
    for_query = torch.zeros_like(queries, dtype=torch.float32)
    for keys, values in zip(own[::2], own[1::2], strict=True):
        keys, values = by_channel(keys), by_channel(values)
        weights = (own_scores(queries, keys, scale) - lse).exp()  # [B, Nkv, G, Q]
        scores = weights * ((values * grad).sum(-2, dtype=torch.float32) - delta) * scale
        for_query += scores[..., None, :] * keys
        for x, weight in ((queries, scores), (grad, weights)):
            grads.append((weight[..., None, :] * x).sum(2).transpose(-1, -2).to(query.dtype))
    return for_query.flatten(1, 2).transpose(-1, -2).to(query.dtype), grads


def laid_out(drafted: Tensor) -> Tensor:
    """The same values [B, Nkv, Q, H] with queries adjacent in memory, so that `by_channel` makes no copy."""
    return drafted.transpose(-1, -2).contiguous().transpose(-1, -2)


def by_channel(x: Tensor, num_kv_heads: int | None = None) -> Tensor:
    """[B, N, Q, H] -> [B, Nkv, G, H, Q], so that operations on each query's few channels run over many queries at once.

    Args: num_kv_heads: Nkv; None: N, for keys and values, which have no query groups (G is 1).
    """
    return x.transpose(-1, -2).contiguous().unflatten(1, (num_kv_heads or x.shape[1], -1))


def own_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[B, Nkv, G, Q] fp32 scores of each query [B, Nkv, G, H, Q] with its own key [B, Nkv, 1, H, Q] at a depth."""
    return (queries * keys).sum(-2, dtype=torch.float32) * scale


def shared_forward(
    block: Block, query: Tensor, key: Tensor, value: Tensor, sight: Sight, *, scale: float
) -> tuple[Tensor, Tensor]:
    """A block's attention over the shared keys [B, N, q, H], and the log-sum-exps of its scores [B, N, q] fp32."""
    query, mask = query[:, :, block.start : block.stop], sight.mask(block, query.dtype)
    key, value = (x[:, :, block.begin : block.extent] for x in (key, value))
    if is_flash(query, value):
        return flash(query, key, value, attn_mask=mask, scale=scale)
    weights, lse = softmax_of(query_key_products(query, key), mask, scale)  # [B, Nkv, G, q, extent], [B, Nkv, G, q]
    mixed = (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])  # [B, Nkv, G, q, H of values]
    return mixed.flatten(1, 2), lse.flatten(1, 2)


def shared_backward(
    block: Block, saved: Sequence[Tensor], sight: Sight, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's queries, and of the shared keys and values it sees.

    Args: saved: the output's gradient, queries, keys, values, the merged output and its log-sum-exps.
    """
    grad, query, key, value, out, lse = saved
    grad, query, out, lse = (x[:, :, block.start : block.stop] for x in (grad, query, out, lse))
    mask = sight.mask(block, query.dtype)
    key, value = (x[:, :, block.begin : block.extent] for x in (key, value))
    if is_flash(query, value):
        return flash_backward(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    with recomputing():
        products = query_key_products(query, key)
    flat_grad, flat_query = (x.unflatten(1, groups).flatten(2, 3) for x in (grad, query))  # [B, Nkv, G * q, H]
    delta = (grad.float() * out).sum(-1).unflatten(1, groups)  # [B, Nkv, G, q]
    of_weights = (flat_grad @ value.transpose(-1, -2)).view(products.shape)
    gradients = softmax_gradients(products, mask, of_weights, lse.unflatten(1, groups), delta, scale)
    weights, scores = (x.flatten(2, 3) for x in gradients)
    grad_key, grad_value = (x.transpose(-1, -2) @ y for x, y in ((scores, flat_query), (weights, flat_grad)))
    return (scores @ key).view(query.shape), grad_key, grad_value


def is_flash(query: Tensor, value: Tensor) -> bool:
    """Whether torch's CPU flash kernel supports these: keys and values must have the same size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def query_key_products(query: Tensor, key: Tensor) -> Tensor:
    """[B, Nkv, G, q, extent] dot products of queries [B, N, q, H] with keys [B, Nkv, extent, H]."""
    num_kv_heads, num_queries = key.shape[1], query.shape[2]
    flat = query.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)  # [B, Nkv, G * q, H]
    return (flat @ key.transpose(-1, -2)).unflatten(2, (-1, num_queries))


@Fusable
def softmax_of(products: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The weights [B, Nkv, G, q, extent] of masked scores, in the dtype of `products`, and their log-sum-exps
    [B, Nkv, G, q] fp32."""
    scores = scores_of(products, mask, scale)
    weights = scores.softmax(-1)
    return weights.to(products.dtype), scores.amax(-1) - weights.amax(-1).log()  # two passes fewer than logsumexp's


@Fusable
def softmax_gradients(
    products: Tensor, mask: Tensor, of_weights: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The attention weights of forward, and the gradients of `products`, [B, Nkv, G, q, extent] in their dtype.

    Args: of_weights: gradients of the weights. lse: log-sum-exps [B, Nkv, G, q] fp32. delta: [B, Nkv, G, q] fp32, the
    output times its gradient, summed over channels.
    """
    weights = scores_of(products, mask, scale).sub_(lse[..., None]).exp_()
    scores = (of_weights - delta[..., None]).mul_(weights).mul_(scale)
    return weights.to(products.dtype), scores.to(products.dtype)


def scores_of(products: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, Nkv, G, q, extent] fp32 masked scores, in one pass over `products`."""
    return torch.add(mask[:, :, None].float(), products, alpha=scale)
