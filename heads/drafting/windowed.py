"""Heads that draft over keys and values of their own: a text's, or in decoding those of its end and its start."""

from typing import Any

from ...targets.caches.cache import SlotCache
from ...targets.caches.ring_cache import ROOM, DraftWindow, RingCache
from .drafter import Drafter, Reading

PART = ROOM // 2  # positions of a prompt that are read at a time; P-EAGLE reads masks behind them


class Windowed(Drafter):
    """A head of whose cache `draft_window` says what it keeps; None: all."""

    draft_window: DraftWindow | None = None
    window: int | None = None  # that it was trained with: a query sees so many positions, its own the last of them

    def new_cache(self, num_layers: int, max_length: int) -> SlotCache:
        """For rows of at most max_length tokens, of which a window that wide leaves nothing out."""
        window = self.draft_window
        if window is None or window.size >= max_length:
            return SlotCache(num_layers=num_layers, max_length=max_length)
        return RingCache(num_layers=num_layers, max_length=max_length, window=window)

    def commit_prompts(self, state: Any, read: Reading, *, most: int) -> None:
        cache: SlotCache = state.cache
        if (read.extent or cache.max_length) <= cache.num_slots:  # nothing is lost on the way
            return super().commit_prompts(state, read, most=most)
        width = read.tokens.shape[1]
        for first in range(0, width, PART):
            self.commit(state, read.part_or_last(first, min(first + PART, width)))
