"""A cache for targets with recurrent layers: their states behind each token of a round, beside keys and values.

A recurrent layer (linear attention, a state space model, a short convolution) keeps a state instead of keys and values,
and a state cannot forget rejected drafts. So the states behind each token of a round are kept. The first position of
the next round says how many of these tokens were accepted, and the round starts from the state behind them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .cache import SlotCache, SlotLayer
from .recurrences import DeltaTokens
from .tree_nodes import is_readable

Key = tuple[str, int]  # "conv" or "recurrent", and which of the layer's states of that kind
CONV, RECURRENT = "conv", "recurrent"


class StateLayer(LinearAttentionLayer):
    """The states of one recurrent layer. Those that transformers' code reads and writes are the *current* ones."""

    is_sliding = False

    def __init__(self, num_states: int):
        LinearAttentionLayer.__init__(self, number_of_states=num_states)
        self.behind: dict[Key, Tensor] = {}  # [W + 1, B, ...] states behind 0..W tokens from the cache's origin on
        # of a delta rule: what the tokens behind the origin add to its state, of which `behind` has only the first
        self.delta_tokens: DeltaTokens | None = None

    @property
    def current(self) -> dict[Key, Tensor]:
        """[B, ...] each, those that the layer has written at least once."""
        both = ((CONV, self.conv_states), (RECURRENT, self.recurrent_states))
        return {(kind, i): state for kind, states in both for i, state in states.items() if state is not None}

    def start(self, index: Tensor, is_empty: Tensor) -> None:
        """Make the states behind `index` [B] tokens the current ones and `behind[0]`; zeros where `is_empty` [B]."""
        for key, states in self.behind.items():
            state = self.state_behind(key, index)
            states[0] = state.masked_fill_(is_empty.view(-1, *[1] * (state.ndim - 1)), 0)
            self.current[key].copy_(states[0])

    def state_behind(self, key: Key, index: Tensor) -> Tensor:
        """[B, ...] the state behind `index` [B] tokens from the cache's origin on."""
        if key == (RECURRENT, 0) and self.delta_tokens is not None:
            return self.delta_tokens.state_behind(index, self.behind[key][0])
        return self.behind[key][index, torch.arange(len(index), device=index.device)]

    def note_tokens(self, tokens: DeltaTokens, before: Tensor, width: int) -> None:
        """Keep what a round's tokens, at most `width`, add to the state [B, N, Dk, Dv] of a delta rule before them."""
        if (RECURRENT, 0) not in self.behind:
            self.note((RECURRENT, 0), before, 0, 0)
        if self.delta_tokens is None or self.delta_tokens.keys.shape[2] < width:
            self.delta_tokens = tokens.with_room(width)
        self.delta_tokens.take(tokens)

    def note(self, key: Key, state: Tensor, num_read: int, width: int) -> None:
        """Keep a state [B, ...], the one behind `num_read` tokens of at most `width`."""
        states = self.behind.get(key)
        if states is None or len(states) <= width:
            self.behind[key] = state.new_zeros(width + 1, *state.shape)
            if states is not None:
                self.behind[key][: len(states)] = states
        self.behind[key][num_read] = state

    def take_row(self, row: int, source: "StateLayer", source_row: int, num_rows: int) -> None:
        """Copy the states behind a prompt that the source has read, into one of num_rows rows."""
        for name in ("conv_kernel_size", "is_conv_states_initialized", "is_recurrent_states_initialized"):
            setattr(self, name, dict(getattr(source, name)))
        self.has_previous_state, self.dtype, self.device = dict(source.has_previous_state), source.dtype, source.device
        for (kind, i), state in source.current.items():
            own = self.conv_states if kind == CONV else self.recurrent_states
            if own.get(i) is None:
                own[i] = state.new_zeros(num_rows, *state.shape[1:])
            states = source.behind[kind, i]
            if (kind, i) not in self.behind:
                self.behind[kind, i] = states.new_zeros(len(states), num_rows, *states.shape[2:])
            self.behind[kind, i][0, row] = states[0, source_row]


class StateSlotLayer(StateLayer, SlotLayer):
    """A layer that has states as well as keys and values."""

    def __init__(self, num_states: int, max_length: int):
        SlotLayer.__init__(self, max_length)
        StateLayer.__init__(self, num_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # transformers passes keys and values by position, states by name
        (SlotLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


def kept_by_layers(config: Any) -> list[Any]:
    """What each layer of a model keeps of a text, as the layers of transformers' own cache for its (text) config."""
    try:
        return DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a config that this cache does not read
        return [DynamicLayer() for _ in range(config.num_hidden_layers)]


# that keep keys and values, and what sparse attention chooses them by
KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


def keeps_states(layer_cache: Any) -> bool:
    return isinstance(layer_cache, LinearAttentionCacheLayerMixin)


def unknown_kind(layer_caches: Sequence[Any]) -> str | None:
    """The first layer that keeps something else than keys and values or states; None: there is none."""
    for i, layer in enumerate(layer_caches):
        is_plain = type(layer) in KNOWN_LAYERS or keeps_states(layer)
        if isinstance(layer, CacheLayerMixin) and not is_plain:
            return f"layer {i} keeps a {type(layer).__name__} of transformers, which is not known here"
    return None


class StateCache(SlotCache):
    """`SlotCache` for models of which some layers keep states.

    A forward at positions p, p + 1, ... continues from the states behind p tokens, which the last forward has kept. So
    nothing is committed: a round that starts behind the accepted tokens drops the rejected ones. Prompts are read row
    by row, since a recurrent layer would read padding too, and only the states behind the last token are kept.
    """

    def __init__(
        self,
        layer_caches: Sequence[Any],
        *,
        max_length: int,
        num_rows: int,
        width: int,
        device: torch.device,
        continues_prompts: bool = True,
    ):
        """Args:
        layer_caches: see `kept_by_layers`. num_rows: B. width: the most tokens per row of a round.
        continues_prompts: whether the layers read many tokens behind a state at once; else one at a time.
        """
        super().__init__(num_layers=len(layer_caches), max_length=max_length, num_rows=num_rows)
        self.kept, self.width, self.continues_prompts = layer_caches, width, continues_prompts
        self.one_row: StateCache | None = None  # see `row_reader`
        for i, layer_cache in enumerate(layer_caches):
            has_keys = isinstance(layer_cache, CacheLayerMixin)
            if keeps_states(layer_cache):
                num_states = layer_cache.number_of_states
                self.layers[i] = StateSlotLayer(num_states, max_length) if has_keys else StateLayer(num_states)
            elif not has_keys:  # keeps nothing
                self.layers[i] = layer_cache
        self.of_states = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        self.origin = torch.zeros(num_rows, dtype=torch.long, device=device)  # [B] tokens before `behind[0]`
        self.reads_prompt = False  # inside `prompts`
        self.is_ahead = False  # inside `ahead`
        self.reads_round = True  # whether the forward keeps the states behind each token
        self.reads_singly = False  # whether recurrent layers read its tokens one at a time
        # whether convolutions note the states behind each token, as the part that runs now reads a whole round at once
        self.notes_windows = False
        self.touched: set[Key] = set()  # the states that the part of a layer which runs now has asked for

    def seek(self, positions: Tensor, *, extent: int, is_exact: bool = False) -> None:
        super().seek(positions, extent=extent, is_exact=is_exact)
        if self.is_ahead:
            return
        start, num_read = positions[:, 0], positions.shape[1]
        index, is_empty = start - self.origin, start == 0  # [B]
        is_kept = is_empty | ((index >= 0) & (index <= self.width))
        assert not is_readable(start) or bool(is_kept.all()), "the states behind these positions were not kept"
        for layer in self.of_states:
            layer.start(index.clamp(0, self.width), is_empty)
        self.reads_round, self.reads_singly = not self.reads_prompt, False
        if not self.reads_prompt:
            self.width = max(self.width, num_read)
            self.origin.copy_(start)
            return
        is_start = bool(is_empty.all())
        self.reads_singly = not is_start and not self.continues_prompts
        for layer in self.of_states:  # transformers' code tells the start of a text by it
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, not is_start)
        self.origin.copy_(start + num_read)

    @contextmanager
    def prompts(self) -> Iterator[None]:
        """Forwards inside read a prompt of one row, or a part of it."""
        self.reads_prompt = True
        try:
            yield
        finally:
            self.reads_prompt = False

    @contextmanager
    def ahead(self, start: Tensor) -> Iterator[None]:
        """For drafting over this cache: forwards inside read on from behind `start` [B] tokens and keep no states."""
        index = (start - self.origin).clamp(0, self.width)
        for layer in self.of_states:
            for key in layer.behind:
                layer.current[key].copy_(layer.state_behind(key, index))
        self.is_ahead, self.reads_round = True, False
        try:
            yield
        finally:
            self.is_ahead = False

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of all rows."""
        return sum(state.nbytes for layer in self.of_states for state in layer.current.values())

    # what transformers' recurrent layers call

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.touched.add((CONV, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.touched.add((RECURRENT, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        layer: Any = self.layers[layer_idx]
        seen = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)  # [B, C, before + Q]
        num_read = conv_states.shape[-1]
        if self.notes_windows:
            size = layer.conv_kernel_size[state_idx]
            seen = nn.functional.pad(seen, (size + num_read - seen.shape[-1], 0))  # there may be no state yet
            for i in range(1, num_read + 1):
                layer.note((CONV, state_idx), seen[..., i : i + size], i, self.width)
        return seen

    # and by MiniMax's names

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        layer: Any = self.layers[layer_idx]
        self.update_recurrent_state(state, layer_idx)
        layer.has_previous_state[0] = True

    # rows

    def row_reader(self) -> "StateCache":
        """A cache for one row, from which `take_row` copies; always the same one."""
        if self.one_row is None:
            self.one_row = StateCache(
                self.kept,
                max_length=self.max_length,
                num_rows=1,
                width=self.width,
                device=self.origin.device,
                continues_prompts=self.continues_prompts,
            )
        return self.one_row

    @property
    def is_filled(self) -> bool:
        return bool(self.stored or any(layer.behind for layer in self.of_states))

    def take_row(self, row: int, source: SlotCache, source_row: int) -> None:
        assert isinstance(source, StateCache)
        super().take_row(row, source, source_row)
        for own, copied in zip(self.of_states, source.of_states, strict=True):
            own.take_row(row, copied, source_row, self.num_rows)
        self.origin[row] = source.origin[source_row]
