"""How the layers of a model compute what their names do not say, found by running them.

The kernels are used if they give, layer by layer, what the model's own code gives.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.rotary import Tables
from .parts import LayerParts

NUM_TOKENS = 24  # of the text on which layers are compared
# how far states may be apart by rounding: a share of what a layer adds, and a step of bf16 of the whole state; that far
# on average over the tokens, and MOST times as far at one of them
USUALLY_OFF, STEP, MOST = 0.03, 2**-7, 4
MOST_TIES = 2  # of the tokens, where a layer has experts
ALMOST_ALL = 0.98  # of a norm's results: those that are rounded elsewhere agree in fewer
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [F.silu, lambda x: F.gelu(x, approximate="tanh")]  # as kernels.cpp has


@dataclass(frozen=True)
class Arithmetic:
    """How all layers of a model compute; as Llama's unless told otherwise. Fields as in kernels.cpp."""

    eps: float
    centred: bool = False
    adds_one: bool = False
    rounds: bool = True
    activation: int = 0
    soft_cap: float = 0.0
    residual_scale: float = 1.0
    by_pairs: bool = False
    norms_all_heads: bool = False
    is_parallel: bool = False
    shares_add_up: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """How the attention of one layer differs from the others'."""

    scale: float  # of its scores
    window: int = 0  # tokens that it sees, the query's own included; 0: all
    rope: int = 0  # which rotary tables; -1: none


class Ropes:
    """The rotary embeddings of a model: one, or one for each type of attention."""

    def __init__(self, module: Any, layer_types: Sequence[str]):
        self.module = module
        by_type = "layer_type" in inspect.signature(module.forward).parameters
        given = module.config.rope_parameters or {}
        types: list[Any] = list(sorted({kind for kind in layer_types if given.get(kind)}))
        self.types: list[Any] = types if by_type else [None]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The parameters of each rotary embedding, as the config has them."""
        given = self.module.config.rope_parameters or {}
        return [given] if self.types == [None] else [given[kind] for kind in self.types]

    def of(self, layer_type: str | None) -> int:
        """The tables that a layer of this type may use."""
        return self.types.index(layer_type) if layer_type in self.types else 0 if self.types == [None] else -1

    def tables(self, x: Tensor, positions: Tensor, *, by_pairs: bool) -> list[Tables]:
        """For positions [B, P], in x's dtype, [B * P, R] each: cosines and sines by channel, as they are multiplied."""
        found = []
        for kind in self.types:
            pair = self.module(x, positions, *([] if kind is None else [kind]))
            found.append(Tables(*(by_channel(part.to(x.dtype).flatten(0, 1), by_pairs).contiguous() for part in pair)))
        return found


def by_channel(table: Tensor, by_pairs: bool) -> Tensor:
    """[P, R] from a table in which each angle stands twice, in either order, or once."""
    half = table.shape[-1] // 2
    if torch.equal(table[..., :half], table[..., half:]):
        angles = table[..., :half]
    else:
        angles = table[..., ::2] if torch.equal(table[..., ::2], table[..., 1::2]) else table
    return angles.repeat_interleave(2, -1) if by_pairs else torch.cat([angles, angles], -1)


@dataclass
class Layerwise:
    """What enters and leaves each layer of a model on a text [1, T] at positions [T]: [1, T, D] each."""

    ids: Tensor
    positions: Tensor
    entering: list[Tensor]
    leaving: list[Tensor]


def seen_by_layers(target: Any, *, first: int) -> Layerwise:
    """The model's own forward of a text that begins at position `first`."""
    ids = (torch.arange(NUM_TOKENS) * 7919 + 11)[None] % target.vocab_size
    seen = Layerwise(ids, torch.arange(first, first + NUM_TOKENS), [], [])

    def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.entering.append(args[0] if args else kwargs["hidden_states"])
        seen.leaving.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in target.layers]
    try:
        target.base(input_ids=ids, position_ids=seen.positions[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def arithmetics(parts: Sequence[LayerParts], config: Any) -> Iterator[Arithmetic]:
    """The arithmetics that may be the model's, the likeliest first; none if its norms or its activation are of another
    kind."""
    first = parts[0]
    norm = next((norm_arithmetic(module) for module in first.norms.values()), None)
    act = getattr(first.mlp.module, "act_fn", None) or getattr(first.mlp.module, "activation_fn", None)
    activation = None if act is None else activation_of(act)
    sums = {shares_add_up(part.mlp.router) for part in parts if part.mlp.router is not None} or {False}
    if norm is None or activation is None or len(sums) > 1 or None in sums:
        return
    query_norm: Any = first.norms.get("query_norm")
    base = replace(
        norm,
        activation=activation,
        norms_all_heads=query_norm is not None and query_norm.weight.numel() != first.attention.head_dim,
        is_parallel="mlp_norm" not in first.norms and "mlp_after" not in first.norms,
        shares_add_up=True in sums,
    )
    scales = {1.0, float(getattr(config, "residual_multiplier", None) or 1.0)}
    caps = {0.0, float(getattr(first.attention, "attn_logit_softcapping", None) or 0.0)}
    for scale, cap, by_pairs in itertools.product(sorted(scales), sorted(caps, reverse=True), (False, True)):
        yield replace(base, residual_scale=scale, soft_cap=cap, by_pairs=by_pairs)


def norm_arithmetic(norm: Any) -> Arithmetic | None:
    """How a norm computes, found by comparing what it gives; None: in no way that the kernels know."""
    eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
    if eps is None or not hasattr(norm, "weight"):
        return None
    ways = itertools.product((False, True), (False, True), (True, False))
    tried = (Arithmetic(eps, centred=centred, adds_one=adds_one, rounds=rounds) for centred, adds_one, rounds in ways)
    return next((how for how in tried if computes_so(norm, how)), None)


def computes_so(norm: Any, how: Arithmetic) -> bool:
    """Whether a norm gives what the kernels would, but for single steps where its last bits fall otherwise."""
    x = torch.randn(64, norm.weight.numel(), generator=torch.Generator().manual_seed(0)).to(norm.weight.dtype) * 3 + 0.5
    return float((normalised(x, norm.weight, how) == norm(x)).float().mean()) > ALMOST_ALL


def normalised(x: Tensor, gain: Tensor, how: Arithmetic) -> Tensor:
    """A norm of x [..., D] as the kernels compute it."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True) if how.centred else wide
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + how.eps)
    wide = wide.to(x.dtype).float() if how.rounds else wide
    return (wide * (gain.float() + how.adds_one)).to(x.dtype)


def activation_of(function: Callable[[Tensor], Tensor]) -> int | None:
    x = torch.linspace(-8, 8, 201)
    try:
        found = function(x)
    except Exception:  # of unknown code
        return None
    return next((i for i, known in enumerate(ACTIVATIONS) if torch.allclose(found, known(x), atol=1e-6)), None)


def shares_add_up(router: Any) -> bool | None:
    """Whether a router divides the shares of a token's experts by their sum; None if it does not choose the largest of
    a softmax over all."""
    x = torch.randn(64, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(router.weight.dtype)
    try:
        _, shares, chosen = router(x)
    except Exception:  # of unknown code
        return None
    largest = F.linear(x, router.weight).float().softmax(-1).topk(router.top_k)
    if not torch.equal(chosen, largest.indices):
        return None
    ways = {True: largest.values / largest.values.sum(-1, keepdim=True), False: largest.values}
    return next((adds for adds, values in ways.items() if torch.allclose(shares.float(), values, atol=2**-7)), None)


def distance(ours: Tensor, seen: Layerwise, layer: int, *, num_ties: int = 0) -> float:
    """How far our states [1, T, D] behind a layer are from the model's: up to 1 by rounding alone, else infinite.

    Args: num_ties: of so many tokens a router may choose another expert, whose score is the same but for rounding.
    """
    before, after = seen.entering[layer].float(), seen.leaving[layer].float()
    off, added = (ours.float() - after).norm(dim=-1), (after - before).norm(dim=-1)
    share = (off / (USUALLY_OFF * added + STEP * after.norm(dim=-1))).flatten()  # [T]
    if not share.isfinite().all():
        return math.inf
    share = share.sort().values[: len(share) - num_ties]
    return float(share.mean()) if share.mean() <= 1 and share.max() <= MOST else math.inf
