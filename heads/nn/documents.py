"""Several texts in one row: which token is of which, and what may see what."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import visibility_mask


@dataclass
class Documents:
    """Texts laid one behind the other in each row; padding at the end is one more.

    ids: [B, T] which of a row's texts each token is of, ascending from 0. positions: [B, T] its place in that text.
    """

    ids: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], *, num_positions: int) -> "Documents":
        """lengths: for each row those of its texts, in tokens, of num_positions at most in sum."""
        ids = torch.zeros(len(lengths), num_positions, dtype=torch.long)  # [B, T]
        positions = torch.zeros_like(ids)
        for row, texts in enumerate(lengths):
            sizes = torch.tensor([*texts, num_positions - sum(texts)])
            ids[row] = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            positions[row] = torch.arange(num_positions) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return cls(ids, positions)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Documents":
        ids, positions = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.ids, self.positions))
        return Documents(ids, positions)

    def mask(self, places: Tensor, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive attention mask of queries at `places` [B, Q] of their rows: what is before them in their text.

        Args: window: as in `visibility_mask`. Returns: [B, 1, Q, T].
        """
        mask = visibility_mask(places, extent=self.ids.shape[1], dtype=dtype, window=window)
        others = self.ids.gather(1, places)[:, :, None] != self.ids[:, None]  # [B, Q, T]
        return mask.masked_fill_(others[:, None], torch.finfo(dtype).min)
