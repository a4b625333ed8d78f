"""The input of a training step: rows of tokens, and the target's states on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...targets.layers.target_output import TargetOutput
from ..loss.chains import ChainStarts
from ..loss.sight import Sight, behind_window, blocks_of


@dataclass
class DraftBatch:
    """Right-padded rows and the target's states on them, computed now or read from shards."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on supervised tokens
    output: TargetOutput
    weights: Tensor | None = None  # [B, T] weight of each token as a label, 0 or more; None: all 1
    starts: ChainStarts | None = None  # the chains to train on (`training_starts`); None: all that decoding could run

    @property
    def positions(self) -> Tensor:
        """[B, T] index of each token in its row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)

    @property
    def places(self) -> Tensor:
        """[B, T] where each token is for a rotary embedding: `positions`, but of rows with pictures on three axes."""
        return self.positions if self.output.shift is None else self.positions + self.output.shift

    def sight(self, starts: ChainStarts | None = None, *, window: int | None = None) -> Sight:
        """What queries of attention see of the tokens of their rows: the tokens themselves, or the chains at `starts`.

        Args: window: in tokens, of which a query's own position is the last; None: no limit.
        """
        if starts is not None:
            return Sight(starts.positions.int(), starts.blocks_within(window), window)
        every = range(self.input_ids.shape[1])
        blocks = behind_window(blocks_of(every, self.input_ids.device), every, window)
        return Sight(self.positions.int(), blocks, window)
