"""Recurrences of transformers' models whose states can be noted behind each token of a round that is read at once.

A recurrent layer's code has a function for whole texts, and one for a single token. In a round of a delta rule our own
takes the place of both; of a state space model the second that of the first, token by token. Projections, convolution
and norms read all tokens at once. So a round reads every weight once.
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


@dataclass(frozen=True)
class DeltaTokens:
    """What the tokens of a round add to a delta rule's state, from which the state behind any of them follows; fp32."""

    keys: Tensor  # [B, N, W, Dk]
    values: Tensor  # [B, N, W, Dv] what each token writes
    decays: Tensor  # [B, N, W, 1 or Dk] logarithm of the decay over all tokens up to each, itself included

    def state_behind(self, index: Tensor, state: Tensor) -> Tensor:
        """[B, N, Dk, Dv] the state behind `index` [B] tokens, where `state` is the one before them; itself for 0."""
        index = index[:, None, None, None]
        at = self.decays.gather(2, (index - 1).clamp_min(0).expand(-1, self.decays.shape[1], -1, self.decays.shape[3]))
        at = at.masked_fill(index == 0, 0)  # [B, N, 1, 1 or Dk]
        is_read = torch.arange(self.keys.shape[2], device=index.device)[:, None] < index  # [B, 1, W, 1]
        weights = (at - self.decays).masked_fill(~is_read, -torch.inf).exp()
        return at.exp().transpose(2, 3) * state + (self.keys * weights).transpose(2, 3) @ self.values

    def take(self, other: "DeltaTokens") -> None:
        """Copy the tokens of another round, of at most as many, into these."""
        for own, given in ((self.keys, other.keys), (self.values, other.values), (self.decays, other.decays)):
            own[:, :, : given.shape[2]] = given

    def with_room(self, width: int) -> "DeltaTokens":
        """Zeros of these shapes, for rounds of up to `width` tokens."""
        like = (self.keys, self.values, self.decays)
        return DeltaTokens(*(x.new_zeros(*x.shape[:2], width, x.shape[3]) for x in like))


def delta_rule(
    read: list[DeltaTokens],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """A gated delta rule over a round: Qwen3-Next's, and Kimi's with a decay per channel.

    All tokens at once, as a chunk of the parallel form (Yang et al. 2024, Gated Delta Networks, section 3.3): the state
    is read once, and what each token writes solves a triangular system. The state is left as it was.

    Args: as transformers' functions take them, whose other arguments change nothing here.
        read: gets the tokens appended. query, key: [B, Q, Nk, Dk]. value: [B, Q, N, Dv]. g: [B, Q, N] or
        [B, Q, N, Dk], logarithms of decays. beta: [B, Q, N], how much each token writes. initial_state: [B, N, Dk, Dv];
        None: zeros.

    Returns: [B, Q, N, Dv], and the state before the round.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    q, k, v, gate, decays = (x.transpose(1, 2).float() for x in (query, key, value, beta, g))  # [B, N, Q, ...]
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    if groups > 1:
        q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    state = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if initial_state is None else initial_state.float()
    decays = (decays if decays.ndim == 4 else decays[..., None]).cumsum(2)  # [B, N, Q, 1 or Dk]
    num_read, both = k.shape[2], torch.cat([k, q], 2)  # [B, N, 2 Q, Dk]
    of_state = (both * decays.exp().repeat(1, 1, 2, 1)) @ state  # [B, N, 2 Q, Dv]
    later = torch.ones(num_read, num_read, dtype=torch.bool, device=k.device).triu(1)
    between = decays[:, :, :, None] - decays[:, :, None]  # [B, N, Q, Q, 1 or Dk], of a token since an earlier one
    between = between.masked_fill(later[..., None], -torch.inf).exp()
    if between.shape[-1] == 1:
        seen = both @ k.transpose(2, 3) * between[..., 0].repeat(1, 1, 2, 1)
    else:
        seen = (both[:, :, :, None] * k[:, :, None] * between.repeat(1, 1, 2, 1, 1)).sum(-1)
    by_keys, by_queries = seen.split(num_read, 2)  # [B, N, Q, Q]
    gate = gate[..., None]
    wanted = gate * (v - of_state[:, :, :num_read])
    # what is on the diagonal is taken for ones
    written = torch.linalg.solve_triangular(gate * by_keys, wanted, upper=False, unitriangular=True)
    read.append(DeltaTokens(k, written, decays))
    mixed = of_state[:, :, num_read:] + by_queries @ written
    return mixed.transpose(1, 2).to(dtype), state


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

# by the name of the function for texts: that for a token, and how a round is read
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

    @property
    def is_delta_rule(self) -> bool:
        return KNOWN[self.name][1] is delta_rule

    @contextmanager
    def noting(self) -> Iterator[list[Any]]:
        """Within, the part reads rounds; yields the states behind each token, of a delta rule its DeltaTokens."""
        step, how = KNOWN[self.name]
        noted: list[Any] = []
        own = {name: getattr(self.module, name) for name in (self.name, step)}
        read = partial(how, noted) if self.is_delta_rule else partial(how, own[step], noted)
        for name in own if self.is_delta_rule else (self.name,):
            setattr(self.module, name, read)
        try:
            yield noted
        finally:
            for name, function in own.items():
                setattr(self.module, name, function)


def known_recurrence(part: Any) -> KnownRecurrence | None:
    """The recurrence of a part of a layer, if it is known."""
    module, names = sys.modules[type(part).__module__], calls_of(part)
    name = next((name for name in KNOWN if name in names and hasattr(module, KNOWN[name][0])), None)
    return None if name is None else KnownRecurrence(module, name)
