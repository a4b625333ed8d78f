"""LiLiCorr (2026, arXiv 2608.20530): which of a block's candidates go together, by a small transformer over them all.

The most probable tokens of all slots are a lattice. Two layers without a causal mask, whose attention has learned
biases for the distance of two slots and for the same slot, read of each candidate its embedding, its slot's state, five
figures of its log-probability, its slot and its rank. Normalised vectors score pairs of neighbouring slots: outgoing of
a candidate times incoming of one behind it. The target's fused features where it has read last are the anchor, which
takes part in these vectors, and whose own outgoing one scores the first slot. Only these scores choose: what the
backbone says of a candidate is among what the layers read. Tensors and arithmetic are those of vLLM and SGLang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .candidates import Chooser, SlotCandidates
from .layers import RMSNorm

NUM_FIGURES = 5
VECTOR_EPS = 1e-6  # least length by which a vector is divided
# engines' keys: a head's own, with its type
LILICORR_KEYS: dict[str, tuple[str, type]] = {
    "lilicorr_candidate_topk": ("selector_top_k", int),
    "lilicorr_factor_dim": ("selector_rank", int),
    "lilicorr_num_layers": ("lattice_layers", int),
    "lilicorr_hidden_size": ("lattice_size", int),
    "lilicorr_num_heads": ("lattice_heads", int),
    "lilicorr_mlp_ratio": ("lattice_mlp_ratio", float),
    "lilicorr_logit_scale": ("lattice_scale", float),
}


@dataclass(frozen=True)
class LatticeCandidates(SlotCandidates):
    """Candidates that the lattice scores in pairs."""

    before: Tensor  # [B, K, top_k] target ids of the candidates of the slot before; of the first slot: the anchor token
    pairs: Tensor  # [B, K, top_k, top_k] logits of each candidate (last dimension) behind each of these
    log_probs: Tensor  # [B, K, top_k] by the backbone, which choose behind tokens that are none of these

    def scores(self, previous: Tensor) -> Tensor:
        """Args: previous: [B, F] target ids. Of all slots at once too, with F = K: each behind its own token."""
        is_known = previous[..., None] == self.before  # [B, F, top_k]
        pairs, at = self.pairs.expand(-1, previous.shape[1], -1, -1), is_known.int().argmax(-1)  # [B, F]
        behind = pairs.gather(2, at[..., None, None].expand(-1, -1, 1, pairs.shape[-1]))[:, :, 0]
        return torch.where(is_known.any(-1, keepdim=True), behind, self.log_probs)


class LatticeAttention(nn.Module):
    """Attention with the parameters of nn.MultiheadAttention and a bias per head."""

    def __init__(self, size: int, *, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [n, L, h], bias [1, N, L, L] -> [n, L, h]."""
        joined = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = joined.permute(2, 0, 3, 1, 4)  # [n, N, L, H] each
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias.to(queries.dtype))
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class SiluMLP(nn.Module):
    """Two linear maps without a gate."""

    def __init__(self, in_size: int, inner: int, size: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(in_size, inner), nn.Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeLayer(nn.Module):
    def __init__(self, size: int, *, num_heads: int, mlp_ratio: float, eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.attn = LatticeAttention(size, num_heads=num_heads)
        self.mlp = SiluMLP(size, int(size * mlp_ratio), size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [n, L, h], bias [1, N, L, L] -> [n, L, h]."""
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class CandidateLattice(Chooser[LatticeCandidates]):
    """LiLiCorr's correlator."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_slots: int,
        top_k: int,
        rank: int,
        num_layers: int,
        size: int,
        num_heads: int,
        mlp_ratio: float,
        scale: float,
        eps: float,
        embed: Callable[[Tensor], Tensor],
        to_target: Callable[[Tensor], Tensor],
    ):
        """Args: hidden_size: D. num_slots: that draft, of the widest block. rank: channels of outgoing and incoming
        vectors. num_layers, size, num_heads, mlp_ratio: of the layers. scale: of the cosines of two vectors, which are
        logits then. eps: of norms. embed: of target ids, by the target. to_target: from draft ids."""
        super().__init__(top_k=top_k)
        self.scale, self.num_slots, self.embed, self.to_target = scale, num_slots, embed, to_target
        self.token_proj = nn.Identity() if size == hidden_size else nn.Linear(hidden_size, size)
        self.pass_hidden_proj = nn.Linear(hidden_size, size)
        self.feature_norm = nn.LayerNorm(NUM_FIGURES)
        self.feature_mlp = SiluMLP(NUM_FIGURES, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, num_slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top_k, size))
        # as engines have it, of distances up to the width of a block with a slot for the anchor
        self.relative_slot_bias = nn.Parameter(torch.zeros(num_heads, 2 * num_slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(num_heads))
        self.context_proj = nn.Linear(hidden_size, size)
        layer = partial(LatticeLayer, size, num_heads=num_heads, mlp_ratio=mlp_ratio, eps=eps)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.output_norm, self.anchor_norm = RMSNorm(size, eps=eps), RMSNorm(size, eps=eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(size, rank) for _ in range(3))

    def previous(self, tokens: Tensor) -> Tensor:
        return tokens

    def best(self, hidden: Tensor, logits: Tensor, *, anchors: Tensor, context: Tensor) -> LatticeCandidates:
        return self.read(hidden, *self.most_probable(logits), anchors=anchors, context=context)

    def chain(self, candidates: LatticeCandidates, anchors: Tensor, to_target: Tensor | None) -> tuple[Tensor, Tensor]:
        """As of every chooser, by the places of candidates: what goes best behind each is found for all at once."""
        following, num_slots = candidates.pairs.argmax(-1), candidates.ids.shape[1]  # [B, K, top_k]
        places = [following[:, 0, :1]]  # [B, 1]; all rows of the first slot are the anchor's
        for depth in range(1, num_slots):
            places.append(following[:, depth].gather(1, places[-1]))
        chosen = torch.cat(places, 1)[..., None]  # [B, K, 1]
        behind = torch.cat([torch.zeros_like(chosen[:, :1]), chosen[:, :-1]], 1)[..., None]
        scores = candidates.pairs.gather(2, behind.expand(-1, -1, -1, self.top_k))[:, :, 0]  # [B, K, top_k]
        ids = candidates.ids.gather(-1, chosen)[..., 0]
        return ids if to_target is None else to_target[ids], scores

    def most_probable(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[..., Vd] -> [..., top_k] draft ids and fp32 log-probabilities."""
        values, ids = logits.topk(self.top_k, -1)
        return ids, values.float() - logits.float().logsumexp(-1, keepdim=True)

    def read(
        self,
        hidden: Tensor,
        ids: Tensor,
        log_probs: Tensor,
        *,
        anchors: Tensor,
        context: Tensor,
    ) -> LatticeCandidates:
        """Score the pairs of candidates with draft ids and log-probabilities [B, K, top_k].

        Args: hidden, anchors, context: as in `best`.
        """
        tokens, num_slots = self.to_target(ids), ids.shape[1]
        embedded, states = self.embed(tokens.flatten(1)).unflatten(1, ids.shape[1:]), self.pass_hidden_proj(hidden)
        x = self.token_proj(embedded.to(hidden.dtype)) + states[:, :, None]  # [B, K, top_k, h]
        x = x + self.feature_mlp(self.feature_norm(figures(log_probs).to(x.dtype)))
        x = x + self.slot_embedding[0, :, :num_slots] + self.rank_embedding[0]
        x, bias = x.flatten(1, 2), self.attention_bias(num_slots)[None]  # [B, L, h], [1, N, L, L]
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, ids.shape[1:])  # [B, K, top_k, h]
        anchor = self.anchor_norm(self.context_proj(context))[:, None, None]  # [B, 1, 1, h]
        x = F.silu(self.factor_input_proj(torch.cat([x, anchor.expand_as(x), x * anchor], -1)))
        outgoing, incoming, first = (
            F.normalize(vectors.float(), dim=-1, eps=VECTOR_EPS)
            for vectors in (self.out_head(x), self.in_head(x), self.anchor_out_head(anchor))
        )  # [B, K, top_k, r] twice, [B, 1, 1, r]
        outgoing = torch.cat([first.expand(-1, -1, self.top_k, -1), outgoing[:, :-1]], 1)
        before = torch.cat([anchors[:, None, None].expand(-1, -1, self.top_k), tokens[:, :-1]], 1)
        return LatticeCandidates(ids, before, self.scale * outgoing @ incoming.mT, log_probs)

    def attention_bias(self, num_slots: int) -> Tensor:
        """[N, L, L] of the candidates of so many slots, which are slot by slot."""
        slots = torch.arange(num_slots, device=self.same_slot_bias.device)
        apart = slots[:, None] - slots  # [K, K]
        bias = self.relative_slot_bias[:, apart + self.num_slots] + self.same_slot_bias[:, None, None] * (apart == 0)
        return bias.repeat_interleave(self.top_k, 1).repeat_interleave(self.top_k, 2)


def figures(log_probs: Tensor) -> Tensor:
    """[..., top_k] -> [..., top_k, 5]: a candidate's log-probability, its probability, how far it is below the slot's
    best one, its rank as a share, and whether it is that one."""
    ranks = torch.arange(log_probs.shape[-1], device=log_probs.device).expand_as(log_probs)
    apart = log_probs - log_probs.amax(-1, keepdim=True)
    shares = ranks / max(1, log_probs.shape[-1] - 1)
    return torch.stack([log_probs, log_probs.exp(), apart, shares, (ranks == 0).to(log_probs.dtype)], -1)
