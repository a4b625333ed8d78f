"""Several texts packed in one row: which text each token belongs to, and the mask that separates them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .masks import visibility_mask


@dataclass
class Documents:
    """Consecutive texts in each row; padding at the end counts as one more."""

    ids: Tensor  # [B, T] number, from 0, of the text that each token belongs to
    positions: Tensor  # [B, T] position of each token in its text

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], *, num_positions: int) -> "Documents":
        """Args: lengths: per row, the lengths of its texts in tokens, at most num_positions in total."""
        ids = torch.zeros(len(lengths), num_positions, dtype=torch.long)  # [B, T]
        positions = torch.zeros_like(ids)
        for row, texts in enumerate(lengths):
            sizes = torch.tensor([*texts, num_positions - sum(texts)])
            ids[row] = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            positions[row] = torch.arange(num_positions) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        return cls(ids, positions)

    def row_lengths(self, row: int) -> list[int]:
        """Of a row's texts, and of the padding at its end."""
        return torch.unique_consecutive(self.ids[row], return_counts=True)[1].tolist()

    @property
    def lengths(self) -> Tensor:
        """[B, T] length in tokens of the text that each token belongs to."""
        sizes = torch.zeros_like(self.ids).scatter_add_(1, self.ids, torch.ones_like(self.ids))  # [B, T] by text
        return sizes.gather(1, self.ids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Documents":
        ids, positions = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.ids, self.positions))
        return Documents(ids, positions)

    def mask(self, queries: Tensor, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The additive mask [B, 1, Q, T] of queries, which see the tokens of their own text up to themselves.

        Args: queries: [B, Q] their positions in the rows. window: as in `visibility_mask`.
        """
        mask = visibility_mask(queries, extent=self.ids.shape[1], dtype=dtype, window=window)
        others = self.ids.gather(1, queries)[:, :, None] != self.ids[:, None]  # [B, Q, T]
        return mask.masked_fill_(others[:, None], torch.finfo(dtype).min)
