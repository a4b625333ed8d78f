"""How recurrent layers of transformers' models read a round: a `StateCache` keeps the states behind each token."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType, NoneType
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .cache import cache_argument
from .recurrences import calls_of, known_recurrence
from .state_cache import RECURRENT, StateCache, StateLayer, keeps_states

RECURRENCES = {"update_recurrent_state", "set_linear_cache"}  # the second is MiniMax's


def read_states(model: nn.Module, layer_caches: Sequence[Any]) -> str | None:
    """Let a model's recurrent layers read rounds with a `StateCache`; returns why they can not, if so.

    Their parts are found by the calls to the cache that their code makes. The code stays as it is: without such a cache
    nothing changes, and with one it is called as before, or for one token at a time if its recurrence is not of a known
    kind (see recurrences.py).
    """
    calls = RECURRENCES | {"update_conv_state"}
    mixers: list[tuple[Any, Any]] = [
        (part.layer_idx, part) for part in model.modules() if hasattr(part, "layer_idx") and calls & calls_of(part)
    ]
    for i, part in mixers:
        if not isinstance(vars(part).get("forward"), MethodType):
            part.forward = MethodType(reading_rounds(part, i), part)
    unknown = sorted({i for i, layer in enumerate(layer_caches) if keeps_states(layer)} - {i for i, _ in mixers})
    return f"layer {unknown[0]} keeps states in an unknown way" if unknown else None


def own_cache(module: nn.Module) -> type | None:
    """The class that a model's code says its cache must be, where that is one of its own; None: it takes any cache."""
    parameter = inspect.signature(module.forward).parameters.get(cache_argument(module))
    kinds = () if parameter is None else get_args(parameter.annotation)
    classes = [kind for kind in kinds if inspect.isclass(kind) and kind is not NoneType]
    return classes[0] if classes and not {Cache, DynamicCache} & set(classes) else None


def carries_states(module: nn.Module) -> bool:
    """Whether a model's code hands states from forward to forward in no cache of transformers, as RWKV and xLSTM."""
    own = own_cache(module)
    return "state" in inspect.signature(module.forward).parameters or not (own is None or issubclass(own, Cache))


def reading_rounds(part: Any, index: int) -> Callable[..., Any]:
    """The forward of a part of recurrent layer `index`, as a method, that keeps the states behind each token of a
    round."""
    own = vars(part).get("forward")  # of a part on several devices, with Accelerate's hooks
    recurrence = known_recurrence(part)
    is_delta_rule = recurrence is not None and recurrence.is_delta_rule
    has_recurrence = "update_conv_state" not in calls_of(part) or bool(RECURRENCES & calls_of(part))

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = partial(type(self).forward, self) if own is None else own
        caches = (value for value in (*args, *kwargs.values()) if isinstance(value, StateCache))
        cache = next(caches, None)
        if cache is None:
            return whole(hidden_states, *args, **kwargs)
        kwargs = {name: None if "mask" in name else value for name, value in kwargs.items()}  # there is no padding
        layer = cast(StateLayer, cache.layers[index])
        num_read, cache.touched = hidden_states.shape[1], set()
        has_state = recurrence is not None and layer.recurrent_states[0] is not None
        is_noted = cache.reads_round and num_read > 1 and (is_delta_rule or has_state or not has_recurrence)
        cache.notes_windows = is_noted  # of a single token transformers' code moves the windows of convolutions itself
        if is_noted or (cache.reads_round and is_delta_rule):
            with nullcontext([]) if recurrence is None else recurrence.noting() as noted:
                mixed = whole(hidden_states, *args, **kwargs)
            if is_delta_rule:
                layer.note_tokens(noted[0], layer.current[RECURRENT, 0], cache.width)
            for i, state in enumerate(() if is_delta_rule else noted, 1):
                layer.note((RECURRENT, 0), state, i, cache.width)
            if num_read == 1:
                keep_current(layer, cache, 1)
            return mixed
        if not (cache.reads_round or cache.reads_singly):
            mixed = whole(hidden_states, *args, **kwargs)
            if not cache.is_ahead:
                keep_current(layer, cache, 0)
            return mixed
        parts, places = [], kwargs.get("position_ids")
        for i in range(num_read):
            if places is not None:
                kwargs["position_ids"] = places[:, i : i + 1]
            parts.append(whole(hidden_states[:, i : i + 1], *args, **kwargs))
            keep_current(layer, cache, i + 1 if cache.reads_round else 0)
        if not isinstance(parts[0], tuple):
            return torch.cat(parts, 1)
        return tuple(map(joined_tokens, zip(*parts, strict=True)))

    return forward


def joined_tokens(values: tuple[Any, ...]) -> Any:
    """What single tokens gave, [B, 1, ...] each, as of all tokens; of other values, as states, the last one."""
    is_by_token = isinstance(values[0], Tensor) and values[0].ndim > 1 and values[0].shape[1] == 1
    return torch.cat(values, 1) if is_by_token else values[-1]


def keep_current(layer: StateLayer, cache: StateCache, num_read: int) -> None:
    """Keep the current states as those behind `num_read` tokens; of a delta rule its tokens are kept instead."""
    for key, state in layer.current.items():
        has_tokens = num_read > 0 and key == (RECURRENT, 0) and layer.delta_tokens is not None
        if (key in cache.touched or not cache.touched) and not has_tokens:
            layer.note(key, state, num_read, cache.width if cache.reads_round else 0)
