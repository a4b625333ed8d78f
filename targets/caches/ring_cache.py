"""A cache that keeps the first positions of a row and its last ones: its slots do not become more with the text."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput
from .cache import SlotCache, in_steps
from .masks import hiding

FAR = 2**30  # positions, more than any text has

ROOM = 128  # positions behind a row's last that may be written at once: a part of a prompt, or a round's drafts


@dataclass(frozen=True)
class DraftWindow:
    """What is attended to of a text: its last `size` positions, the query's own among them, and its first `sink`."""

    size: int
    sink: int = 0

    @classmethod
    def parse(cls, text: str) -> "DraftWindow":
        """Of `512` or `512:4`. Raises BadInput."""
        size, colon, sink = text.partition(":")
        if not (size.isdecimal() and 0 < int(size) <= FAR) or (colon and not (sink.isdecimal() and int(sink) <= FAR)):
            raise BadInput(f"--draft-window {text}: expected N or N:SINK, positions at the end and at the start")
        return cls(int(size), int(sink or 0))


class RingCache(SlotCache):
    """`SlotCache` where each of the first `sink` positions has a slot, and later ones take turns in those behind.

    In texts longer than its slots a forward reads at most ROOM positions, and at most ROOM behind a row's last one are
    written before it grows, so that none in the window is lost. What a slot holds follows from the row's last position.
    """

    def __init__(self, *, num_layers: int, max_length: int, window: DraftWindow):
        super().__init__(num_layers=num_layers, max_length=max_length)
        self.num_slots = in_steps(window.sink + window.size + ROOM)
        self.window, self.ring = window, self.num_slots - window.sink

    def slots(self, positions: Tensor) -> Tensor:
        sink = self.window.sink
        return torch.where(positions < sink, positions, sink + (positions - sink) % self.ring)

    def seek(self, positions: Tensor, *, extent: int, is_exact: bool = False) -> None:
        assert not is_exact and (positions.shape[1] <= ROOM or extent <= self.num_slots), "some would be lost"
        super().seek(self.slots(positions), extent=min(extent, self.num_slots))

    def read_mask(self, positions: Tensor, last: Tensor, *, dtype: torch.dtype) -> Tensor:
        slots, sink, last = torch.arange(self.extent, device=last.device), self.window.sink, last[..., None]
        held = torch.where(slots < sink, slots, last - (last - slots) % self.ring)  # [B, Q, extent] up to `last`
        in_ring = (held >= sink) & (held > positions[..., None] - self.window.size)
        return hiding(~((held <= last) & ((slots < sink) | in_ring)), dtype=dtype)[:, None]

    def mask(self, positions: Tensor, *, dtype: torch.dtype, **kwargs: Any) -> Tensor:
        return self.read_mask(positions, positions, dtype=dtype)

    def tree_mask(self, positions: Tensor, root: Tensor, seen: Tensor, **kwargs: Any) -> Tensor:
        if seen.shape[-1] > ROOM:
            raise BadInput(f"draft window: a tree of {seen.shape[-1]} expanded nodes, at most {ROOM} have room")
        return super().tree_mask(positions, root, seen, **{**kwargs, "window": None})
