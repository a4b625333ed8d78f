"""The input of a training step: rows of tokens, and the target's states on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..loss.chains import ChainStarts
from .documents import Documents
from .masks import visibility_mask
from .sight import Sight, behind_window, blocks_of
from .target_output import TargetOutput


@dataclass
class DraftBatch:
    """Right-padded rows and the target's states on them, computed now or read from shards."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on supervised tokens
    output: TargetOutput
    weights: Tensor | None = None  # [B, T] weight of each token as a label, 0 or more; None: all 1
    # for packed rows; None: one text per row. The first token of each text is not supervised, so that no chain crosses
    # from one text into the next
    documents: Documents | None = None
    starts: ChainStarts | None = None  # the chains to train on (`training_starts`); None: all that decoding could run

    @property
    def row_positions(self) -> Tensor:
        """[B, T] index of each token in its row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)

    @property
    def positions(self) -> Tensor:
        """[B, T] index of each token in its text."""
        return self.row_positions if self.documents is None else self.documents.positions

    def sight(self, starts: ChainStarts | None = None, *, window: int | None = None) -> Sight:
        """What queries of attention see of the tokens of their rows: the tokens themselves, or the chains at `starts`.

        Args: window: in tokens, of which a query's own position is the last; None: no limit.
        """
        text = None if self.documents is None else (self.row_positions - self.positions).int()  # [B, T]
        if starts is not None:
            text = None if text is None else starts.take(text)
            return Sight(starts.positions.int(), starts.blocks_within(window), text, window)
        every = range(self.input_ids.shape[1])
        blocks = behind_window(blocks_of(every, self.input_ids.device), every, window)
        return Sight(self.row_positions.int(), blocks, text, window)

    def visibility(self, queries: Tensor, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask [B, 1, Q, T] of queries at row positions [B, Q] over the tokens of their rows."""
        if self.documents is not None:
            return self.documents.mask(queries, dtype=dtype, window=window)
        return visibility_mask(queries, extent=self.input_ids.shape[1], dtype=dtype, window=window)
