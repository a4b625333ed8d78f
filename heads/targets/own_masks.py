"""Layers that hide or weigh what they read by its place in a row, whatever mask they are given: made to read by ours.

With ALiBi a model adds a bias to each score that it makes from the number of the slot; others hold a causal mask of
their own, in which the queries are a row's last tokens. Behind a cache of fixed size, in trees and in packed rows
neither is so. What they make themselves is replaced as it enters a layer; the rest of their code is left alone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MaskOf = Callable[..., Tensor]  # the additive mask [B, 1, Q, P], given `window` or `chunk` as in `visibility_mask`
BIAS = "alibi"  # what transformers' layers call a bias of the slots, [B * N, 1, P] or [B, N, 1, P]


class OwnMasks:
    """The layers of a model that mask or bias by themselves; empty (False) if there are none."""

    def __init__(self, layers: Iterable[nn.Module]):
        layers = list(layers)
        self.is_biased = False  # as the first forward shows, which is of a whole text
        self.held = [held_mask(layer) for layer in layers]  # the part that holds a mask, and its name there
        self.windows = [None if held is None else window_in(held[0].get_buffer(held[1])) for held in self.held]
        self.masks: dict[int | None, Tensor] | None = None  # by window, while ours are given
        self.places: Tensor | None = None
        for i, layer in enumerate(layers):
            if self.held[i] is not None or BIAS in inspect.signature(layer.forward).parameters:
                layer.register_forward_pre_hook(partial(self._give, i), with_kwargs=True)

    def __bool__(self) -> bool:
        return self.is_biased or any(held is not None for held in self.held)

    @contextmanager
    def replaced(self, mask: MaskOf, places: Tensor | None) -> Iterator[None]:
        """Forwards inside hide what our mask hides, and no more.

        The model itself must see the whole row in its last query: from there its bias is taken.

        Args: places: [B, P] the position of what each slot holds; None: slot p holds position p.
        """
        self.masks = {window: mask(window=window) if window is not None else mask() for window in {*self.windows}}
        self.places = places
        num_slots = next(iter(self.masks.values())).shape[-1]
        held = [(part, name, part.get_buffer(name)) for part, name in filter(None, self.held)]
        for part, name, own in held:
            part._buffers[name] = own.new_ones(1, 1, 1, 1).expand(1, 1, num_slots, num_slots)  # hides nothing
        try:
            yield
        finally:
            self.masks = self.places = None
            for part, name, own in held:
                part._buffers[name] = own

    def _give(self, i: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self.masks is None:
            self.is_biased = kwargs.get(BIAS) is not None
            return None
        mask, own = self.masks[self.windows[i]], kwargs.get("attention_mask")
        given = {"attention_mask": mask}
        if self.is_biased:
            if own is not None and own.dtype != torch.bool:
                given["attention_mask"] = mask + self._at_places(own[:, :, -1:].expand(len(mask), -1, -1, -1))
            given[BIAS] = self._at_places(kwargs[BIAS])
        return args, {**kwargs, **given}

    def _at_places(self, bias: Tensor) -> Tensor:
        """A bias [..., P] by slot, as that of what each slot holds."""
        if self.places is None:
            return bias
        rows = bias.reshape(len(self.places), -1, bias.shape[-1])  # [B, N, P]
        return rows.gather(-1, self.places[:, None].expand_as(rows)).view_as(bias)


def held_mask(layer: nn.Module) -> tuple[nn.Module, str] | None:
    """Where a part of a layer holds a mask [1, 1, P, P] of bools: the part, and the name of its buffer."""
    for part in layer.modules():
        for name, value in part.named_buffers(recurse=False):
            if value.dtype == torch.bool and value.ndim == 4 and value.shape[:2] == (1, 1):
                return part, name
    return None


def window_in(mask: Tensor) -> int | None:
    """The sliding window of a causal mask [1, 1, P, P], in tokens, the query's own included; None: it sees all."""
    if mask.device.type == "meta":
        return None
    num = int(mask[0, 0, -1].sum())
    return num if num < mask.shape[-1] else None
