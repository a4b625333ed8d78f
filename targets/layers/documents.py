"""Several texts in one row: which text each token belongs to, and the mask that separates them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..caches.masks import visibility_mask


@dataclass
class Documents:
    """Consecutive texts in each row."""

    ids: Tensor  # [B, T] number, from 0, of the text that each token belongs to
    positions: Tensor  # [B, T] position of each token in its text

    def mask(self, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask [B, 1, T, T] of tokens that see those of their own text up to themselves.

        Args: window: as in `visibility_mask`.
        """
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)  # [B, T]
        mask = visibility_mask(index, extent=index.shape[1], dtype=dtype, window=window)
        others = self.ids[:, :, None] != self.ids[:, None]  # [B, T, T]
        return mask.masked_fill_(others[:, None], torch.finfo(dtype).min)
