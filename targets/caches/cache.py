"""A key/value cache of fixed shape whose rows advance independently, and the attention masks over it."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from .masks import first_visible, hiding, visibility_mask
from .tree_nodes import is_readable

# what models and layers call the cache that they take, from transformers 5.24 on and before
CACHE_ARGUMENTS = ("cache", "layer_past", "past_key_values")
EXTENT_STEP = 64  # attention reads a multiple of this many slots, so that few different shapes occur


def in_steps(num_slots: int) -> int:
    """`num_slots`, rounded up to a multiple of EXTENT_STEP."""
    return -(-num_slots // EXTENT_STEP) * EXTENT_STEP


def cache_argument(module: nn.Module) -> str:
    """The name under which a model or a layer of transformers takes its cache."""
    accepted = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in accepted), CACHE_ARGUMENTS[-1])


class SlotLayer(CacheLayerMixin):
    """One layer of `SlotCache`, without a reference back to it, so that memory is freed with the last reference."""

    is_sliding = False

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.readable: tuple[Tensor, Tensor] | None = None  # the first extent slots of keys and values
        self.index_keys: Tensor | None = None  # [B, 1, slots, D] by which sparse attention chooses what it reads
        self.extent = -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take pre-allocated keys and values [B, Nkv, slots, H], written in place."""
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write to the slots that args[0], the `SlotCache`, points at; returns all readable slots."""
        place: SlotCache = args[0]
        keys, values, positions = cast(Tensor, self.keys), cast(Tensor, self.values), place.positions
        if positions.shape[0] == 1:
            keys.index_copy_(2, positions[0], key_states)
            values.index_copy_(2, positions[0], value_states)
        else:
            rows = place.rows
            keys.transpose(1, 2).index_put_((rows, positions), key_states.transpose(1, 2))
            values.transpose(1, 2).index_put_((rows, positions), value_states.transpose(1, 2))
        return self.readable_slots(place.extent)

    def readable_slots(self, extent: int) -> tuple[Tensor, Tensor]:
        """The first `extent` slots of keys and values [B, Nkv, extent, H], as views."""
        if self.readable is None or self.extent != extent:
            keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
            self.readable, self.extent = (keys[:, :, :extent], values[:, :, :extent]), extent
        return self.readable

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent, 0  # `SlotCache` answers for it

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.max_length


class SlotCache(Cache):
    """Keys and values of `num_layers` layers; position p of a row is stored in slot p.

    Writes go to the slots set by `seek`, and a query at position p must see slots <= p only. A rejected draft stays in
    slots beyond its row's length, which no query sees, until later writes replace it, so accepting a chain copies
    nothing. Works as the `past_key_values` of any Hugging Face model that takes 4D masks.
    """

    def __init__(self, *, num_layers: int, max_length: int, num_rows: int = 1):
        """Args: max_length: slots per row, in tokens; prompt, new tokens and one round's drafts must fit. num_rows: B,
        of a cache that is filled row by row."""
        super().__init__(layers=[SlotLayer(max_length) for _ in range(num_layers)])
        self.max_length = self.num_slots = max_length
        self.num_rows = num_rows
        # [B, slots] what is added to a slot's number to get the position of its token, on the first of three axes where
        # rows have pictures; None: nothing
        self.shift: Tensor | None = None
        self.positions: Tensor = torch.zeros(1, 0, dtype=torch.long)  # [B, Q]
        self.rows: Tensor = torch.zeros(1, 1, dtype=torch.long)  # [B, 1]
        self.extent, self.num_before, self.is_exact = 0, 0, False
        # the storage: one tensor [layers, 2, B, Nkv, slots, H] for layers of the same shape, so that their rows and
        # slots are moved at once, and one [B, Nkv, slots, H] each for keys and values of other layers
        self.stored: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write one layer's new keys and values [B, Nkv, Q, H]; returns all its readable keys and values."""
        return self.layer(layer_idx, key_states, value_states).update(key_states, value_states, self)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write one layer's new index keys [B, Q, D], as of DeepSeek-V3.2; returns all its readable ones [B, P, D]."""
        layer = cast(SlotLayer, self.layers[layer_idx])
        if layer.index_keys is None:
            num_rows, _, size = indexer_key_states.shape
            layer.index_keys = indexer_key_states.new_zeros(num_rows, 1, self.num_slots, size)
            self.stored.append(layer.index_keys)
        layer.index_keys[:, 0].index_put_((self.rows, self.positions), indexer_key_states)
        return layer.index_keys[:, 0, : self.extent]

    def layer(self, index: int, keys: Tensor, values: Tensor) -> SlotLayer:
        """A layer, allocated on first use for keys and values [B, Nkv, any, H] of these shapes and dtype."""
        layer = cast(SlotLayer, self.layers[index])
        if not layer.is_initialized:
            layer.lazy_initialization(*self._room(index, keys, values))
        return layer

    def whole(self, num_rows: int, num_kv_heads: int, head_dim: int, *, like: Tensor) -> Tensor:
        """[layers, 2, B, Nkv, slots, H] all keys and values, of layers of the same shape; allocated on first use with
        the dtype and device of `like`."""
        if not self.stored:
            nothing = like.new_empty(num_rows, num_kv_heads, 0, head_dim)
            for i in range(len(self.layers)):
                self.layer(i, nothing, nothing)
        return self.stored[0]

    def _room(self, index: int, keys: Tensor, values: Tensor) -> Sequence[Tensor]:
        shapes = [(*x.shape[:2], self.num_slots, x.shape[-1]) for x in (keys, values)]
        # zeros, not empty: a masked slot still takes part in 0 * value, and 0 * nan is nan
        slot_layers = [i for i, layer in enumerate(self.layers) if isinstance(layer, SlotLayer)]
        if not self.stored and shapes[0] == shapes[1]:
            self.stored.append(keys.new_zeros(len(slot_layers), 2, *shapes[0]))
        whole = self.stored[0] if self.stored else keys
        alike = (whole.dtype, whole.device, whole.shape[2:]) == (keys.dtype, keys.device, shapes[0])
        if alike and shapes[0] == shapes[1]:
            return whole[slot_layers.index(index)].unbind()
        own = [x.new_zeros(shape) for x, shape in zip((keys, values), shapes, strict=True)]
        self.stored += own
        return own

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.extent, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """[B, 1] the slot of each row's first query, for models that bias attention by distance themselves."""
        return self.num_before if self.is_exact or self.num_before else self.positions[:, :1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """For models that make the mask themselves, where we give none: the query in the last slot sees all before."""
        return self.num_before

    def seek(self, positions: Tensor, *, extent: int, is_exact: bool = False) -> None:
        """Set the slots of the next write.

        Args:
            positions: [B, Q] slot of each new token.
            extent: number of slots that covers every position in use; attention reads this many, rounded up.
            is_exact: do not round up, so that one query at the last slot needs no mask.
        """
        self.positions, self.is_exact = positions, is_exact
        self.num_before = extent - positions.shape[1] if is_exact else 0
        if len(self.rows) != len(positions) or self.rows.device != positions.device:
            self.rows = torch.arange(len(positions), device=positions.device)[:, None]  # [B, 1]
        self.extent = extent if is_exact else min(in_steps(extent), self.num_slots)

    def ahead(self, start: Tensor) -> AbstractContextManager[None]:
        """For drafting over this cache: forwards inside read on from `start` [B] tokens; slots need nothing for it."""
        return nullcontext()

    def places(self, root: Tensor, drafted: Tensor) -> Tensor:
        """[B, extent] the position of what each readable slot holds: its number, except for drafted nodes.

        Args: root: [B] as in `tree_mask`. drafted: [B, n] the positions of the nodes in the slots behind it.
        """
        slots = torch.arange(self.extent, device=root.device).expand(len(root), -1)
        behind = root[:, None] + 1 + torch.arange(drafted.shape[1], device=root.device)  # [B, n]
        return slots.scatter(1, behind, drafted)

    def slots(self, positions: Tensor) -> Tensor:
        """The slot of each position, any shape."""
        return positions

    def read_mask(self, positions: Tensor, last: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The mask [B, 1, Q, extent] of queries at `positions` [B, Q] that see those up to `last` [B, Q]."""
        return visibility_mask(last, extent=self.extent, dtype=dtype)

    def mask(
        self,
        positions: Tensor,
        *,
        dtype: torch.dtype,
        window: int | None = None,
        chunk: int | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """The mask [B, 1, Q, extent] of queries at `positions` [B, Q] over the readable slots; see `visibility_mask`.

        Args: seen: [B, Q, Q - 1] bool, for a root followed by its whole tree; see `tree_mask`.
        """
        if seen is None:
            return visibility_mask(positions, extent=self.extent, dtype=dtype, window=window, chunk=chunk)
        root, drafted = positions[:, 0], positions[:, 1:]
        return self.tree_mask(positions, root, seen, dtype=dtype, window=window, chunk=chunk, drafted=drafted)

    def tree_mask(
        self,
        positions: Tensor,
        root: Tensor,
        seen: Tensor,
        *,
        dtype: torch.dtype,
        window: int | None = None,
        chunk: int | None = None,
        drafted: Tensor | None = None,
    ) -> Tensor:
        """`mask` for drafted nodes: each sees all committed slots, and of the drafted ones those in `seen`.

        Args:
            root: [B] position (and slot) of the last committed token; drafted node i is in slot root + 1 + i.
            seen: [B, Q, n] bool, which of n drafted nodes each query attends to: its ancestors and itself.
            window, chunk: as in `visibility_mask`; they need `drafted`, the positions [B, n] of the nodes.
        """
        mask = self.read_mask(positions, root[:, None].expand_as(positions), dtype=dtype)
        if window is not None or chunk is not None:
            assert drafted is not None
            before = first_visible(positions, window, chunk)  # [B, Q]
            slots = torch.arange(self.extent, device=root.device)
            mask.masked_fill_(slots < before[:, None, :, None], torch.finfo(dtype).min)
            seen = seen & (drafted[:, None, :] >= before[:, :, None])
        slots = self.slots(root[:, None] + 1 + torch.arange(seen.shape[-1], device=root.device))  # [B, n]
        values = hiding(~seen, dtype=dtype)
        return mask.scatter_(-1, slots[:, None, None].expand(-1, 1, seen.shape[1], -1), values[:, None])

    def move(self, source: Tensor, destination: Tensor, *, num: Tensor | None = None) -> None:
        """Copy slots within each row, to move a tree's accepted nodes right after the committed tokens.

        Args:
            source, destination: [B, n]; all sources are read before anything is written.
            num: [B] how many of each row's first ones matter; the others may be copied or not. None: all.
        """
        if num is not None and is_readable(source):  # only up to the last one that is not in its place
            order = torch.arange(source.shape[1])
            last = int(((source != destination) & (order < num[:, None])).mul(order + 1).max())
            source, destination = source[:, :last], destination[:, :last]
            if last == 0:
                return
        rows = torch.arange(len(source), device=source.device)[:, None]  # [B, 1]
        for tensor in self.stored:
            by_slot = tensor.movedim((-4, -2), (0, 1))  # [B, slots, ..., Nkv, H]
            by_slot[rows, destination] = by_slot[rows, source]

    @property
    def is_filled(self) -> bool:
        """Whether the layers are allocated, which happens with the first forward."""
        return bool(self.stored)

    def row_reader(self) -> "SlotCache":
        """A cache for one row, from which `take_row` copies."""
        return SlotCache(num_layers=len(self.layers), max_length=self.max_length)

    def set_shift(self, row: int, shift: Tensor | None) -> None:
        """Set the `shift` of a row: [n], of its first slots, the last of all behind them too; None: 0."""
        if self.shift is None and shift is not None:
            self.shift = shift.new_zeros(self.num_rows, self.max_length)
        if self.shift is not None:
            self.shift[row] = 0 if shift is None else shift[-1]
            if shift is not None:
                self.shift[row, : len(shift)] = shift

    def take_row(self, row: int, source: "SlotCache", source_row: int) -> None:
        """Copy all that a row holds from another cache with the same layers and length."""
        self.set_shift(row, None if source.shift is None else source.shift[source_row])
        if not self.is_filled:
            for i, layer in enumerate(source.layers):
                if isinstance(layer, SlotLayer) and layer.is_initialized:
                    self.layer(i, *(x.expand(self.num_rows, -1, -1, -1) for x in layer.readable_slots(0)))
        for own, copied in zip(self.stored, source.stored, strict=True):
            own.select(-4, row).copy_(copied.select(-4, source_row))


def seen_by_children(seen: Tensor, parents: Tensor) -> Tensor:
    """`seen` for Q new nodes: the nodes that their parents attend to, and themselves.

    Args: seen: [B, F, n] of the nodes last drafted. parents: [B, Q] index of each new node's parent among these.
    Returns: [B, Q, n + Q].
    """
    rows = torch.arange(len(parents), device=parents.device)[:, None]
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    return torch.cat([seen[rows, parents], itself], -1)


def newest_slots(root: Tensor, seen: Tensor) -> Tensor:
    """[B, Q] slots of the Q nodes last drafted, given the root's slot [B] and their `seen` [B, Q, n]."""
    num_new, num_nodes = seen.shape[1:]
    return root[:, None] + 1 + num_nodes - num_new + torch.arange(num_new, device=root.device)


def placed(positions: Tensor, shift: Tensor | None) -> Tensor:
    """[B, Q] where the tokens at these positions of their rows are for a rotary embedding. Args: shift: of a cache."""
    if shift is None:
        return positions
    return positions + shift.gather(1, positions.expand(len(shift), -1).clamp(max=shift.shape[1] - 1))
