"""What decoder-layer heads share that feed their own output back: attention with a diagonal, drafting over a cache.

In decoding, a chain that starts at t sees keys of true features at positions <= t and its own drafted keys behind them.
So in training a query of the chain at start t attends to the shared keys at positions <= t and, at depth k, to its own
keys of depths 1..k, one per depth: the diagonal of the attention (EAGLE-3, section 3.2; HASS, section 3.2).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .drafter import Reading
from .nn.cache import SlotCache, tree_mask, visibility_mask
from .nn.chain_attention import Block, attend_chains, laid_out
from .nn.layers import Attention
from .nn.repeated import repeated
from .nn.split_attention import masked_attention


@dataclass
class Context:
    """What the queries of one layer call may attend to: keys, values [B, Nkv, P, H] and an additive mask [B, 1, Q, P].

    In training, blocks: how queries are read; drafted: per depth their own keys and values, [B, Nkv, Q, H] each.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    blocks: Sequence[Block] | None = None
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def draft(self, keys: Tensor, values: Tensor) -> None:
        """A depth's own keys and values [B, Nkv, Q, H]."""
        self.drafted.append((laid_out(keys), laid_out(values)))


def attend(attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
    """[B, Q, in] -> [B, Q, D]: attention over a context, its output projection included."""
    queries = attention.queries(x, rotary)  # [B, N, Q, H]
    if context.blocks is None:
        groups = attention.num_heads // attention.num_kv_heads
        mask = context.mask.to(x.dtype).repeat(1, 1, groups, 1)  # [B, 1, G * Q, P]
        queries = attention.group(queries)  # [B, Nkv, G * Q, H]
        mixed = masked_attention(queries, context.keys, context.values, mask)
    else:
        how = {"blocks": context.blocks, "drafted": context.drafted}
        mixed = attend_chains(queries, context.keys, context.values, context.mask, **how)
    return attention.output(mixed, x.shape[1])


KEPT_BYTES = 2**31  # what the depths of a step may keep of their inner results; beyond it, backward computes them again


def advance(step: Callable[..., Any], *inputs: Any, contexts: list[Context], config: Any, num_depths: int) -> Any:
    """step(*inputs, contexts): one depth of the unrolled chains; what it returns.

    Args: inputs: the first is the hidden states [B, S, D]. config: the layer's sizes, as a Llama config.
    """
    now, hidden = [tuple(context.drafted) for context in contexts], inputs[0]

    def run(*inputs: Any) -> Any:  # more is drafted before backward runs it again
        return step(*inputs, [replace(one, drafted=list(drafted)) for one, drafted in zip(contexts, now, strict=True)])

    widths = 16 * config.hidden_size + 4 * config.intermediate_size  # about what a layer keeps per position
    kept = hidden[..., 0].numel() * hidden.element_size() * widths * len(contexts) * num_depths
    if kept <= KEPT_BYTES or not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(
        run,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), repeated()),
    )


@dataclass
class Queries:
    """What one forward over the cache reads: hidden [B, Q, D] beside the tokens, their positions [B, Q] (rotary), and
    an additive mask [B, 1, Q, slots]."""

    hidden: Tensor
    positions: Tensor
    mask: Tensor


@dataclass
class RecurrentState:
    """cache: keys and values of positions read, then of drafted tokens. extent: slots of it in use, at most.

    position [B]: the last committed one. hidden [B, F, D]: the head's output there (F is 1), then for the tokens of the
    last expansion. seen [B, F, drafted] bool: which drafted slots each of them attends to.
    """

    cache: SlotCache
    extent: int
    position: Tensor
    hidden: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, *, batch_size: int, max_length: int, num_layers: int, like: Tensor) -> "RecurrentState":
        """Nothing read yet; tensors of `like`'s dtype and device."""
        nothing = like.new_zeros(batch_size, 1, 0)
        cache = SlotCache(num_layers=num_layers, max_length=max_length)
        return cls(cache, max_length, nothing, nothing, nothing.bool())

    def reading(self, read: Reading, features: Tensor) -> Queries:
        """What to read of the target's features [B, Q, D]; names their slots in the cache."""
        self.extent = read.extent or self.cache.max_length
        positions = read.start[:, None] + torch.arange(read.tokens.shape[1], device=read.start.device)  # [B, Q]
        self.cache.seek(positions, extent=self.extent)
        return Queries(features, positions, visibility_mask(positions, extent=self.cache.extent, dtype=features.dtype))

    def commit(self, read: Reading, out: Tensor) -> None:
        """Drafting starts from the output [B, Q, D] at the last committed position."""
        self.hidden = out[torch.arange(len(out), device=out.device), read.last][:, None]  # [B, 1, D]
        self.position = read.start + read.last
        self.seen = self.seen[:, :1, :0]

    def drafting(self, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Queries:
        """What to read beside tokens and parents [B, F] of `drafting.Expands.expand`; names the tokens' slots."""
        positions = (self.position + depth)[:, None].expand_as(tokens)  # [B, F]
        if parents is None:  # a chain: slots and positions are the same, and all before is seen
            self.cache.seek(positions, extent=self.extent)
            mask = visibility_mask(positions, extent=self.cache.extent, dtype=self.hidden.dtype)
            return Queries(self.hidden, positions, mask)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        self.seen = torch.cat([self.seen[rows, parents], itself], -1)  # [B, F, drafted]
        num_before = self.seen.shape[-1] - tokens.shape[1]
        slots = self.position[:, None] + 1 + num_before + torch.arange(tokens.shape[1], device=tokens.device)
        self.cache.seek(slots, extent=self.extent)
        where = {"positions": positions, "extent": self.cache.extent}
        mask = tree_mask(self.position, self.seen, dtype=self.hidden.dtype, **where)
        return Queries(self.hidden[rows, parents], positions, mask)
