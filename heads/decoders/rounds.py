"""How recurrent layers of transformers' models read a round: a `StateCache` keeps the states behind each token."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from .recurrences import calls_of, known_recurrence
from .state_cache import RECURRENT, StateCache, StateLayer, keeps_states


def read_states(model: nn.Module, kept: Sequence[Any]) -> str | None:
    """Let a model's recurrent layers read rounds with a `StateCache`; returns why they can not, if so.

    Their parts are found by the calls to the cache that their code makes. The code stays as it is: without such a cache
    nothing changes, and with one it is called as before, or for one token at a time if its recurrence is not of a known
    kind (see recurrences.py).
    """
    found = set()
    for module in model.modules():
        if hasattr(module, "layer_idx") and {"update_conv_state", "update_recurrent_state"} & calls_of(module):
            if not isinstance(vars(module).get("forward"), MethodType):
                module.forward = MethodType(reading_rounds(module), module)
            found.add(module.layer_idx)
    unknown = sorted({i for i, layer in enumerate(kept) if keeps_states(layer)} - found)
    return f"layer {unknown[0]} keeps states in an unknown way" if unknown else None


def reading_rounds(part: Any) -> Callable[..., Any]:
    """The forward of a part of a recurrent layer, as a method, that keeps the states behind each token of a round."""
    own = vars(part).get("forward")  # of a part on several devices, with Accelerate's hooks
    recurrence, has_recurrence = known_recurrence(part), "update_recurrent_state" in calls_of(part)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = partial(type(self).forward, self) if own is None else own
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StateCache)), None)
        if cache is None:
            return whole(hidden_states, *args, **kwargs)
        kwargs = {name: None if "mask" in name else value for name, value in kwargs.items()}  # there is no padding
        layer = cast(StateLayer, cache.layers[self.layer_idx])
        num_read, cache.touched = hidden_states.shape[1], set()
        reads_at_once = not has_recurrence or (recurrence is not None and layer.recurrent_states[0] is not None)
        if cache.reads_round and num_read > 1 and reads_at_once:
            with nullcontext([]) if recurrence is None else recurrence.noting() as states:
                mixed = whole(hidden_states, *args, **kwargs)
            for i, state in enumerate(states, 1):
                layer.note((RECURRENT, 0), state, i, cache.width)
            return mixed
        if not (cache.reads_round or cache.reads_singly):
            mixed = whole(hidden_states, *args, **kwargs)
            if not cache.is_ahead:
                keep_current(layer, cache, 0)
            return mixed
        parts = []
        for i in range(num_read):
            parts.append(whole(hidden_states[:, i : i + 1], *args, **kwargs))
            keep_current(layer, cache, i + 1 if cache.reads_round else 0)
        if isinstance(parts[0], tuple):
            return torch.cat([part[0] for part in parts], 1), *parts[-1][1:]
        return torch.cat(parts, 1)

    return forward


def keep_current(layer: StateLayer, cache: StateCache, num_read: int) -> None:
    """Keep the current states as those behind `num_read` tokens."""
    for key, state in layer.current.items():
        if key in cache.touched or not cache.touched:
            layer.note(key, state, num_read, cache.width)
