"""The linear layers inside a model's own modules, those of experts too, by our kernels: in bf16 on a CPU."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .build import kernels
from .products import blocked, is_multiplied, kernels_for, multiply, usable_kernels

CLOSE = 0.03  # relative error up to which experts compute what they look like they do


def pack_linears(module: nn.Module, *, without: Iterable[nn.Module] = (), most_tokens: float = math.inf) -> int:
    """Make a module's bf16 linear layers on a CPU, and those of its experts, use our kernels where no gradients are
    needed.

    The kernels read a copy of the weights, so these must not change afterwards. Other layers are unchanged.

    Args: without: submodules to leave unchanged. most_tokens: for more at once, torch's product stays.
    Returns: how many layers use the kernels, the experts of a mixture being one, these and those that did before.
    """
    others = {inner for part in without for inner in part.modules()}
    found = [inner for inner in module.modules() if inner not in others and multiplied_weights(inner)]
    if not found or kernels() is None:
        return 0
    for inner in found:
        make: Any = packed_linear if isinstance(inner, nn.Linear) else packed_experts
        if "forward" not in vars(inner) and (forward := make(inner, most_tokens)) is not None:
            inner.forward = forward
    return sum("forward" in vars(inner) for inner in found)


def multiplied_weights(module: nn.Module) -> list[Tensor]:
    """A module's weights if the kernels support them, else none: [N, K] of a linear layer, [E, N, K] each of experts as
    transformers has them."""
    if type(module) is nn.Linear:
        return [module.weight] if is_multiplied(module.weight) else []
    if not has_experts(module):
        return []
    weights = experts_of(module)
    return weights if all(weight.ndim == 3 and is_multiplied(weight[0]) for weight in weights) else []


def has_experts(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "down_proj"))


def experts_of(module: Any) -> list[Tensor]:
    """[E, N, K] each: what experts multiply first, and last."""
    weights = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    return [weight.mT if module.is_transposed else weight for weight in weights]


def packed_linear(linear: nn.Linear, most_tokens: float) -> Callable[[Tensor], Tensor]:
    weight, plain, num = blocked(linear.weight), linear.forward, linear.out_features

    def forward(x: Tensor) -> Tensor:
        is_many = x.numel() > most_tokens * linear.in_features
        if is_many or (usable_kernels if linear.weight.requires_grad else kernels_for)(x) is None:
            return plain(x)
        out = multiply(x, weight, num)
        return out if linear.bias is None else out + linear.bias

    return forward


def packed_experts(module: Any, most_tokens: float) -> Callable[..., Tensor] | None:
    """The forward of the experts of a mixture; None if it does not give what their own gives on a few random tokens."""
    weights, plain = experts_of(module), module.forward
    blocks = [torch.stack([blocked(weight) for weight in all_weights]) for all_weights in weights]
    num_experts, num_inner, hidden = weights[0].shape

    def forward(x: Tensor, indices: Tensor, shares: Tensor) -> Tensor:
        """[S, D], the experts [S, k] of each token and their shares of what is added -> [S, D]."""
        usable = usable_kernels if module.down_proj.requires_grad else kernels_for
        if len(x) > most_tokens or usable(x) is None:
            return plain(x, indices, shares)
        experts, order = indices.flatten().sort(stable=True)
        begins = torch.searchsorted(experts, torch.arange(num_experts + 1))
        inner = multiply_experts(x[order // indices.shape[1]], begins, blocks[0], num_inner)
        if module.has_bias:
            inner = inner + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[experts]
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out = multiply_experts(inner, begins, blocks[1], hidden)
        out = out + module.down_proj_bias[experts] if module.has_bias else out
        out = module.post_expert_norm(out) if module.has_post_expert_norm else out
        weighted = out * shares.flatten()[order, None]
        return (
            weighted[order.argsort()].view(*indices.shape, -1).sum(1).to(x.dtype)
        )  # in the order of a token's experts

    source = torch.Generator().manual_seed(0)
    x = torch.randn(4, hidden, generator=source).to(weights[0].dtype)
    indices = torch.rand(4, num_experts, generator=source).argsort(-1)[:, :2]
    with torch.no_grad():
        wanted, found = (run(x, indices, torch.full(indices.shape, 0.5, dtype=x.dtype)) for run in (plain, forward))
    return forward if (found - wanted).float().norm() <= CLOSE * wanted.float().norm() else None


def multiply_experts(x: Tensor, begins: Tensor, weights: Tensor, num_outputs: int) -> Tensor:
    """[S, K] -> [S, N] products of tokens in the order of their experts: those from begins[e] to begins[e + 1] with the
    e-th of the blocked weights."""
    library, x = kernels(), x.contiguous()
    assert library is not None
    y = x.new_empty(len(x), num_outputs)
    product = x.data_ptr(), begins.data_ptr(), len(weights), x.shape[1], weights.data_ptr(), num_outputs
    library.multiply_experts(*product, y.data_ptr(), torch.get_num_threads())
    return y
