"""The target's states on a batch of rows, as heads read them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class TargetOutput:
    """What a head may read of one target forward."""

    features: Tensor  # [B, T, L, D] inputs of the chosen layers (HF `hidden_states[i]`), BEFORE any final norm
    post_norm: Tensor  # [B, T, D] the last layer's output AFTER the final norm: the output layer's input
    best: Tensor | None = None  # [B, T] `Target.best` of post_norm, if the forward computed it

    def at(self, positions: Tensor) -> "TargetOutput":
        """One position per row, positions [B]; the result has T = 1."""
        rows = torch.arange(len(positions), device=positions.device)
        return TargetOutput(self.features[rows, positions][:, None], self.post_norm[rows, positions][:, None])
