"""The decoder layers of a Llama-shaped target in bf16 on a CPU, by the kernels of cpu_kernels.cpp.

A forward is one call: no operation of torch lies between its products, so a step takes about as long as reading the
weights. A token's states are the same whatever else is read with it, bit for bit: a text that was drafted and verified
is the text that was decoded token by token.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from .cache import SlotCache
from .cpu_kernels import blocked, is_multiplied, kernels, multiply, number, pointer
from .joined_decoder import LayerWeights, is_known

MOST_CHANNELS = 256  # of a head


class LayerPointers(ctypes.Structure):
    """`Layer` of the source."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*LayerWeights._fields, "keys", "values", "kept")]


class Shape(ctypes.Structure):
    """`Shape` of the source."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("hidden", "num_heads", "num_kv_heads", "head_dim", "mlp", "num_rows", "num_queries", "extent"),
                *("row_stride", "head_stride", "num_threads"),
            )
        ),
        ("eps", ctypes.c_float),
    ]


class CpuDecoder:
    """A target's layers and output layer, their weights copied in the order in which the kernels read them."""

    compiles = False  # there is nothing to compile by shape
    most_tokens = 512  # of one forward: the model's own attention is faster for many

    def __init__(self, model: nn.Module, layers: nn.ModuleList, final_norm: nn.Module, config: Any, output: Tensor):
        first: Any = layers[0]
        self.config, self.head_dim = config, first.self_attn.head_dim
        self.final_norm: Any = final_norm
        self.rotary: Any = model.rotary_emb
        self.weights = [weights_of(layer) for layer in layers]
        self.layers = (LayerPointers * len(layers))()
        for layer, weights in zip(self.layers, self.weights, strict=True):
            for name, weight in zip(LayerWeights._fields, weights, strict=True):
                setattr(layer, name, None if weight is None else weight.data_ptr())
        self.output, self.vocab_size = blocked(output), len(output)

    @staticmethod
    def takes(layers: nn.ModuleList, config: Any, weight: Tensor) -> bool:
        """Whether the kernels compute what these layers do, and are there. Args: weight: [V, D] of the output layer."""
        head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = config.hidden_size, config.intermediate_size, head_dim
        is_fit = all(size % 2 == 0 for size in sizes) and head_dim <= MOST_CHANNELS
        return is_fit and is_multiplied(weight) and is_known(layers, config, weight) and kernels() is not None

    def read(
        self,
        x: Tensor,
        positions: Tensor,
        cache: SlotCache,
        mask: Tensor | None,
        *,
        wanted: set[int],
        is_round: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As JoinedDecoder.read."""
        library = kernels()
        assert library is not None
        x = x.contiguous().clone()
        cos, sin = (part.to(x.dtype).contiguous() for part in self.rotary(x, positions.expand(len(x), -1)))
        slots = cache.positions.expand(len(x), -1).contiguous()
        seen = None if mask is None else mask.expand(len(x), 1, x.shape[1], -1).contiguous()
        kept = {i: torch.empty_like(x) for i in wanted if i < len(self.weights)}
        empty = x.new_empty(len(x), self.config.num_key_value_heads, 0, self.head_dim)
        keys = values = empty
        for i, layer in enumerate(self.layers):
            keys, values = cache.layer(i, empty, empty).readable_slots(cache.extent)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layer.kept = kept[i].data_ptr() if i in kept else None
        shape = Shape(
            *(x.shape[-1], self.config.num_attention_heads, keys.shape[1], self.head_dim),
            *(self.config.intermediate_size, x.shape[0], x.shape[1], cache.extent, keys.stride(0), keys.stride(1)),
            *(torch.get_num_threads(), self.config.rms_norm_eps),
        )
        library.decode(
            self.layers,
            number(len(self.layers)),
            ctypes.byref(shape),
            *map(pointer, (x, cos, sin, slots, seen)),
        )
        return self.final_norm(x), kept

    def logits(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V] bf16."""
        return multiply(post_norm, self.output, self.vocab_size)


def weights_of(layer: Any) -> LayerWeights:
    """Of a known decoder layer: norms and biases as they are, products blocked, the blocks of gate and up by turns."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = attention.q_proj, attention.k_proj, attention.v_proj
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=blocked(torch.cat([module.weight for module in inputs])),
        bias=None if inputs[0].bias is None else torch.cat([module.bias for module in inputs]).detach(),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        output=blocked(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.stack([blocked(mlp.gate_proj.weight), blocked(mlp.up_proj.weight)], 1),
        down=blocked(mlp.down_proj.weight),
    )
