"""The decoder layers of a dense target, and of heads, in bf16 on a CPU, by the kernels of kernels.cpp.

A forward is a single call without torch operations between its products, so a step takes about as long as reading the
weights. A token's states do not depend, bit for bit, on the other tokens of the forward, so drafting and verifying
gives exactly the text of decoding token by token.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..caches.cache import SlotCache
from ..caches.ring_cache import RingCache
from ..layers.output_use import logits_by_bits, rises
from ..layers.rotary import Tables
from . import structs
from .agreement import (
    MOST_TIES,
    NUM_TOKENS,
    Arithmetic,
    LayerAttention,
    Layerwise,
    Ropes,
    arithmetics,
    computes_so,
    distance,
    seen_by_layers,
)
from .build import kernels, multiplies_bf16
from .joined_decoder import DecoderOutput, has_plain_products
from .layer_weights import LayerWeights
from .parts import CONVOLUTIONS, LayerParts, parts_of
from .products import BLOCK, blocked, is_multiplied, multiply, multiply_argmax, usable_kernels

FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # rotary embeddings whose angles do not depend on text length
# of a head's layer; the kernels would leave out what others do
PARTS = {"input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp", *CONVOLUTIONS}
MOST_TOKENS = 512  # per forward, where torch multiplies bf16 too: for more it is faster


class Choice(NamedTuple):
    """Request for the token of the largest logit."""

    weight: Tensor  # of the output layer, as `blocked` returns it
    num_outputs: int
    logits: Tensor | None  # [2**16] fp32 of its values, see `logits_by_bits`; None: the values
    best: Tensor  # [B, Q] int64, receives the result


class CpuLayers:
    """Decoder layers with their weights copied into the kernels' memory layout."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        parts: Sequence[LayerParts],
        how: Arithmetic,
        attentions: Sequence[LayerAttention],
    ):
        """Args: layers: alike except for the input size of the first one's attention. parts, attentions: by layer."""
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = parts[0].sizes
        conv = getattr(layers[0], CONVOLUTIONS[0], None)
        self.num_groups = 0 if conv is None else conv.kernel_projection.out_features // conv.base_kernel[..., 0].numel()
        self.read_size = parts[0].inputs[0].in_features
        self.weights = [part.weights(layer) for part, layer in zip(parts, layers, strict=True)]
        self.layers = (structs.Layer * len(layers))()
        self.set_arithmetic(how, attentions)
        for layer, part, weights in zip(self.layers, parts, self.weights, strict=True):
            layer.mlp = part.mlp.size
            if (router := part.mlp.router) is not None:
                layer.num_experts, layer.num_chosen = len(router.weight), router.top_k
            for name, weight in zip(LayerWeights._fields, weights, strict=True):
                setattr(layer, name, structs.address_of(weight))

    def set_arithmetic(self, how: Arithmetic, attentions: Sequence[LayerAttention]) -> None:
        """Compute so from now on."""
        self.how, self.attentions = how, attentions
        for layer, attention in zip(self.layers, attentions, strict=True):
            layer.window, layer.rope, layer.scale = attention.window, attention.rope, attention.scale

    @classmethod
    def of(cls, layers: Sequence[nn.Module], config: Any) -> "CpuLayers | None":
        """The layers of a head with this config; None if the kernels do not support them."""
        is_known = all(PARTS.issuperset(name for name, _ in layer.named_children()) for layer in layers)
        if not is_known or config.hidden_act != "silu" or (parts := parts_of_all(layers)) is None:
            return None
        if not all(has_plain_products(layer, torch.bfloat16) for layer in layers):
            return None
        attentions = [LayerAttention(part.attention.head_dim**-0.5) for part in parts]
        return cls(layers, parts, Arithmetic(config.rms_norm_eps), attentions)

    def is_for(self, x: Tensor) -> bool:
        """Whether to use the kernels for x [B, Q, D]: few enough tokens, and no gradients."""
        return x[..., 0].numel() <= most_kernel_tokens() and usable_kernels(x) is not None

    @property
    def writes(self) -> bool:
        """Whether `write` works: keys and values must start at a block of the joined product."""
        return self.num_heads * self.head_dim % BLOCK == 0

    def __call__(
        self,
        x: Tensor,
        cache: SlotCache,
        tables: Tables | Sequence[Tables],
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        last: Tensor | None = None,
        read: Tensor | None = None,
        only: int | None = None,
        entering: Iterable[Tensor | None] = (),
        final_norm: Tensor | None = None,
        choice: "Choice | None" = None,
    ) -> Tensor:
        """Read tokens into the slots that `cache.seek` set: [B, Q, D] -> [B, Q, D].

        Args:
            x: the residual stream. tables: of the rotary embedding, or embeddings. positions: [B, Q] their rows.
            mask: [B, 1, Q, P] additive; None: a token sees the positions up to its own, or up to `last` [B, Q].
            read: [B, Q, in] input of the first layer's attention; None: the normalised residual stream.
            only: run no layer but this one, as the first of the cache.
            entering: per layer, a tensor like x that receives the residual stream entering it; None: not kept.
            final_norm: [D] gain of a norm after the last layer; None: no norm.
            choice: also compute the argmax of an output layer for each token.
        """
        library, x = kernels(), x.clone(memory_format=torch.contiguous_format)
        assert library is not None
        for layer, place in zip(self.layers, entering, strict=False):
            layer.kept = structs.address_of(place)
        mask = None if mask is None else mask.expand(len(x), 1, x.shape[1], -1).contiguous()
        slots = cache.positions.expand(x.shape[:2]).contiguous()
        positions = slots if positions is cache.positions else positions.expand_as(slots).contiguous()
        own = positions if isinstance(cache, RingCache) else slots
        last = own if last is None else last.expand_as(slots).contiguous()
        read = None if read is None else read.contiguous()
        forward = self.forward_over(x, cache, tables)
        forward.positions, forward.slots = positions.data_ptr(), slots.data_ptr()
        forward.last = last.data_ptr() if mask is None else None
        forward.mask, forward.read, forward.final_norm = map(structs.address_of, (mask, read, final_norm))
        if choice is not None:
            forward.output, forward.num_outputs = choice.weight.data_ptr(), choice.num_outputs
            forward.logits, forward.best = structs.address_of(choice.logits), choice.best.data_ptr()
        layers = self.layers if only is None else (structs.Layer * 1)(self.layers[only])
        library.decode(layers, len(layers), ctypes.byref(forward), x.data_ptr())
        return x

    def write(self, x: Tensor, cache: SlotCache, tables: Tables, positions: Tensor) -> None:
        """Write every layer's keys and values of x, what its attention reads [B, Q, in], to the slots that `cache.seek`
        set. All layers read x as it is."""
        library, x = kernels(), x.contiguous()
        assert library is not None
        slots = cache.positions.expand(x.shape[:2]).contiguous()
        positions = slots if positions is cache.positions else positions.expand_as(slots).contiguous()
        forward = self.forward_over(x, cache, tables)
        forward.positions, forward.slots = positions.data_ptr(), slots.data_ptr()
        library.write(self.layers, len(self.layers), ctypes.byref(forward), x.data_ptr())

    def forward_over(self, x: Tensor, cache: SlotCache, tables: Tables | Sequence[Tables]) -> structs.Forward:
        """The sizes, strides and tensors that every call of the kernels for x [B, Q, in] needs."""
        whole = cache.whole(len(x), self.num_kv_heads, self.head_dim, like=x)
        layer_stride, value_stride, row_stride, head_stride = whole.stride()[:4]
        ropes, how = [tables] if isinstance(tables, Tables) else tables, self.how
        addresses, ring = structs.ADDRESS * 2, structs.Ring()
        if isinstance(cache, RingCache):
            ring = structs.Ring(cache.window.sink, cache.ring, cache.window.size)
        return structs.Forward(
            hidden=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            read_size=self.read_size,
            num_rows=x.shape[0],
            num_queries=x.shape[1],
            extent=cache.extent,
            layer_stride=layer_stride,
            value_stride=value_stride,
            row_stride=row_stride,
            head_stride=head_stride,
            num_groups=self.num_groups,
            num_threads=torch.get_num_threads(),
            cache=whole.data_ptr(),
            cos=addresses(*(rope.cos.data_ptr() for rope in ropes)),
            sin=addresses(*(rope.sin.data_ptr() for rope in ropes)),
            rotary_size=ropes[0].cos.shape[-1],
            activation=how.activation,
            soft_cap=how.soft_cap,
            residual_scale=how.residual_scale,
            norm=structs.Norm(how.eps, how.centred, how.adds_one, how.rounds),
            by_pairs=how.by_pairs,
            norms_all_heads=how.norms_all_heads,
            is_parallel=how.is_parallel,
            shares_add_up=how.shares_add_up,
            ring=ring,
        )


def parts_of_all(layers: Sequence[Any]) -> list[LayerParts] | None:
    """The parts of these layers if the kernels are available and support them: of the same sizes, in bf16."""
    parts = [parts_of(layer) for layer in layers]
    known = [part for part in parts if part is not None and part.is_multiplied]
    routers = {(len(part.mlp.router.weight), part.mlp.router.top_k) for part in known if part.mlp.router is not None}
    is_fit = len(known) == len(layers) > 0 and len({part.sizes for part in known}) == 1 and len(routers) <= 1
    return known if is_fit and kernels() is not None else None


def most_kernel_tokens() -> float:
    """For how many tokens per forward the kernels are faster than torch, which elsewhere emulates bf16."""
    return MOST_TOKENS if multiplies_bf16() else math.inf


class CpuDecoder:
    """A target's layers and output layer for decoding."""

    compiles = False  # nothing depends on shapes that would need compiling
    knows_chains = True

    def __init__(self, target: Any, layers: CpuLayers, ropes: Ropes, *, input_scale: float):
        """Args: target: a `Target`. input_scale: of the embeddings before the first layer."""
        self.layers, self.ropes, self.input_scale = layers, ropes, input_scale
        self.final_norm: Tensor = target.final_norm.weight.detach()
        rope_types = {rope.get("rope_type", "default") for rope in ropes.parameters}
        self.has_tables = rope_types.issubset(FIXED_ROPES)
        self.tables: dict[int, list[Tables]] = {}  # by size
        output = target.output_layer.weight
        self.output, self.vocab_size = blocked(output), len(output)
        self.by_bits = logits_by_bits(target)
        self.chooses = self.by_bits is None or rises(self.by_bits)  # whether the largest logit is of the largest value

    @property
    def most_tokens(self) -> float:
        """Per forward."""
        return most_kernel_tokens()

    @staticmethod
    def takes(layers: nn.ModuleList, config: Any, weight: Tensor) -> bool:
        """Whether the kernels are available and support these layers as their names describe them: with gated MLPs
        or experts, and no parameters of other kinds. Args: weight: [V, D] of the output layer."""
        parts = parts_of_all(list(layers)) if is_multiplied(weight) else None
        return parts is not None and all(part.is_whole(layer) for part, layer in zip(parts, layers, strict=True))

    @classmethod
    @torch.no_grad()
    def of(cls, target: Any) -> "CpuDecoder | None":
        """The decoder of a `Target` that it takes; None if it does not give what the model's own layers give, one by
        one, at the first and the last positions of its context."""
        layers: list[Any] = list(target.layers)
        parts, embedding = parts_of_all(layers), getattr(target.base, "rotary_emb", None)
        if parts is None or embedding is None or target.output_layer.bias is not None:
            return None
        types = target.layer_types or [None] * len(layers)
        ends = [0] if target.length_ropes else [0, max(target.num_positions - NUM_TOKENS, 0)]
        try:
            ropes = Ropes(embedding, target.layer_types)
            texts = [seen_by_layers(target, first=first) for first in ends]
        except Exception:  # of unknown code
            return None
        scale = input_scale(target, texts[0])
        attentions = [
            LayerAttention(part.attention.scaling, target.window_of(i) or 0, ropes.of(types[i]))
            for i, part in enumerate(parts)
        ]
        built, chosen = None, None
        for how in arithmetics(parts, target.config) if scale is not None else ():
            built = built or CpuLayers(layers, parts, how, attentions)
            found = agreeing(built, how, attentions, ropes, texts)
            chosen = found if chosen is None or (found is not None and found.off < chosen.off) else chosen
        if scale is None or built is None or chosen is None or not computes_so(target.final_norm, chosen.how):
            return None
        built.set_arithmetic(chosen.how, chosen.attentions)
        return cls(target, built, ropes, input_scale=scale)

    def read(
        self,
        x: Tensor,
        positions: Tensor,
        cache: SlotCache,
        mask: Tensor | None,
        *,
        wanted: set[int],
        chooses: bool = False,
    ) -> DecoderOutput:
        """Reads tokens as JoinedDecoder.read does, except that without a mask each token sees the slots up to its own.

        Args: chooses: whether to compute `best` too, where that can be done without writing logits.
        """
        best = torch.empty(x.shape[:2], dtype=torch.long) if chooses and self.chooses else None
        choice = None if best is None else Choice(self.output, self.vocab_size, self.by_bits, best)
        x = x if self.input_scale == 1 else x * self.input_scale
        entering = {i: torch.empty_like(x) for i in wanted}
        by_layer = [entering.get(i) for i in range(len(self.layers.weights))]
        if self.has_tables:
            size = max(256, 1 << (cache.max_length - 1).bit_length())
            if size not in self.tables:
                self.tables[size] = self.tables_of(x, torch.arange(size)[None])
            tables = self.tables[size]
        else:
            tables = self.tables_of(x, positions.expand(x.shape[:2]))
            positions = torch.arange(x[..., 0].numel()).view(x.shape[:2])
        ends = {"final_norm": self.final_norm, "choice": choice}
        out = self.layers(x, cache, tables, positions, mask=mask, entering=by_layer, **ends)
        return DecoderOutput(out, entering, best)

    def tables_of(self, x: Tensor, positions: Tensor) -> list[Tables]:
        return self.ropes.tables(x, positions, by_pairs=self.layers.how.by_pairs)

    def logits(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V] bf16."""
        return multiply(post_norm, self.output, self.vocab_size)

    def best(self, post_norm: Tensor, num_tokens: int) -> Tensor:
        """[..., D] -> [...] the first of these tokens with the largest logit. Only if `chooses`."""
        return multiply_argmax(post_norm, self.output, num_tokens, self.by_bits)


def input_scale(target: Any, seen: Layerwise) -> float | None:
    """What embeddings are multiplied by before the first layer; None: they become something else."""
    embedded = target.input_embedding(seen.ids)
    scales = {1.0, float(getattr(target.config, "embedding_multiplier", 0) or 1)}
    return next((scale for scale in scales if torch.equal(embedded * scale, seen.entering[0])), None)


class Agreement(NamedTuple):
    """How layers compute, so that they give what the model's own give, and how far off they are by rounding."""

    how: Arithmetic
    attentions: list[LayerAttention]
    off: float


def agreeing(
    layers: CpuLayers, how: Arithmetic, attentions: Sequence[LayerAttention], ropes: Ropes, texts: Sequence[Layerwise]
) -> Agreement | None:
    """None if a layer, computed so, does not give what the model's own gives. One that may use rotary tables may do
    without."""
    found, total = [], 0.0
    for i, attention in enumerate(attentions):
        tried: list[tuple[float, LayerAttention]] = []
        num_ties = MOST_TIES if layers.layers[i].num_experts else 0
        for rope in dict.fromkeys((attention.rope, -1)):
            chosen = replace(attention, rope=rope)
            layers.set_arithmetic(how, [*found, chosen, *attentions[i + 1 :]])
            off = (distance(layer_output(layers, i, ropes, seen), seen, i, num_ties=num_ties) for seen in texts)
            tried.append((max(off), chosen))
        off, chosen = min(tried, key=lambda one: one[0])
        if math.isinf(off):
            return None
        found.append(chosen)
        total += off
    return Agreement(how, found, total)


def layer_output(layers: CpuLayers, i: int, ropes: Ropes, seen: Layerwise) -> Tensor:
    """[1, T, D] what the kernels make of what enters a layer."""
    x = seen.entering[i]
    cache = SlotCache(num_layers=1, max_length=x.shape[1])
    rows = torch.arange(x.shape[1])[None]
    cache.seek(rows, extent=x.shape[1], is_exact=True)
    tables = ropes.tables(x, seen.positions[None], by_pairs=layers.how.by_pairs)
    return layers(x, cache, tables, rows, only=i)
