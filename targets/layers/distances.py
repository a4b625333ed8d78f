"""Attention that a model biases by the distance of query and key, as Inkling: each row has distances of its own."""

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn

POSITIONS = {"query_positions", "key_positions"}  # arguments of the part that computes such a bias


def read_distances(model: nn.Module) -> None:
    """Let the parts of a model that compute such a bias take the positions of each row, as `SlotCache` gives them."""
    kinds = {type(module) for module in model.modules()}
    with_positions = tuple(kind for kind in kinds if inspect.signature(kind.forward).parameters.keys() >= POSITIONS)
    for module in model.modules():
        if isinstance(module, with_positions):
            module.forward = MethodType(by_row, module)


def by_row(self: Any, states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """[B, N, Q, P] the bias of states [B, Q, ...], for query_positions [Q] or [B, Q] and key_positions [P]."""
    if query_positions.ndim == 1:
        return type(self).forward(self, states, query_positions, key_positions)
    in_one = states.reshape(1, -1, *states.shape[2:])  # [1, B * Q, ...]
    bias = type(self).forward(self, in_one, query_positions.flatten(), key_positions)  # [1, N, B * Q, P]
    return bias[0].unflatten(1, query_positions.shape).transpose(0, 1)
