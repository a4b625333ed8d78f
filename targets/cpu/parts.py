"""The parameters of a decoder layer by what they do, by the names that transformers gives them. Whether they do it is
found by `agreement`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layer_weights import LayerWeights
from .packing import experts_of, has_experts
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


class GatedMLP(NamedTuple):
    """The MLP of a layer."""

    module: Any  # with the activation
    gate_up: list[nn.Linear]  # or one for both
    down: nn.Linear
    router: None = None  # of experts alone

    @property
    def size(self) -> int:
        """Its channels."""
        return self.down.in_features

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.gate_up, self.down]

    @property
    def is_multiplied(self) -> bool:
        return all_multiplied(self.modules) and len({linear.bias is None for linear in self.gate_up}) == 1

    def weights(self) -> dict[str, Tensor | None]:
        """By the field of `LayerWeights`: matrices blocked, the blocks of gate and up by turns."""
        return {
            "gate_up": gate_up_blocks(torch.cat([linear.weight for linear in self.gate_up])),
            "gate_up_bias": joined_bias(self.gate_up),
            "down": blocked(self.down.weight),
            "down_bias": joined_bias([self.down]),
        }


class Experts(NamedTuple):
    """The experts of a mixture, of which a router chooses a few for each token."""

    module: Any  # with the activation
    router: Any

    @property
    def size(self) -> int:
        """Channels of each."""
        return experts_of(self.module)[1].shape[2]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.module, self.router]

    @property
    def is_multiplied(self) -> bool:
        products = [self.router.weight, *(weight[0] for weight in experts_of(self.module))]
        return self.module.has_gate and not self.module.has_bias and all(map(is_multiplied, products))

    def weights(self) -> dict[str, Tensor | None]:
        """As of `GatedMLP`, those of all experts behind each other."""
        gate_up, down = experts_of(self.module)
        return {
            "router": blocked(self.router.weight),
            "gate_up": torch.stack([gate_up_blocks(weight) for weight in gate_up]),
            "down": torch.stack([blocked(weight) for weight in down]),
        }


class LayerParts(NamedTuple):
    """What one layer is made of."""

    attention: Any
    mlp: GatedMLP | Experts
    norms: dict[str, nn.Module]  # by the field of `LayerWeights`; those that there are
    inputs: list[nn.Linear]  # queries, keys, values; or one for all
    output: nn.Linear
    sinks: Tensor | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of the residual stream, query heads, key heads, channels of a head."""
        head_dim, num_heads = self.attention.head_dim, self.output.in_features // self.attention.head_dim
        num_kv_heads = (sum(linear.out_features for linear in self.inputs) // head_dim - num_heads) // 2
        return self.output.out_features, num_heads, num_kv_heads, head_dim

    @property
    def linears(self) -> list[nn.Linear]:
        return [*self.inputs, self.output]

    def is_whole(self, layer: nn.Module) -> bool:
        """Whether these are all the layer's parameters."""
        known = {id(parameter) for part in [*self.linears, *self.mlp.modules] for parameter in part.parameters()}
        known |= {id(norm.weight) for norm in self.norms.values() if hasattr(norm, "weight")} | {id(self.sinks)}
        return all(id(parameter) in known for parameter in layer.parameters())

    @property
    def is_multiplied(self) -> bool:
        """Whether the kernels support its sizes and dtypes: plain products in bf16, biases of inputs on all or none."""
        *sizes, head_dim = self.sizes
        is_even = all(size % 2 == 0 for size in (sizes[0], head_dim, self.mlp.size, self.inputs[0].in_features))
        is_plain = all_multiplied(self.linears) and self.mlp.is_multiplied
        gains = all(weight is None or weight.dtype == torch.bfloat16 for weight in map(gain_of, self.norms.values()))
        has_biases = {linear.bias is None for linear in self.inputs}
        return is_even and head_dim <= MOST_CHANNELS and is_plain and gains and len(has_biases) == 1

    def weights(self, layer: nn.Module) -> LayerWeights:
        """Norms and biases as they are, matrices blocked, and the blocks of gate and up interleaved."""
        return LayerWeights(
            **{name: gain_of(self.norms.get(name)) for name in NO_NORMS},
            qkv=blocked(torch.cat([linear.weight for linear in self.inputs])),
            bias=joined_bias(self.inputs),
            output=blocked(self.output.weight),
            output_bias=joined_bias([self.output]),
            sinks=None if self.sinks is None else self.sinks.detach().contiguous(),
            **self.mlp.weights(),
            **convolutions(layer),
        )


NO_NORMS = (*NORMS[0], *HEAD_NORMS)


def parts_of(layer: Any) -> LayerParts | None:
    """None if it is not made of attention and a gated MLP, or experts, with the usual names."""
    attention, mlp = getattr(layer, "self_attn", None), mlp_of(getattr(layer, "mlp", None))
    inputs = named(attention, ["qkv_proj"]) or named(attention, ["q_proj", "k_proj", "v_proj"])
    output = named(attention, ["o_proj"])
    if not (inputs and mlp and output and hasattr(attention, "head_dim")):
        return None
    is_sandwich = any(hasattr(layer, NORMS[0][name]) for name in ("mlp_norm", "mlp_after"))
    fields = NORMS[0 if is_sandwich else 1]
    norms = {field: getattr(layer, name) for field, name in fields.items() if hasattr(layer, name)}
    for field, names in HEAD_NORMS.items():
        found = [getattr(attention, name) for name in names if hasattr(attention, name)]
        norms |= dict([(field, found[0])] if found else [])
    sinks = getattr(attention, "sinks", None)
    return LayerParts(attention, mlp, norms, inputs, output[0], sinks)


def mlp_of(module: Any) -> GatedMLP | Experts | None:
    experts, router = getattr(module, "experts", None), getattr(module, "gate", None)
    if has_experts(experts) and hasattr(router, "top_k") and not list(module.buffers()):
        return Experts(experts, router)
    gate_up = named(module, ["gate_up_proj"]) or named(module, ["gate_proj", "up_proj"])
    down = named(module, ["down_proj"])
    return GatedMLP(module, gate_up, down[0]) if gate_up and down else None


def all_multiplied(modules: list[Any]) -> bool:
    return all(type(linear) is nn.Linear and is_multiplied(linear.weight) for linear in modules)


def gate_up_blocks(weight: Tensor) -> Tensor:
    """The blocks of gate and up [2 F, D] by turns."""
    gate, up = weight.chunk(2)
    return torch.stack([blocked(gate), blocked(up)], 1)


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
