"""Reading prompts into a target's cache: in chunks, and row by row where padding would be read too."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..decoders.cache import SlotCache
from ..decoders.state_cache import StateCache
from ..nn.target_output import TargetOutput


def read_prompts(
    target: Any,
    tokens: Tensor,
    num_valid: Tensor,
    cache: SlotCache,
    *,
    num_kept: int = 0,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Read right-padded prompts [B, T] of num_valid [B] tokens; returns the states there, [B, T, ...].

    Args: target: a `Target`. num_kept: tokens of each that the cache has; 0 with a `StateCache`. feature_layers: as in
        `Target.forward`.
    """
    if not isinstance(cache, StateCache):
        return read_in_chunks(target, tokens, num_valid, cache, num_kept=num_kept, feature_layers=feature_layers)
    outputs = []
    for row, length in enumerate(num_valid.tolist()):
        alone = cache if cache.num_rows == 1 else cache.row_reader()
        with alone.prompts():
            one = tokens[row : row + 1, :length], num_valid[row : row + 1]
            outputs.append(read_in_chunks(target, *one, alone, feature_layers=feature_layers))
        if length > 0 and alone is not cache:
            cache.take_row(row, alone, 0)
    return TargetOutput.padded(outputs, tokens.shape[1])


def read_in_chunks(
    target: Any,
    tokens: Tensor,
    lengths: Tensor,
    cache: SlotCache,
    *,
    num_kept: int = 0,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Read tokens [B, T], maybe none, of prompts of lengths [B] behind `num_kept` ones; returns the states of these."""
    nothing = torch.empty(len(tokens), 0, target.hidden_size, dtype=target.dtype, device=tokens.device)
    outputs, start = [TargetOutput(nothing[:, :, None].expand(-1, -1, len(feature_layers), -1), nothing)], num_kept
    for chunk in tokens[:, num_kept:].split(target.prompt_chunk, 1) if tokens.shape[1] > num_kept else ():
        extent = start + chunk.shape[1]
        positions = torch.arange(start, extent, device=tokens.device).expand_as(chunk)
        read = partial(target.forward, feature_layers=feature_layers, cache=cache, positions=positions, extent=extent)
        outputs.append(read(chunk, lengths=lengths))
        start = extent
    return TargetOutput.joined(outputs)


def read_again(
    target: Any,
    cache: SlotCache,
    prompts: Sequence[Sequence[int]],
    new: Sequence[Sequence[int]],
    *,
    ended: Sequence[bool] = (),
) -> None:
    """Before a round: read rows anew of which the next token is the first that is chosen as in a long text.

    Where rotary frequencies change, every state of a long text is another; see `RowRotary.before_change`.

    Args: new: the tokens behind each prompt; of both the cache holds all but the last one. ended: rows to leave out.
    """
    rotary = target.row_rotary
    if rotary is None:
        return
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        num = len(prompt) + len(tokens)
        if num == rotary.change + 1 and not (ended and ended[row]):
            before = torch.tensor([[*prompt, *tokens][:-1]], device=target.device)  # [1, change]
            alone = target.new_cache(cache.max_length)
            read_prompts(target, before, torch.tensor([num], device=target.device), alone)
            cache.take_row(row, alone, 0)
