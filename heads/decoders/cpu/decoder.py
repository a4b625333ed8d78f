"""The decoder layers of a Llama-shaped target, and of heads, in bf16 on a CPU, by the kernels of kernels.cpp.

A forward is a single call without torch operations between its products, so a step takes about as long as reading the
weights. A token's states do not depend, bit for bit, on the other tokens of the forward, so drafting and verifying
gives exactly the text of decoding token by token.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...nn.layers import Rotary, Tables
from ..cache import SlotCache
from ..joined_decoder import DecoderOutput, has_known_layers, has_plain_products
from ..layer_weights import LayerWeights
from . import structs
from .build import kernels, multiplies_bf16
from .products import BLOCK, blocked, is_multiplied, multiply, multiply_argmax, usable_kernels

MOST_CHANNELS = 256  # per attention head
CONVOLUTIONS = ("attention_conv", "mlp_conv")  # of DFlash2's layers
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # rotary embeddings whose angles do not depend on text length
# of a head's layer; the kernels would leave out what others do
PARTS = {"input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp", *CONVOLUTIONS}
MOST_TOKENS = 512  # per forward, where torch multiplies bf16 too: for more it is faster


class Choice(NamedTuple):
    """Request for the argmax of an output layer."""

    weight: Tensor  # as `blocked` returns it
    num_outputs: int
    best: Tensor  # [B, Q] int64, receives the result


class CpuLayers:
    """Decoder layers with their weights copied into the kernels' memory layout."""

    def __init__(self, layers: Sequence[nn.Module], *, eps: float):
        """Args: layers: accepted by `takes`, and alike except for the input size of the first one's attention."""
        first: Any = layers[0]
        attention, mlp = first.self_attn, first.mlp
        self.hidden_size, self.head_dim = attention.o_proj.out_features, attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        conv = getattr(first, CONVOLUTIONS[0], None)
        self.num_groups = 0 if conv is None else conv.kernel_projection.out_features // conv.base_kernel[..., 0].numel()
        self.mlp_size, self.read_size, self.eps = mlp.gate_proj.out_features, attention.q_proj.in_features, eps
        self.weights = [blocked_weights(layer) for layer in layers]
        self.layers = (structs.Layer * len(layers))()
        for layer, weights in zip(self.layers, self.weights, strict=True):
            for name, weight in zip(LayerWeights._fields, weights, strict=True):
                setattr(layer, name, None if weight is None else weight.data_ptr())

    @staticmethod
    def takes(layers: Sequence[nn.Module]) -> bool:
        """Whether the kernels are available and support the sizes and dtypes of these Llama-shaped layers."""
        first: Any = layers[0]
        attention, mlp = first.self_attn, first.mlp
        weight, head_dim = attention.o_proj.weight, attention.head_dim
        sizes = weight.shape[0], mlp.gate_proj.out_features, attention.q_proj.in_features, head_dim
        is_fit = all(size % 2 == 0 for size in sizes) and head_dim <= MOST_CHANNELS and is_multiplied(weight)
        return is_fit and all(has_plain_products(layer, weight.dtype) for layer in layers) and kernels() is not None

    @classmethod
    def of(cls, layers: Sequence[nn.Module], config: Any) -> "CpuLayers | None":
        """The layers of a head with this config; None if the kernels do not support them."""
        is_known = all(PARTS.issuperset(name for name, _ in layer.named_children()) for layer in layers)
        fits = is_known and config.hidden_act == "silu" and cls.takes(layers)
        return cls(layers, eps=config.rms_norm_eps) if fits else None

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
        tables: Tables,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        last: Tensor | None = None,
        read: Tensor | None = None,
        first_layer: int = 0,
        entering: Iterable[Tensor | None] = (),
        final_norm: Tensor | None = None,
        choice: "Choice | None" = None,
    ) -> Tensor:
        """Read tokens into the slots that `cache.seek` set: [B, Q, D] -> [B, Q, D].

        Args:
            x: the residual stream. tables: of the rotary embedding. positions: [B, Q] rows of the tables.
            mask: [B, 1, Q, P] additive; None: a token sees the slots up to its own, or up to `last` [B, Q].
            read: [B, Q, in] input of the first layer's attention; None: the normalised residual stream.
            first_layer: index of the first layer in the cache.
            entering: per layer, a tensor like x that receives the residual stream entering it; None: not kept.
            final_norm: [D] gain of a norm after the last layer; None: no norm.
            choice: also compute the argmax of an output layer for each token.
        """
        library, x = kernels(), x.clone(memory_format=torch.contiguous_format)
        assert library is not None
        for layer, place in zip(self.layers, entering, strict=False):
            layer.kept = None if place is None else place.data_ptr()
        mask = None if mask is None else mask.expand(len(x), 1, x.shape[1], -1).contiguous()
        slots = cache.positions.expand(x.shape[:2]).contiguous()
        last = slots if last is None else last.expand_as(slots).contiguous()
        positions = slots if positions is cache.positions else positions.expand_as(slots).contiguous()
        read = None if read is None else read.contiguous()
        forward = self.forward_over(x, cache, tables, first_layer=first_layer)
        forward.positions, forward.slots = positions.data_ptr(), slots.data_ptr()
        if mask is None:
            forward.last = last.data_ptr()
        else:
            forward.mask = mask.data_ptr()
        if read is not None:
            forward.read = read.data_ptr()
        if final_norm is not None:
            forward.final_norm = final_norm.data_ptr()
        if choice is not None:
            forward.output, forward.num_outputs = choice.weight.data_ptr(), choice.num_outputs
            forward.best = choice.best.data_ptr()
        library.decode(self.layers, len(self.layers), ctypes.byref(forward), x.data_ptr())
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

    def forward_over(self, x: Tensor, cache: SlotCache, tables: Tables, *, first_layer: int = 0) -> structs.Forward:
        """The sizes, strides and tensors that every call of the kernels for x [B, Q, in] needs."""
        whole = cache.whole(len(x), self.num_kv_heads, self.head_dim, like=x)
        layer_stride, value_stride, row_stride, head_stride = whole.stride()[:4]
        return structs.Forward(
            hidden=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp=self.mlp_size,
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
            cache=whole.data_ptr() + first_layer * layer_stride * whole.element_size(),
            cos=tables.cos.data_ptr(),
            sin=tables.sin.data_ptr(),
            eps=self.eps,
        )


def most_kernel_tokens() -> float:
    """For how many tokens per forward the kernels are faster than torch, which elsewhere emulates bf16."""
    return MOST_TOKENS if multiplies_bf16() else math.inf


class CpuDecoder:
    """A target's layers and output layer for decoding."""

    compiles = False  # nothing depends on shapes that would need compiling
    knows_chains = True

    def __init__(self, model: nn.Module, layers: nn.ModuleList, final_norm: nn.Module, config: Any, output: Tensor):
        self.layers = CpuLayers(list(layers), eps=config.rms_norm_eps)
        base, norm, rope = cast(Any, model), cast(Any, final_norm), config.rope_parameters or {}
        self.final_norm: Tensor = norm.weight.detach()
        self.rotary = Rotary(config, of=base.rotary_emb)
        self.has_tables = rope.get("rope_type", "default") in FIXED_ROPES
        self.output, self.vocab_size = blocked(output), len(output)

    @property
    def most_tokens(self) -> float:
        """Per forward."""
        return most_kernel_tokens()

    @staticmethod
    def takes(layers: nn.ModuleList, config: Any, weight: Tensor) -> bool:
        """Whether the kernels are available and support these layers. Args: weight: [V, D] of the output layer."""
        return is_multiplied(weight) and has_known_layers(layers, config, weight) and CpuLayers.takes(list(layers))

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
        """As JoinedDecoder.read, except that without a mask each token sees the slots up to its own.

        Args: chooses: whether to compute `best` too.
        """
        choice = Choice(self.output, self.vocab_size, torch.empty(x.shape[:2], dtype=torch.long)) if chooses else None
        entering = {i: torch.empty_like(x) for i in wanted}
        by_layer = [entering.get(i) for i in range(len(self.layers.weights))]
        if self.has_tables:
            tables = self.rotary.tables(cache.max_length, like=x)
        else:
            cos, sin = self.rotary.embedding(x, positions.expand(x.shape[:2]))
            tables = Tables(cos.contiguous(), sin.contiguous())
            positions = torch.arange(x[..., 0].numel()).view(x.shape[:2])
        ends = {"final_norm": self.final_norm, "choice": choice}
        out = self.layers(x, cache, tables, positions, mask=mask, entering=by_layer, **ends)
        return DecoderOutput(out, entering, None if choice is None else choice.best)

    def logits(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V] bf16."""
        return multiply(post_norm, self.output, self.vocab_size)

    def best(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [...] the argmax of `logits`."""
        return multiply_argmax(post_norm, self.output, self.vocab_size)


def blocked_weights(layer: Any) -> LayerWeights:
    """The weights of a known decoder layer: norms and biases as they are, matrices blocked, and the blocks of gate and
    up interleaved."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = attention.q_proj, attention.k_proj, attention.v_proj
    return LayerWeights(
        attention_norm=gain_of(layer.input_layernorm),
        qkv=blocked(torch.cat([module.weight for module in inputs])),
        bias=None if inputs[0].bias is None else torch.cat([module.bias for module in inputs]).detach(),
        query_norm=gain_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=gain_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
        output=blocked(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.stack([blocked(mlp.gate_proj.weight), blocked(mlp.up_proj.weight)], 1),
        down=blocked(mlp.down_proj.weight),
        **convolutions(layer),
    )


def convolutions(layer: Any) -> dict[str, Tensor]:
    """The taps of a layer's convolutions, and the blocked matrices that correct them; empty if it has none."""
    weights = {}
    for name in CONVOLUTIONS:
        if (conv := getattr(layer, name, None)) is not None:
            prefix = name.removesuffix("_conv")
            weights[f"{prefix}_taps"] = conv.base_kernel.detach().contiguous()
            weights[f"{prefix}_correction"] = blocked(conv.kernel_projection.weight)
    return weights


def gain_of(norm: Any) -> Any:
    """[D] the gain of a norm; None if there is no norm, as before a head's first layer."""
    return None if isinstance(norm, nn.Identity) else norm.weight.detach()
