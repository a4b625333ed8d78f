"""Decoder layers with queries only, which read keys and values of the target's own layers (Gemma 4's assistants)."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ...base.errors import BadInput, first_line
from ...targets.layers.rotary import rotate
from ...targets.target import Target
from .layers import RMSNorm

Rotation = tuple[Tensor, Tensor]  # cos, sin [B, 1, Q, H]
KNOWN = 8  # tokens on which read keys are compared with the target's own
TOLERANCE = 0.05  # of their relative difference, which rounding in 16 bits stays below


class TargetKeys:
    """The keys and values of one layer of the target, computed from the states that enter it.

    They are those in the target's cache, so a head that reads them needs no access to a server's cache to be trained;
    an engine gives it the cache itself.
    """

    def __init__(self, target: Target, index: int):
        """Args: index: of the layer, HF's. Raises BadInput if these are not the layer's keys and values."""
        self.target, self.index = target, index
        self.kind = (target.layer_types or [""] * target.num_layers)[index]
        is_sliding = self.kind == "sliding_attention" or not target.layer_types
        # in tokens, a query's own position among them; None: no limit
        self.window: int | None = getattr(target.config, "sliding_window", None) if is_sliding else None
        self.by_kind = "full_attention" in (getattr(target.config, "rope_parameters", None) or {})
        self.query_size = 1.0  # root mean square of the layer's own queries, times the factor on its scores
        self.refusal = f"target {target.name}: the keys of its layer {index} cannot be read from its input"
        try:
            attention = self.layer.self_attn
            self.head_dim: int = attention.head_dim
            self.num_heads: int = attention.k_proj.out_features // self.head_dim  # Nkv
            if target.device.type != "meta":  # shapes without weights: nothing to compute
                self._check()
        except BadInput:
            raise
        except Exception as error:  # the code of an unknown layer may raise anything
            raise BadInput(f"{self.refusal}: {first_line(error)}") from error

    @property
    def layer(self) -> Any:
        """The target's own, so that a copy of a head has none of it."""
        return self.target.layers[self.index]

    def rotation(self, places: Tensor, *, like: Tensor) -> Rotation:
        """cos, sin [B, 1, Q, H] of the layer's rotary embedding at places [B, Q]."""
        known = places.clamp(max=self.target.num_positions - 1)  # its tables must not grow beyond
        kind = {"layer_type": self.kind} if self.by_kind else {}
        cos, sin = cast(Any, self.target.base).rotary_emb(like, known, **kind)
        if cos.shape[-1] != self.head_dim:
            raise BadInput(f"{self.refusal}: it rotates {cos.shape[-1]} of {self.head_dim} channels")
        return cos[:, None].to(like.device), sin[:, None].to(like.device)

    @torch.no_grad()
    def __call__(self, entering: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [B, Nkv, Q, H], from the states [B, Q, D] that enter the layer at places [B, Q], on their device."""
        attention, read = self.layer.self_attn, self._read(entering)
        keys = attention.k_proj(read).unflatten(-1, (-1, self.head_dim))  # [B, Q, Nkv, H]
        own = getattr(attention, "v_proj", None)  # large Gemma 4 targets take the projected keys
        values = keys if own is None else own(read).unflatten(-1, (-1, self.head_dim))
        keys, values = (
            x if (norm := getattr(attention, name, None)) is None else norm(x)
            for x, name in ((keys, "k_norm"), (values, "v_norm"))
        )
        keys = rotate(keys.transpose(1, 2), self.rotation(places, like=read))
        return keys.to(entering.device), values.transpose(1, 2).to(entering.device)

    def _read(self, entering: Tensor) -> Tensor:
        """[B, Q, D] what the projections read."""
        where = next(self.layer.parameters()).device
        return self.layer.input_layernorm(entering.to(where, self.target.dtype))

    def _check(self) -> None:
        """Compare with what the target writes to its cache, and measure its own queries."""
        ids = torch.arange(1, KNOWN + 1, device=self.target.device)[None] % self.target.vocab_size
        places, cache = torch.arange(KNOWN, device=ids.device)[None], self.target.new_cache(KNOWN)
        told = {"cache": cache, "positions": places, "extent": KNOWN}
        output = self.target.forward(ids, feature_layers=(self.index,), **told)
        layer: Any = cache.layers[self.index]
        for name, got, wanted in zip(
            ("keys", "values"), self(output.features[:, :, 0], places), (layer.keys, layer.values), strict=True
        ):
            wanted = wanted[:, :, :KNOWN].float().to(got.device)
            error = ((got.float() - wanted).norm() / wanted.norm()).item()
            if not error < TOLERANCE:
                raise BadInput(f"{self.refusal}: its {name} differ by {error:.0%}")
        attention: Any = self.layer.self_attn
        queries = attention.q_proj(self._read(output.features[:, :, 0])).unflatten(-1, (-1, self.head_dim))
        queries = queries if (norm := getattr(attention, "q_norm", None)) is None else norm(queries)
        self.query_size = float(queries.float().square().mean().sqrt() * attention.scaling)


class QueryAttention(nn.Module):
    """The queries of grouped-query attention and its output projection; keys and values are another layer's."""

    def __init__(self, size: int, *, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.q_proj = nn.Linear(size, num_heads * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=eps)
        self.o_proj = nn.Linear(num_heads * head_dim, size, bias=False)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[B, Q, d] -> [B, N, Q, H]."""
        heads = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        cos, sin = (part.to(heads.dtype) for part in rotation)  # autocast may have 16 bits
        return rotate(self.q_norm(heads).transpose(1, 2), (cos, sin))


class GeluMLP(nn.Module):
    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class QueryLayer(nn.Module):
    """A decoder layer of Gemma 4 without keys and values: norms before and behind attention and MLP, scores not scaled
    by the head dimension, a factor on the output."""

    layer_scalar: Tensor

    def __init__(self, size: int, inner: int, *, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.self_attn = QueryAttention(size, num_heads=num_heads, head_dim=head_dim, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GeluMLP(size, inner)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def queries(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[B, Q, d] -> [B, N, Q, H]."""
        return self.self_attn.queries(self.input_layernorm(hidden), rotation)

    def forward(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """hidden [B, Q, d] and what its queries mixed [B, Q, N, H] -> [B, Q, d]."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(mixed.flatten(2)))
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(fed)) * self.layer_scalar


class CentroidOutput(nn.Module):
    """Which tokens are scored: those of the groups whose centroids a state is nearest to. It is not trained here.

    The vocabulary is split into groups of one size; `token_ordering` lists their tokens, group by group."""

    token_ordering: Tensor

    def __init__(self, size: int, vocab_size: int, *, num_centroids: int, num_chosen: int):
        """Raises BadInput if the groups are not of one size, or fewer than the chosen ones."""
        super().__init__()
        if vocab_size % num_centroids or not num_chosen <= num_centroids:
            why = f"expected a divisor of the {vocab_size} tokens, and at least the {num_chosen} chosen ones"
            raise BadInput(f"num_centroids {num_centroids}: {why}")
        self.num_chosen = num_chosen
        self.centroids = nn.Linear(size, num_centroids, bias=False).requires_grad_(False)
        self.register_buffer("token_ordering", torch.arange(vocab_size))

    def keep_chosen(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """[..., V] logits of states [..., d], those of tokens that are not scored 1 below the least of the others."""
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = groups[self.centroids(hidden).topk(self.num_chosen, -1).indices].flatten(-2)  # [..., scored]
        scored = logits.gather(-1, tokens)
        rest = (scored.amin(-1, keepdim=True) - 1).expand_as(logits)
        return rest.scatter(-1, tokens, scored)
