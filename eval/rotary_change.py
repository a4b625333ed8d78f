"""Texts that grow beyond the length at which a target's rotary frequencies change (longrope)."""

from collections.abc import Sequence

import torch

from ..heads.targets.prompts import read_prompts
from .engine import Engine


def read_again(
    engine: Engine, prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]], *, ended: Sequence[bool] = ()
) -> None:
    """Before a round: read rows anew of which the next token is the first that is chosen as in a long text.

    In a long text every state is another. Rounds end where one begins, see `RowRotary.before_change`.

    Args: new: the tokens behind each prompt; of both the cache holds all but the last one. ended: rows to leave out.
    """
    rotary = engine.target.row_rotary
    if rotary is None:
        return
    for row, (prompt, tokens) in enumerate(zip(prompts, new, strict=True)):
        num = len(prompt) + len(tokens)
        if num == rotary.change + 1 and not (ended and ended[row]):
            before = torch.tensor([[*prompt, *tokens][:-1]], device=engine.target.device)  # [1, change]
            alone = engine.target.new_cache(engine.num_slots)
            read_prompts(engine.target, before, torch.tensor([num], device=before.device), alone)
            engine.cache.take_row(row, alone, 0)
