"""What decoder-layer heads share that read their own output: a Llama layer, training on unrolled chains, drafting.

In decoding, a chain that starts at t sees keys of true features at positions <= t and its own drafted keys behind them.
So in training a query of the chain at start t attends to the shared keys at positions <= t and, at depth k, to its own
keys of depths 1..k, one per depth: the diagonal of the attention (EAGLE-3, section 3.2; HASS, section 3.2).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from .drafter import Reading
from .nn.cache import SlotCache, newest_slots, seen_by_children, tree_mask
from .nn.chain_attention import Block, attend_chains, laid_out, recomputing
from .nn.layers import Attention, GatedMLP, RMSNorm
from .nn.split_attention import masked_attention

KeysValues = tuple[Tensor, Tensor]  # [B, Nkv, P, H] each


@dataclass
class Context:
    """What the queries of one layer call may attend to."""

    keys: Tensor  # [B, Nkv, P, H]
    values: Tensor  # [B, Nkv, P, H]
    mask: Tensor  # [B, 1, Q, P] additive
    # in training only: how queries are read, and per depth their own keys and values, [B, Nkv, Q, H] each
    blocks: Sequence[Block] | None = None
    drafted: list[KeysValues] = field(default_factory=list)

    def draft(self, keys: Tensor, values: Tensor) -> None:
        """Add a depth's own keys and values [B, Nkv, Q, H]."""
        self.drafted.append((laid_out(keys), laid_out(values)))


def attend(attention: Attention, x: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
    """[B, Q, in] -> [B, Q, D]: attention over a context, with its output projection."""
    queries = attention.queries(x, rotary)  # [B, N, Q, H]
    keys, values, mask = context.keys, context.values, context.mask
    if context.blocks is not None:
        mixed = attend_chains(queries, keys, values, mask, blocks=context.blocks, drafted=context.drafted)
    else:
        groups = attention.num_heads // attention.num_kv_heads
        mask = mask.to(x.dtype).repeat(1, 1, groups, 1)  # [B, 1, G * Q, P]
        mixed = masked_attention(attention.group(queries), keys, values, mask)  # [B, Nkv, G * Q, H]
    return attention.output(mixed, x.shape[1])


class LlamaLayer(nn.Module):
    """A Llama decoder layer over a context."""

    def __init__(self, config: LlamaConfig, *, normalises_input: bool = True):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps) if normalises_input else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(config)

    def keys_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """[B, Q, D] -> two of [B, Nkv, Q, H]."""
        return self.self_attn.keys_values(self.input_layernorm(hidden), rotary)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """[B, Q, D] -> [B, Q, D]."""
        hidden = hidden + attend(self.self_attn, self.input_layernorm(hidden), rotary, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


# what the depths of a step may keep of their intermediate results, in bytes; beyond it, backward computes them again
KEPT_BYTES = 2**31

# (inputs, contexts) -> the output [B, S, D] and, per layer, the keys and values that it added to its context
Step = Callable[..., tuple[Tensor, list[KeysValues]]]


@dataclass
class Chains:
    """The layers' contexts in training, and what decides whether a depth's intermediate results are kept."""

    contexts: list[Context]  # of each layer
    config: LlamaConfig
    num_depths: int

    def advance(self, step: Step, *inputs: Any) -> Tensor:
        """step(*inputs, contexts) for one depth of the chains: its output [B, S, D], with gradients.

        Args: inputs: the first is the hidden states [B, S, D].
        """
        before = [tuple(context.drafted) for context in self.contexts]

        def run(*inputs: Any) -> tuple[Tensor, list[KeysValues]]:  # backward may run it when more was drafted
            pairs = zip(self.contexts, before, strict=True)
            return step(*inputs, [replace(context, drafted=list(drafted)) for context, drafted in pairs])

        hidden, config = inputs[0], self.config
        widths = 16 * config.hidden_size + 4 * config.intermediate_size  # about what a layer keeps per position
        kept = hidden[..., 0].numel() * hidden.element_size() * widths * len(self.contexts) * self.num_depths
        if kept <= KEPT_BYTES or not torch.is_grad_enabled():
            out, added = run(*inputs)
        else:
            out, added = checkpoint(
                run,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), recomputing()),
            )
        for context, pair in zip(self.contexts, added, strict=False):  # none at the first depth
            context.drafted.append(pair)
        return out


@dataclass
class Queries:
    """What one forward over the cache reads beside the tokens."""

    hidden: Tensor  # [B, Q, D]
    positions: Tensor  # [B, Q], for the rotary embedding
    mask: Tensor  # [B, 1, Q, slots] additive


@dataclass
class RecurrentState:
    """The state of drafting. The last expansion is the last committed token (F is 1), then a level of drafted ones."""

    cache: SlotCache  # keys and values of the positions read, then of drafted tokens
    extent: int  # slots of it in use, at most
    position: Tensor  # [B] the last committed one
    hidden: Tensor  # [B, F, D] the head's output for the last expansion
    seen: Tensor  # [B, F, n] bool, which of n drafted nodes each of the last expansion attends to

    @classmethod
    def empty(cls, *, batch_size: int, max_length: int, num_layers: int, like: Tensor) -> "RecurrentState":
        """Nothing read yet; tensors have the dtype and device of `like`."""
        nothing = like.new_zeros(batch_size, 1, 0)
        cache = SlotCache(num_layers=num_layers, max_length=max_length)
        return cls(cache, max_length, nothing, nothing, nothing.bool())

    def reading(self, read: Reading, features: Tensor) -> Queries:
        """What to read of the target's features [B, Q, D]; sets their slots in the cache."""
        self.extent = read.extent or self.cache.max_length
        positions = read.start[:, None] + torch.arange(read.tokens.shape[1], device=read.start.device)  # [B, Q]
        self.cache.seek(positions, extent=self.extent)
        return Queries(features, positions, self.cache.mask(positions, dtype=features.dtype))

    def commit(self, read: Reading, out: Tensor) -> None:
        """Drafting starts from the output [B, Q, D] at the last committed position."""
        self.hidden = out[torch.arange(len(out), device=out.device), read.last][:, None]  # [B, 1, D]
        self.position = read.start + read.last
        self.seen = self.seen[:, :1, :0]

    def drafting(self, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Queries:
        """What to read beside tokens and parents [B, F] of `drafting.Expands.expand`; sets the tokens' slots."""
        positions, dtype = (self.position + depth)[:, None].expand_as(tokens), self.hidden.dtype  # [B, F]
        if parents is None:  # a chain: each slot is the token's position, and a token sees all before it
            self.cache.seek(positions, extent=self.extent)
            return Queries(self.hidden, positions, self.cache.mask(positions, dtype=dtype))
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        self.seen = seen_by_children(self.seen, parents)
        self.cache.seek(newest_slots(self.position, self.seen), extent=self.extent)
        mask = tree_mask(self.position, self.seen, positions=positions, extent=self.cache.extent, dtype=dtype)
        return Queries(self.hidden[rows, parents], positions, mask)
