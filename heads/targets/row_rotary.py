"""Rotary frequencies that change with the length of a text: in our forwards each row has those of its own length.

transformers' code looks at the longest position of a forward, which may be another row's, a draft's, or padding. Which
of the two sets a row has is settled by its length alone: a text is one forward over all of it (Ding et al. 2024).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

TWO_SETS = "longrope"  # transformers' word for frequencies of which there are two sets
FAR = 2**31  # tokens, more than any text has


class RowRotary:
    """The rotary embeddings of a model that have two sets of frequencies, one beyond `change` tokens."""

    def __init__(self, base: nn.Module, change: int):
        self.change = change
        self.is_long: Tensor | None = None  # [B], or [B, T] by token, in a forward of ours
        for module in list(base.modules()):
            types = getattr(module, "rope_type", None)
            if TWO_SETS in (types.values() if isinstance(types, dict) else [types]):
                short = always_short(module)
                module.forward = partial(self._embed, module.forward, short)
                module.add_module("short", short)  # to be moved with it

    @contextmanager
    def rows(self, is_long: Tensor) -> Iterator[None]:
        """Forwards inside give these rows [B], or tokens [B, T], the frequencies of long texts, the others the short
        ones. Outside the model's own rule holds."""
        self.is_long = is_long
        try:
            yield
        finally:
            self.is_long = None

    def before_change(self, num_accepted: Tensor, start: Tensor) -> Tensor:
        """num_accepted [B] drafts behind `start` [B], or fewer: what a short row chooses from the token at `change` on,
        it has to choose as a long one."""
        left = self.change - 1 - start
        return num_accepted.where(left < 0, torch.minimum(num_accepted, left))

    def _embed(
        self, own: Callable[..., Any], for_short: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.is_long is None:
            return own(x, position_ids, *args, **kwargs)
        short = for_short(x, position_ids, *args, **kwargs)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self.change)
        long = own(x, torch.cat([position_ids, beyond], -1), *args, **kwargs)
        is_long = self.is_long.view(len(self.is_long), -1, 1)  # [B, 1 or T, 1]
        return tuple(torch.where(is_long, other[..., :-1, :], one) for one, other in zip(short, long, strict=True))


def always_short(module: nn.Module) -> nn.Module:
    """A copy of a rotary embedding that rotates positions beyond `change` too by the frequencies of short texts."""
    short: Any = copy.deepcopy(module)
    rope = short.config.rope_parameters
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = FAR
    if hasattr(short.config, "original_max_position_embeddings"):  # of which transformers sets that entry anew
        short.config.original_max_position_embeddings = FAR
    return short
