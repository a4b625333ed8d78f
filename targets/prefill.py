"""Reading prompts into a target's cache: in chunks, and row by row where padding would be read too."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .caches.cache import SlotCache
from .caches.state_cache import StateCache
from .layers.target_output import TargetOutput


def read_prompts(
    target: Any,
    tokens: Tensor,
    num_valid: Tensor,
    cache: SlotCache,
    *,
    num_kept: int = 0,
    feature_layers: tuple[int, ...] = (),
    pictures: Sequence[Sequence[str]] = (),
) -> TargetOutput:
    """Read right-padded prompts [B, T] of num_valid [B] tokens; returns the states there, [B, T, ...].

    Args: target: a `Target`. num_kept: tokens of each that the cache has; 0 with a `StateCache` or pictures.
        feature_layers: as in `Target.forward`. pictures: of each row; empty: none has any.
    """
    if not any(pictures) and cache.shift is not None:
        cache.shift.zero_()
    if not isinstance(cache, StateCache) and not any(pictures):
        return read_in_chunks(target, tokens, cache, num_kept=num_kept, feature_layers=feature_layers)
    outputs = []
    for row, length in enumerate(num_valid.tolist()):
        alone, text = cache if cache.num_rows == 1 else cache.row_reader(), tokens[row : row + 1, :length]
        with alone.prompts() if isinstance(alone, StateCache) else nullcontext():
            if any(pictures) and pictures[row]:
                given = {"feature_layers": feature_layers, "cache": alone}
                outputs.append(target.forward_with_pictures(text, pictures[row], **given))
            else:
                alone.set_shift(0, None)
                outputs.append(read_in_chunks(target, text, alone, feature_layers=feature_layers))
        if length > 0 and alone is not cache:
            cache.take_row(row, alone, 0)
    return TargetOutput.padded(outputs, tokens.shape[1])


def read_in_chunks(
    target: Any,
    tokens: Tensor,
    cache: SlotCache,
    *,
    num_kept: int = 0,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Read tokens [B, T], maybe none, of prompts behind `num_kept` ones; returns the states of these."""
    nothing = torch.empty(len(tokens), 0, target.hidden_size, dtype=target.dtype, device=tokens.device)
    outputs, start = [TargetOutput(nothing[:, :, None].expand(-1, -1, len(feature_layers), -1), nothing)], num_kept
    for chunk in tokens[:, num_kept:].split(target.prompt_chunk, 1) if tokens.shape[1] > num_kept else ():
        extent = start + chunk.shape[1]
        positions = torch.arange(start, extent, device=tokens.device).expand_as(chunk)
        where: dict[str, Any] = {"cache": cache, "positions": positions, "extent": extent}
        outputs.append(target.forward(chunk, feature_layers=feature_layers, **where))
        start = extent
    return TargetOutput.joined(outputs)
