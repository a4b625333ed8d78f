"""Decoder layers of block drafters: the slots of a block see each other, and the target's features as further keys.

A block drafts K tokens in one pass. Its slots are the anchor, the token that it follows, and the mask tokens after it.
In every layer a slot attends to all slots of its own block and to keys and values that the layer's own projections make
of the target's features before the anchor (DFlash, Chen et al. 2026, arXiv 2602.06036).

In training S blocks of W slots start in each row. They are stored slot by slot, [B, W * S, ...]: slot j of all S
blocks, then slot j + 1. Attention treats the W slots as further heads, so that one mask [B, 1, S, P] serves all.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ..loss.sight import Sight
from .chain_attention import attend_chains, laid_out
from .dflash2 import CandidateSelector, SlotConvolution
from .layers import Attention, RMSNorm

# queries [B, N, Q, H], keys and values [B, Nkv, Q, H] of a block's slots -> [B, Q, N, H]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDE = 128  # head dimension of published drafters


class BlockLayer(nn.Module):
    """A Qwen3 layer whose attention over slots and context the caller provides; with conv_group_size, DFlash2's, with
    convolutions around attention and MLP."""

    def __init__(self, config: LlamaConfig, *, conv_group_size: int | None = None):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, has_head_norms=True)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.attention_conv = self.mlp_conv = None
        if conv_group_size is not None:
            self.attention_conv = SlotConvolution(size, group_size=conv_group_size)
            self.mlp_conv = SlotConvolution(size, group_size=conv_group_size)
        # the norms bound scores by gain^2 sqrt(H); this gain gives narrow heads the bound of WIDE ones
        for norm in (self.self_attn.q_norm, self.self_attn.k_norm):
            nn.init.constant_(cast(Tensor, norm.weight), max(1.0, WIDE / self.self_attn.head_dim) ** 0.25)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, *, num_blocks: int = 1) -> Tensor:
        """The slots of S blocks [B, W * S, D] -> [B, W * S, D]."""
        mixed = self.mixed(hidden, rotary, attend, num_blocks=num_blocks)
        return self.fed_forward(mixed, num_blocks=num_blocks)

    def mixed(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, *, num_blocks: int) -> Tensor:
        """The first half: the slots with what attention adds to them."""

        def attention(x: Tensor) -> Tensor:
            mixed = attend(self.self_attn.queries(x, rotary), *self.self_attn.keys_values(x, rotary))
            return self.self_attn.o_proj(mixed.flatten(2))

        x, conv = self.input_layernorm(hidden), self.attention_conv
        return hidden + (attention(x) if conv is None else conv(x, attention, num_blocks=num_blocks))

    def fed_forward(self, hidden: Tensor, *, num_blocks: int) -> Tensor:
        """The second half: with what the MLP adds."""
        x, conv = self.post_attention_layernorm(hidden), self.mlp_conv
        return hidden + (self.mlp(x) if conv is None else conv(x, self.mlp, num_blocks=num_blocks))


def attend_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context: tuple[Tensor, Tensor],
    sight: Sight,
) -> Tensor:
    """Attention [B, W * S, N, H] of queries [B, N, W * S, H] over the context and the slots of their own block.

    Args:
        keys, values: [B, Nkv, W * S, H] of the slots. context: keys and values [B, Nkv, P, H].
        sight: of a block's start, the last position of the context that its slots see.
    """
    num_blocks, num_heads = sight.last.shape[1], queries.shape[1]
    slots = list(zip(*(map(laid_out, part.split(num_blocks, 2)) for part in (keys, values)), strict=True))
    if sight.window is not None:  # which ends at another position for each slot, so they share no mask
        of_slots = enumerate(queries.split(num_blocks, 2), 1)
        parts = [attend_chains(x, *context, sight.behind(i), drafted=slots) for i, x in of_slots]
        return torch.cat(parts, 2).transpose(1, 2)
    queries = queries.unflatten(2, (-1, num_blocks)).flatten(1, 2)  # [B, N * W, S, H]
    mixed = attend_chains(queries, *context, sight, drafted=slots)
    return mixed.unflatten(1, (num_heads, -1)).flatten(2, 3).transpose(1, 2)


class MarkovHead(nn.Module):
    """The low-rank term that the previous token adds to a slot's logits: markov_w2(markov_w1[token])."""

    def __init__(self, vocab_size: int, num_drafted: int, *, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_drafted, bias=False)
        # rows of length 1: if both factors were small, an optimizer with steps of fixed size would hardly change them
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.normal_(self.markov_w2.weight, std=0.01)

    def previous(self, tokens: Tensor) -> Tensor:
        """[...] target ids -> [..., rank]."""
        return self.markov_w1(tokens)


def with_previous(states: Tensor, pairs: MarkovHead | CandidateSelector | None, before: Tensor) -> Tensor:
    """[..., D + rank]: slots' states [..., D] next to the embeddings of their previous tokens [...], if any."""
    return states if pairs is None else torch.cat([states, pairs.previous(before).to(states.dtype)], -1)


class ConfidenceHead(nn.Module):
    """The logit of a draft's acceptance, from the slot's state and the Markov embedding of the previous token."""

    def __init__(self, in_size: int):
        super().__init__()
        self.proj = nn.Linear(in_size, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D + rank] -> [...] logits."""
        return self.proj(states)[..., 0]
