"""What a step of training reads: rows, and the target's states on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..loss.chains import ChainStarts
from ..target import TargetOutput
from .cache import visibility_mask
from .documents import Documents


@dataclass
class DraftBatch:
    """Right-padded rows and the target's states on them, computed now or read from shards."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, True on the tokens that count
    output: TargetOutput
    weights: Tensor | None = None  # [B, T] how much each token counts as a label, 0 or more; None: all 1
    # where a row holds several texts; None: one. The first token of each is not supervised, so that no chain runs from
    # one into the next
    documents: Documents | None = None
    starts: ChainStarts | None = None  # the chains to train on, `training_starts`; None: all that decoding could run

    @property
    def row_positions(self) -> Tensor:
        """[B, T] of each token in its row."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)

    @property
    def positions(self) -> Tensor:
        """[B, T] of each token in its text."""
        return self.row_positions if self.documents is None else self.documents.positions

    def visibility(self, queries: Tensor, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask [B, 1, Q, T] of queries at positions [B, Q] of their rows over the row's tokens."""
        if self.documents is not None:
            return self.documents.mask(queries, dtype=dtype, window=window)
        return visibility_mask(queries, extent=self.input_ids.shape[1], dtype=dtype, window=window)
