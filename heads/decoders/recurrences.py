"""Recurrences of transformers' models whose states can be noted behind each token of a round that is read at once.

A recurrent layer's code has a function for whole texts, and one for a single token. In a round the second takes the
place of the first, token by token; projections, convolution and norms still read all tokens at once. So a round reads
every weight once.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def calls_of(module: Any) -> set[str]:
    """The names that a module's forward refers to."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def delta_rule(step: Callable[..., Any], states: list[Tensor], *args: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A (gated) delta rule over [B, Q, ...] inputs: Qwen3-Next's, and Kimi's with a decay per channel."""
    num_read, state, parts = args[0].shape[1], kwargs.pop("initial_state"), []
    kwargs.pop("chunk_size", None)

    def at(value: Any, i: int) -> Any:
        return value[:, i : i + 1] if isinstance(value, Tensor) and value.ndim > 1 else value

    for i in range(num_read):
        given = {key: at(value, i) for key, value in kwargs.items()}
        part, state = step(*(at(value, i) for value in args), initial_state=state, **given)
        parts.append(part)
        states.append(state)
    return torch.cat(parts, 1), state


def state_space(
    step: Callable[..., Any],
    states: list[Tensor],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan. x: [B, Q, N, H], dt: [B, Q, N], B and C: [B, Q, groups, states]."""
    state, parts, head_dim, size = initial_states.clone(), [], x.shape[-1], B.shape[-1]
    A = A[:, None, None].expand(-1, head_dim, size)
    D, dt_bias = (value[:, None].expand(-1, head_dim) for value in (D, dt_bias))
    dt = dt[..., None].expand(-1, -1, -1, head_dim)
    for i in range(x.shape[1]):
        parts.append(step(state, x[:, i], dt[:, i], A, B[:, i], C[:, i], D, z=None, dt_bias=dt_bias, dt_softplus=True))
        states.append(state.clone())
    return torch.stack(parts, 1), state


Recurrence = Callable[..., tuple[Tensor, Tensor]]

# by the name of the function for texts: that for a token, and how it is called
KNOWN: dict[str, tuple[str, Recurrence]] = {
    "torch_chunk_gated_delta_rule": ("torch_recurrent_gated_delta_rule", delta_rule),
    "chunk_kimi_delta_attention": ("recurrent_kimi_delta_attention", delta_rule),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", state_space),
}


@dataclass(frozen=True)
class KnownRecurrence:
    """The recurrence of a part of a layer. module: where its code looks the functions up. name: a key of KNOWN."""

    module: Any
    name: str

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        """Within, the part reads token by token; yields the states behind each."""
        step, how = KNOWN[self.name]
        states: list[Tensor] = []
        whole = getattr(self.module, self.name)
        setattr(self.module, self.name, partial(how, getattr(self.module, step), states))
        try:
            yield states
        finally:
            setattr(self.module, self.name, whole)


def known_recurrence(part: Any) -> KnownRecurrence | None:
    """The recurrence of a part of a layer, if it is known."""
    module, names = sys.modules[type(part).__module__], calls_of(part)
    name = next((name for name in KNOWN if name in names and hasattr(module, KNOWN[name][0])), None)
    return None if name is None else KnownRecurrence(module, name)
