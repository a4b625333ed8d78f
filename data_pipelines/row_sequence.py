"""The order of rows: an endless sequence of samples, as a pure function of the seed.

Samples are permuted anew in each epoch. `padded`: in that order. `bucketed`: samples of similar length in a batch; one
window of them is arranged at a time, so that the order remains random.
"""

from collections.abc import Sequence

import numpy as np
import torch

BLOCKS_PER_WINDOW = 64  # bucketed: batches (over all ranks) in a window, of small data no more than an epoch has


class RowSequence:
    """The samples of rows 0, 1, 2, ... without end. Equal arguments give equal rows, in whatever order they are
    read."""

    def __init__(self, lengths: np.ndarray, *, layout: str, seed: int, block: int = 1):
        """Args:
        lengths: [num_samples] tokens of each sample.
        block: rows of a batch over all ranks; if bucketed, they have similar lengths.
        """
        assert len(lengths)
        self.lengths, self.layout, self.seed, self.block = lengths, layout, seed, block
        self.num_blocks = min(BLOCKS_PER_WINDOW, max(1, len(lengths) // block))
        self._epoch: tuple[int, np.ndarray] | None = None  # the permutation that was used last, and its epoch
        self._window: tuple[int, list[int]] | None = None  # the rows of the window that was used last, and its number

    def __getitem__(self, row: int) -> int:
        """The sample of this row, by index."""
        if self.layout == "padded":
            return self._sample(row)
        window, index = divmod(row, self.num_blocks * self.block)
        return self._rows(window)[index]

    def _rows(self, window: int) -> list[int]:
        if self._window is None or self._window[0] != window:
            size = self.num_blocks * self.block
            by_length = self._by_length(range(window * size, (window + 1) * size))
            starts = np.random.default_rng([self.seed, window]).permutation(self.num_blocks) * self.block
            self._window = window, [row for start in starts for row in by_length[start : start + self.block]]
        return self._window[1]

    def _by_length(self, positions: Sequence[int]) -> list[int]:
        """The samples at these positions, epoch by epoch: copies of one are no neighbours."""
        placed = [(position // len(self.lengths), self._sample(position)) for position in positions]
        return [sample for _, sample in sorted(placed, key=lambda place: (place[0], self.lengths[place[1]]))]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, len(self.lengths))
        if self._epoch is None or self._epoch[0] != epoch:
            # torch's CPU generator uses only the low 32 bits of a seed
            source = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
            self._epoch = epoch, torch.randperm(len(self.lengths), generator=source).numpy()
        return int(self._epoch[1][index])
