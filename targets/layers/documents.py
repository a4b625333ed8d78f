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

    def mask(self, queries: Tensor, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask [B, 1, Q, T] of queries, which see the tokens of their own text up to themselves.

        Args: queries: [B, Q] their positions in the rows. window: as in `visibility_mask`.
        """
        mask = visibility_mask(queries, extent=self.ids.shape[1], dtype=dtype, window=window)
        others = self.ids.gather(1, queries)[:, :, None] != self.ids[:, None]  # [B, Q, T]
        return mask.masked_fill_(others[:, None], torch.finfo(dtype).min)
