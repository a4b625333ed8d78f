"""Copying a row between decoding states of different batch sizes, for continuous batching."""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ...heads.nn.cache import SlotCache


def take_row(into: Any, row: int, source: Any, source_row: int) -> None:
    """Copy a row of a state into a row of another that was made for the same lengths.

    States are as `Drafter.begin` has them. Rows of a tensor lie along the dimension in which the two differ (the first,
    where they do not). Tensors of other shapes are set by every commit, and left.
    """
    if isinstance(into, SlotCache):
        into.take_row(row, source, source_row)
    elif is_dataclass(into):
        for field in fields(into):
            to_value, from_value = getattr(into, field.name), getattr(source, field.name)
            if isinstance(to_value, list):
                to_value[row : row + 1] = from_value[source_row : source_row + 1]
            elif isinstance(to_value, Tensor) and isinstance(from_value, Tensor):
                take_tensor_row(to_value, row, from_value, source_row)
            else:
                take_row(to_value, row, from_value, source_row)


def take_tensor_row(into: Tensor, row: int, source: Tensor, source_row: int) -> None:
    """Copy one row; nothing where shapes differ in more than one dimension, or a tensor has not that many rows."""
    if into.ndim != source.ndim or into.ndim == 0:
        return
    differ = [i for i in range(into.ndim) if into.shape[i] != source.shape[i]]
    if len(differ) > 1:
        return
    dim = differ[0] if differ else 0
    if row < into.shape[dim] and source_row < source.shape[dim]:
        into.select(dim, row).copy_(source.select(dim, source_row))
