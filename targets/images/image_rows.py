"""Reading rows with pictures by the model's own code: its vision tower, its positions of three axes, its masks."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput
from ..caches.cache import SlotCache, cache_argument
from .reader import ImageReader, reader_of


def image_reader(target: Any) -> ImageReader:
    """Of a `Target`, whose vision tower is loaded with the first row that has a picture. Raises BadInput if it reads
    none."""
    reader, inside = reader_of(target.tokenizer), target.model.base_model
    if reader is None or inside is target.base or "pixel_values" not in inspect.signature(inside.forward).parameters:
        raise BadInput(f"target {target.name}: reads no pictures")
    if target.is_spread or target.is_sharded:
        raise BadInput(f"target {target.name}: reads pictures on one device alone")
    target.load_vision()
    return reader


def shifts_positions(target: Any) -> bool:
    """Whether positions behind a picture are other than the number of tokens before them, as with three axes."""
    return hasattr(target.model.base_model, "rope_deltas")


def own_inputs(target: Any, ids: Sequence[int], pictures: Sequence[str]) -> dict[str, Any]:
    """What the model's own forward takes beside ids with these pictures; nothing without any. Raises BadInput."""
    if not pictures:
        return {}
    reader = image_reader(target)
    within = reader.within(ids, pictures)
    if not within:
        raise BadInput(f"target {target.name}: a row of {len(ids)} tokens ends inside a picture, or before all")
    given = reader.tensors(within, ids)
    taken = inspect.signature(target.model.base_model.forward).parameters
    dtypes = {name: target.dtype if value.is_floating_point() else None for name, value in given.items()}
    return {name: value.to(target.device, dtypes[name]) for name, value in given.items() if name in taken}


@contextmanager
def forgetting_positions(target: Any) -> Iterator[None]:
    """The model's code keeps the shift of positions of the last row with pictures, by which it would read later texts:
    it is dropped behind this."""
    try:
        yield
    finally:
        if shifts_positions(target):
            target.model.base_model.rope_deltas = None


@torch.no_grad()
def read_image_row(
    target: Any, ids: Tensor, pictures: Sequence[str], cache: SlotCache | None
) -> tuple[Tensor, Tensor | None]:
    """The post-norm states [1, T, D] of a row [1, T] with pictures, in one forward of the model's own code; and its
    `TargetOutput.shift` [1, T].

    Args: cache: of one row, to be filled; gets the shift of the row, and of the tokens behind it.
    """
    given, inside = own_inputs(target, ids[0].tolist(), pictures), target.model.base_model
    index = torch.arange(ids.shape[1], device=ids.device)[None]
    if cache is not None:
        cache.seek(index, extent=ids.shape[1], is_exact=True)
        given[cache_argument(inside)] = cache
    axes: list[Tensor] = []
    noted = target.base.register_forward_pre_hook(
        lambda _, args, kwargs: axes.append(kwargs.get("position_ids")), with_kwargs=True
    )
    with forgetting_positions(target):
        try:
            post_norm = inside(input_ids=ids, use_cache=cache is not None and target.own_cache is None, **given)[0]
        finally:
            noted.remove()
        behind, shift, shifts = getattr(inside, "rope_deltas", None), None, None
        if behind is not None:
            shift = axes[-1][-3] - index  # [1, T]; before the three axes there may be one of plain positions
            shifts = torch.cat([shift[0], behind.view(1)])
        if cache is not None:
            cache.set_shift(0, shifts)
    return post_norm, shift
