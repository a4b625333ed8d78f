"""Layers that weigh what they read by its place in a row, whatever mask they are given (ALiBi): made to read by ours.

Such a model adds a bias to each score that it makes from the number of the slot. Behind a cache of fixed size, in trees
and where a row holds several texts that is not the position. The bias is replaced as it enters a layer; the rest of the
code is left alone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MaskOf = Callable[..., Tensor]  # the additive mask [B, 1, Q, P], given `window` or `chunk` as in `visibility_mask`
BIAS = "alibi"  # what transformers' layers call a bias of the slots, [B * N, 1, P] or [B, N, 1, P]


class OwnMasks:
    """The layers of a model that bias slots by themselves; empty (False) if there are none."""

    def __init__(self, layers: Iterable[nn.Module]):
        self.is_biased = False  # as the first forward shows, which is of a whole text
        self.mask: Tensor | None = None  # while ours is given
        self.places: Tensor | None = None
        for layer in layers:
            if BIAS in inspect.signature(layer.forward).parameters:
                layer.register_forward_pre_hook(self._give, with_kwargs=True)

    def __bool__(self) -> bool:
        return self.is_biased

    @contextmanager
    def replaced(self, mask: MaskOf, places: Tensor | None) -> Iterator[None]:
        """Forwards inside hide what our mask hides, and no more.

        The model itself must see the whole row in its last query: from there its bias is taken.

        Args: places: [B, P] the position of what each slot holds; None: slot p holds position p.
        """
        self.mask, self.places = mask(), places
        try:
            yield
        finally:
            self.mask = self.places = None

    def _give(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self.mask is None:
            self.is_biased = kwargs.get(BIAS) is not None
            return None
        given, own = {"attention_mask": self.mask}, kwargs.get("attention_mask")
        if self.is_biased:
            if own is not None and own.dtype != torch.bool:
                last = own[:, :, -1:].expand(len(self.mask), -1, -1, -1)
                given["attention_mask"] = self.mask + self._at_places(last)
            given[BIAS] = self._at_places(kwargs[BIAS])
        return args, {**kwargs, **given}

    def _at_places(self, bias: Tensor) -> Tensor:
        """A bias [..., P] by slot, as that of what each slot holds."""
        if self.places is None:
            return bias
        rows = bias.reshape(len(self.places), -1, bias.shape[-1])  # [B, N, P]
        return rows.gather(-1, self.places[:, None].expand_as(rows)).view_as(bias)
