"""Assigns samples to rows: an endless sequence of rows, as a pure function of the seed.

Samples are permuted anew in each epoch. `padded`: one sample per row. `bucketed`: one sample per row, with rows of
similar length in a batch. `packed`: as many samples per row as fit. The latter two arrange one window of samples at a
time, so that the order remains random.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

WINDOW = 4096  # packed: samples in a window
BLOCKS_PER_WINDOW = 64  # bucketed: batches (over all ranks) in a window

Row = list[int]  # the samples of one row, by index


class RowSequence:
    """Rows 0, 1, 2, ... without end. Equal arguments give equal rows, in whatever order they are read."""

    def __init__(self, lengths: np.ndarray, *, layout: str, seed: int, block: int = 1, capacity: int = 0):
        """Args:
        lengths: [num_samples] tokens of each sample.
        block: rows of a batch over all ranks; if bucketed, they have similar lengths.
        capacity: maximum tokens of a packed row; no sample is longer.
        """
        assert len(lengths) and (layout != "packed" or lengths.max() <= capacity)
        self.lengths, self.layout, self.seed, self.block, self.capacity = lengths, layout, seed, block, capacity
        self._epoch: tuple[int, np.ndarray] | None = None  # the permutation that was used last, and its epoch
        self._window: tuple[int, list[Row]] | None = None  # the rows of the window that was used last, and its number
        self._ends: list[int] = []  # packed: for each window so far, the number of rows up to its end

    @property
    def longest(self) -> int:
        """Tokens that no row exceeds."""
        return self.capacity if self.layout == "packed" else int(self.lengths.max())

    def __getitem__(self, row: int) -> Row:
        """The samples of this row."""
        if self.layout == "padded":
            return [self._sample(row)]
        if self.layout == "bucketed":
            window, index = divmod(row, BLOCKS_PER_WINDOW * self.block)
            return self._rows(window)[index]
        while not self._ends or self._ends[-1] <= row:
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._rows(len(self._ends))))
        window = bisect_left(self._ends, row + 1)
        return self._rows(window)[row - (self._ends[window - 1] if window else 0)]

    def num_samples_before(self, row: int) -> int:
        """The number of samples in rows 0 .. row - 1; within a packed window, interpolated."""
        if self.layout != "packed" or row == 0:
            return row
        self[row - 1]
        window = bisect_left(self._ends, row)
        first = self._ends[window - 1] if window else 0
        return round(WINDOW * (window + (row - first) / (self._ends[window] - first)))

    def _rows(self, window: int) -> list[Row]:
        if self._window is None or self._window[0] != window:
            size = WINDOW if self.layout == "packed" else BLOCKS_PER_WINDOW * self.block
            samples = [self._sample(position) for position in range(window * size, (window + 1) * size)]
            source = np.random.default_rng([self.seed, window])
            if self.layout == "packed":
                rows = packed(samples, self.lengths[samples].tolist(), capacity=self.capacity)
                rows = [rows[i] for i in source.permutation(len(rows))]
            else:
                by_length = sorted(samples, key=lambda sample: self.lengths[sample])
                starts = source.permutation(BLOCKS_PER_WINDOW) * self.block
                rows = [[sample] for start in starts for sample in by_length[start : start + self.block]]
            self._window = window, rows
        return self._window[1]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, len(self.lengths))
        if self._epoch is None or self._epoch[0] != epoch:
            # torch's CPU generator uses only the low 32 bits of a seed
            source = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
            self._epoch = epoch, torch.randperm(len(self.lengths), generator=source).numpy()
        return int(self._epoch[1][index])


def packed(samples: Sequence[int], lengths: Sequence[int], *, capacity: int) -> list[Row]:
    """Pack samples into rows of at most `capacity` tokens by best fit, longest samples first."""
    rows: list[Row] = []
    free: list[tuple[int, int]] = []  # ascending (tokens free, row)
    for length, sample in sorted(zip(lengths, samples, strict=True), key=lambda pair: -pair[0]):
        at = bisect_left(free, (length, -1))
        if at == len(free):
            rows.append([sample])
            insort(free, (capacity - length, len(rows) - 1))
        else:
            left, row = free.pop(at)
            rows[row].append(sample)
            insort(free, (left - length, row))
    return rows
