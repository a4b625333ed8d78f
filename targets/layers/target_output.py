"""The target's states on a batch of rows, as heads read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class TargetOutput:
    """What a head may read of one target forward."""

    features: Tensor  # [B, T, L, D] inputs of the chosen layers (HF `hidden_states[i]`), BEFORE any final norm
    post_norm: Tensor  # [B, T, D] the last layer's output AFTER the final norm: the output layer's input
    best: Tensor | None = None  # [B, T] `Target.best` of post_norm, if the forward computed it
    # [B, T] how far a token's position, on the first of three axes, is from its place in its row; None: nowhere
    shift: Tensor | None = None

    def at(self, positions: Tensor) -> "TargetOutput":
        """One position per row, positions [B]; the result has T = 1."""
        rows = torch.arange(len(positions), device=positions.device)
        return TargetOutput(self.features[rows, positions][:, None], self.post_norm[rows, positions][:, None])

    @classmethod
    def padded(cls, rows: Sequence[Self], length: int) -> Self:
        """Outputs of single rows [1, T, ...] as one [B, length, ...], right-padded with zeros."""
        features = [F.pad(row.features, (0, 0, 0, 0, 0, length - row.features.shape[1])) for row in rows]
        post_norm = [F.pad(row.post_norm, (0, 0, 0, length - row.post_norm.shape[1])) for row in rows]
        shift = None
        if any(row.shift is not None for row in rows):
            shift = torch.zeros(len(rows), length, dtype=torch.long, device=post_norm[0].device)
            for i, row in enumerate(rows):
                if row.shift is not None:
                    shift[i, : row.shift.shape[1]] = row.shift[0]
        return cls(torch.cat(features), torch.cat(post_norm), shift=shift)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Outputs of consecutive parts of the same rows as one."""
        return cls(torch.cat([part.features for part in parts], 1), torch.cat([part.post_norm for part in parts], 1))
