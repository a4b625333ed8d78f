"""The layers of a Llama-shaped target for decoding on a GPU: joined weights, few launches, one compilation for all.

Queries, keys and values are one matrix product, as are gate and up; the module's weights become views of the joined
ones. The mask is tiled once per forward. A layer is compiled once, for all layers. On a CPU
`decoder.py` takes its place; it stands here as both read the same weights, `layer_weights.py`.
"""

import math
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ...base.errors import first_line
from ..caches.attention import any_shape
from ..caches.cache import SlotCache
from ..caches.split_attention import masked_attention
from ..layers.rotary import rotate
from .layer_weights import LayerWeights

# decoder layers of transformers that `decoder_layer` reproduces
KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
FEWEST_COMPILED = 2**24  # weights; for smaller targets the seconds that compiling takes do not pay
NUM_PRODUCTS = 7  # of a layer: queries, keys, values, output, gate, up, down
COMPILES_FROM = "2.11"  # the first torch that can compile ahead of time


class Sizes(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


class Shared(NamedTuple):
    """Inputs that all layers of one forward share."""

    cos: Tensor  # [B, 1, Q, H]
    sin: Tensor
    # where new keys and values are written; not through a transposed view, for which inductor copies the whole cache
    rows: Tensor  # [B, 1, 1]
    kv_heads: Tensor  # [Nkv, 1]
    slots: Tensor  # [B, 1, Q]
    mask: Tensor | None  # [B, 1, G * Q, P] additive; None: the queries see all of the cache


Layer = Callable[..., tuple[Tensor, Tensor]]


def decodes_joined(device: torch.device) -> bool:
    """Whether joining weights pays: where kernel launches take time, so not on a CPU."""
    return device.type != "cpu"


class DecoderOutput(NamedTuple):
    """The result of a decoder's forward."""

    post_norm: Tensor  # [B, Q, D]
    entering: dict[int, Tensor]  # by wanted layer, the residual stream [B, Q, D] that enters it
    best: Tensor | None = None  # [B, Q] the most probable next tokens, if the decoder computed them too


class JoinedDecoder:
    """The joined layers of a target; results equal the model's up to rounding."""

    most_tokens = math.inf  # per forward
    knows_chains = False  # whether, without a mask, each token sees the slots up to its own instead of the whole cache

    def __init__(self, model: nn.Module, layers: nn.ModuleList, final_norm: nn.Module, config: Any, output: Tensor):
        first: Any = layers[0]
        heads = config.num_attention_heads, config.num_key_value_heads, first.self_attn.head_dim
        self.sizes = Sizes(*heads, config.rms_norm_eps)
        self.layers = [weights_of(layer) for layer in layers]
        self.norms: list[Any] = [*(weights.attention_norm for weights in self.layers), final_norm.weight]
        self.output = output.detach()
        self.rotary: Any = model.rotary_emb
        self.kv_heads = torch.arange(self.sizes.num_kv_heads, device=output.device)[:, None]  # [Nkv, 1]
        self.compiled: dict[tuple[int, int, int], Layer] = {}
        num_weights = sum(weight.numel() for weight in model.parameters())
        self.compiles = num_weights >= FEWEST_COMPILED and can_compile(output.device)

    @staticmethod
    def takes(layers: nn.ModuleList, config: Any, weight: Tensor) -> bool:
        """Whether this decoder supports these layers: of a known kind, frozen, and not on a CPU.

        Args: weight: [V, D] of the output layer.
        """
        is_frozen = not any(parameter.requires_grad for parameter in layers.parameters())
        return decodes_joined(weight.device) and is_frozen and has_known_layers(layers, config, weight)

    def read(
        self,
        x: Tensor,
        positions: Tensor,
        cache: SlotCache,
        mask: Tensor | None,
        *,
        wanted: set[int],
        is_round: bool = False,
    ) -> DecoderOutput:
        """Read embedded tokens into the slots that `cache.seek` set.

        Args:
            x: [B, Q, D]. positions: [B, Q]. mask: [B, 1, Q, P] additive, or None. wanted: layers whose input to keep.
            is_round: whether many forwards of this shape will follow, so that kernels are planned and compiled for it.
        """
        cos, sin = self.rotary(x, positions)  # [B, Q, H]
        normed = rms_norm(x, self.norms[0], self.sizes.eps)
        groups = self.sizes.num_heads // self.sizes.num_kv_heads
        if mask is not None and groups > 1:
            mask = mask.repeat(1, 1, groups, 1)
        written = cache.rows[:, None], self.kv_heads, cache.positions[:, None]
        shared = Shared(cos[:, None], sin[:, None], *written, mask)
        entering = {}
        empty = x.new_empty(len(x), self.sizes.num_kv_heads, 0, self.sizes.head_dim)
        with nullcontext() if is_round else any_shape(x.device):
            for i, (weights, next_norm) in enumerate(zip(self.layers, self.norms[1:], strict=True)):
                if i in wanted:
                    entering[i] = x
                keys, values = cache.layer(i, empty, empty).readable_slots(cache.extent)
                layer = self._compiled if is_round and self.compiles else decoder_layer
                x, normed = layer(x, normed, weights, next_norm, keys, values, shared, self.sizes)
        return DecoderOutput(normed, entering)

    def logits(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return F.linear(post_norm, self.output)

    def _compiled(
        self,
        x: Tensor,
        normed: Tensor,
        weights: LayerWeights,
        next_norm: Tensor,
        keys: Tensor,
        values: Tensor,
        shared: Shared,
        sizes: Sizes,
    ) -> tuple[Tensor, Tensor]:
        key = x.shape[0], x.shape[1], keys.shape[2]
        if key not in self.compiled:
            try:
                self.compiled[key] = compiled_layer(x, normed, weights, next_norm, keys, values, shared, sizes)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of dynamo, inductor or the C++ compiler
                warnings.warn(f"decoding uncompiled, and slower: {first_line(error)}", stacklevel=2)
                self.compiles = False
                return decoder_layer(x, normed, weights, next_norm, keys, values, shared, sizes)
        return self.compiled[key](x, normed, *weights, next_norm, keys, values, *shared)


def decoder_layer(
    x: Tensor,
    normed: Tensor,
    w: LayerWeights,
    next_norm: Tensor,
    keys: Tensor,
    values: Tensor,
    shared: Shared,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """One decoder layer over a cache; writes into keys and values [B, Nkv, P, H].

    Args: x, normed: [B, Q, D] the residual stream before and behind this layer's first norm. next_norm: [D] of the next
    layer, or the final one: one kernel then adds to the stream and normalises it.

    Returns: the stream that enters the next layer, before and behind `next_norm`.
    """
    num_rows, num_queries, _ = x.shape
    num_heads, num_kv, head_dim, eps = sizes
    projected = F.linear(normed, w.qkv)
    if w.bias is not None:
        projected = projected + w.bias
    heads = projected.view(num_rows, num_queries, num_heads + 2 * num_kv, head_dim)
    heads = heads.transpose(1, 2)  # [B, N + 2 Nkv, Q, H]
    queries, new_keys, new_values = heads.split([num_heads, num_kv, num_kv], 1)
    rotary = shared.cos, shared.sin
    if w.query_norm is not None and w.key_norm is not None:
        queries, new_keys = rms_norm(queries, w.query_norm, eps), rms_norm(new_keys, w.key_norm, eps)
        queries, new_keys = rotate(queries, rotary), rotate(new_keys, rotary)
    else:  # queries and keys are adjacent, so one rotation serves both
        queries, new_keys = rotate(heads[:, : num_heads + num_kv], rotary).split([num_heads, num_kv], 1)
    where = shared.rows, shared.kv_heads, shared.slots
    keys.index_put_(where, new_keys)
    values.index_put_(where, new_values)
    grouped = queries.reshape(num_rows, num_kv, num_heads // num_kv * num_queries, head_dim)
    if shared.mask is None:
        mixed = F.scaled_dot_product_attention(grouped, keys, values)
    else:
        mixed = masked_attention(grouped, keys, values, shared.mask)
    mixed = mixed.reshape(num_rows, num_heads, num_queries, head_dim).transpose(1, 2)
    x = x + F.linear(mixed.reshape(num_rows, num_queries, num_heads * head_dim), w.output)
    gate, up = F.linear(rms_norm(x, w.mlp_norm, eps), w.gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, w.down)
    return x, rms_norm(x, next_norm, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, computed on a CPU as transformers' Llama does (normalised in fp32, scaled in x's dtype), and
    elsewhere by one kernel that scales in fp32."""
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def weights_of(layer: Any) -> LayerWeights:
    """The joined weights of a known decoder layer; the module's own become views of them."""
    attention, mlp = layer.self_attn, layer.mlp
    inputs = attention.q_proj, attention.k_proj, attention.v_proj
    biases = [module.bias for module in inputs]
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        stacked_weights(*inputs),
        None if biases[0] is None else torch.cat(biases).detach(),
        attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        stacked_weights(attention.o_proj),
        layer.post_attention_layernorm.weight.detach(),
        stacked_weights(mlp.gate_proj, mlp.up_proj),
        stacked_weights(mlp.down_proj),
    )


def stacked_weights(*modules: nn.Linear) -> Tensor:
    """The modules' weights stacked by rows; the modules' own become views, so that no memory is duplicated."""
    if len(modules) == 1:
        return modules[0].weight.detach()
    whole = torch.cat([module.weight.detach() for module in modules])
    for module, rows in zip(modules, whole.split([module.out_features for module in modules]), strict=True):
        module.weight.data = rows
    return whole


def has_known_layers(layers: nn.ModuleList, config: Any, weight: Tensor) -> bool:
    """Whether `decoder_layer` reproduces these layers. weight: [V, D] of the output layer, of the same dtype."""
    kind = type(layers[0])  # a model's own code may call its layers as transformers does
    is_known = kind.__name__ in KNOWN_LAYERS and kind.__module__.startswith("transformers.models.")
    return is_known and config.hidden_act == "silu" and all(has_plain_products(layer, weight.dtype) for layer in layers)


def has_plain_products(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a known layer's matrices are plain nn.Linear of this dtype (not quantised, no adapter) and only the
    query, key and value projections may have a bias."""
    products = [(name, module) for name, module in layer.named_modules() if name.endswith("_proj")]
    return len(products) == NUM_PRODUCTS and all(
        type(module) is nn.Linear
        and module.weight.dtype == dtype
        and (module.bias is None or name.endswith(("q_proj", "k_proj", "v_proj")))
        for name, module in products
    )


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile may work here; on a CPU it needs a C++ compiler. Failures on a GPU are caught later."""
    has_compiler = device.type == "cuda" or (device.type == "cpu" and any(map(shutil.which, ("g++", "clang++"))))
    return TorchVersion(torch.__version__) >= COMPILES_FROM and has_compiler


def compiled_layer(
    x: Tensor,
    normed: Tensor,
    weights: LayerWeights,
    next_norm: Tensor,
    keys: Tensor,
    values: Tensor,
    shared: Shared,
    sizes: Sizes,
) -> Layer:
    """`decoder_layer` compiled for these numbers of rows, queries and slots, and the weights of any layer."""

    def layer(x: Tensor, normed: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        num = len(LayerWeights._fields)
        next_norm, keys, values, *shared = rest[num:]
        return decoder_layer(x, normed, LayerWeights(*rest[:num]), next_norm, keys, values, Shared(*shared), sizes)

    return compiled_ahead(layer, (x, normed, *weights, next_norm, keys, values, *shared))


def compiled_ahead(function: Callable[..., Any], arguments: tuple[Any, ...], *, backend: str = "inductor") -> Any:
    """A function compiled whole for arguments of these shapes, without guards: the caller keeps one for each shape."""
    options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    before_2_13: Any = torch._dynamo.config.patch(enable_aot_compile=True)  # pyright: ignore[reportAttributeAccessIssue]
    with warnings.catch_warnings(), before_2_13:
        warnings.simplefilter("ignore")  # dynamo warns about caches in transformers
        ahead: Any = torch.compile(function, fullgraph=True, dynamic=False, options=options, backend=backend)
        return ahead.aot_compile((arguments, {}))
