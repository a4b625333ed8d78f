"""The parameters of a decoder layer by what they do, by the names that transformers gives them. Whether they do it is
found by `agreement`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layer_weights import LayerWeights
from .products import blocked, is_multiplied

MOST_CHANNELS = 256  # per attention head
CONVOLUTIONS = ("attention_conv", "mlp_conv")  # of DFlash2's layers
# the norms before and behind attention and MLP, by the field of `LayerWeights`; the first column that fits is taken
NORMS = [
    dict(
        attention_norm="input_layernorm",
        attention_after="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_after="post_feedforward_layernorm",
    ),
    dict(
        attention_norm="input_layernorm",
        attention_after="post_self_attn_layernorm",
        mlp_norm="post_attention_layernorm",
        mlp_after="post_mlp_layernorm",
    ),
]
HEAD_NORMS = {  # of queries and keys
    "query_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "key_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}


class LayerParts(NamedTuple):
    """What one layer is made of."""

    attention: Any
    mlp: Any
    norms: dict[str, nn.Module]  # by the field of `LayerWeights`; those that there are
    inputs: list[nn.Linear]  # queries, keys, values; or one for all
    output: nn.Linear
    gate_up: list[nn.Linear]  # or one for both
    down: nn.Linear
    sinks: Tensor | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of the residual stream, query heads, key heads, channels of a head and of the MLP."""
        head_dim, num_heads = self.attention.head_dim, self.output.in_features // self.attention.head_dim
        num_kv_heads = (sum(linear.out_features for linear in self.inputs) // head_dim - num_heads) // 2
        return self.output.out_features, num_heads, num_kv_heads, head_dim, self.down.in_features

    @property
    def linears(self) -> list[nn.Linear]:
        return [*self.inputs, self.output, *self.gate_up, self.down]

    def is_whole(self, layer: nn.Module) -> bool:
        """Whether these are all the layer's parameters."""
        known = {id(parameter) for linear in self.linears for parameter in linear.parameters()}
        known |= {id(norm.weight) for norm in self.norms.values() if hasattr(norm, "weight")} | {id(self.sinks)}
        return all(id(parameter) in known for parameter in layer.parameters())

    @property
    def is_multiplied(self) -> bool:
        """Whether the kernels support its sizes and dtypes: plain products in bf16, biases of inputs on all or none."""
        *sizes, head_dim, mlp = self.sizes
        is_even = all(size % 2 == 0 for size in (sizes[0], head_dim, mlp, self.inputs[0].in_features))
        is_plain = all(type(linear) is nn.Linear and is_multiplied(linear.weight) for linear in self.linears)
        biases = ({linear.bias is None for linear in linears} for linears in (self.inputs, self.gate_up))
        gains = all(weight is None or weight.dtype == torch.bfloat16 for weight in map(gain_of, self.norms.values()))
        return is_even and head_dim <= MOST_CHANNELS and is_plain and gains and all(len(has) == 1 for has in biases)

    def weights(self, layer: nn.Module) -> LayerWeights:
        """Norms and biases as they are, matrices blocked, and the blocks of gate and up interleaved."""
        gate, up = torch.cat([linear.weight for linear in self.gate_up]).chunk(2)
        return LayerWeights(
            **{name: gain_of(self.norms.get(name)) for name in NO_NORMS},
            qkv=blocked(torch.cat([linear.weight for linear in self.inputs])),
            bias=joined_bias(self.inputs),
            output=blocked(self.output.weight),
            output_bias=joined_bias([self.output]),
            gate_up=torch.stack([blocked(gate), blocked(up)], 1),
            gate_up_bias=joined_bias(self.gate_up),
            down=blocked(self.down.weight),
            down_bias=joined_bias([self.down]),
            sinks=None if self.sinks is None else self.sinks.detach().contiguous(),
            **convolutions(layer),
        )


NO_NORMS = (*NORMS[0], *HEAD_NORMS)


def parts_of(layer: Any) -> LayerParts | None:
    """None if it is not made of attention and a gated MLP with the usual names."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    inputs = named(attention, ["qkv_proj"]) or named(attention, ["q_proj", "k_proj", "v_proj"])
    gate_up = named(mlp, ["gate_up_proj"]) or named(mlp, ["gate_proj", "up_proj"])
    output, down = named(attention, ["o_proj"]), named(mlp, ["down_proj"])
    if not (inputs and gate_up and output and down and hasattr(attention, "head_dim")):
        return None
    is_sandwich = any(hasattr(layer, NORMS[0][name]) for name in ("mlp_norm", "mlp_after"))
    fields = NORMS[0 if is_sandwich else 1]
    norms = {field: getattr(layer, name) for field, name in fields.items() if hasattr(layer, name)}
    for field, names in HEAD_NORMS.items():
        found = [getattr(attention, name) for name in names if hasattr(attention, name)]
        norms |= dict([(field, found[0])] if found else [])
    sinks = getattr(attention, "sinks", None)
    return LayerParts(attention, mlp, norms, inputs, output[0], gate_up, down[0], sinks)


def named(module: Any, names: list[str]) -> list[nn.Linear]:
    """The linear layers with these names; none if one is missing."""
    found = [getattr(module, name, None) for name in names]
    return [linear for linear in found if isinstance(linear, nn.Linear)] if None not in found else []


def joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


def gain_of(norm: Any) -> Tensor | None:
    """[D] the gain of a norm; None if there is no norm, as before a head's first layer."""
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.detach()


def convolutions(layer: Any) -> dict[str, Tensor]:
    """The taps of a layer's convolutions, and the blocked matrices that correct them; empty if it has none."""
    weights = {}
    for name in CONVOLUTIONS:
        if (conv := getattr(layer, name, None)) is not None:
            prefix = name.removesuffix("_conv")
            weights[f"{prefix}_taps"] = conv.base_kernel.detach().contiguous()
            weights[f"{prefix}_correction"] = blocked(conv.kernel_projection.weight)
    return weights
