"""What was committed since a head was last asked for drafts: kept per row, and read by the head in one go.

A head that is not asked in every round need not read in every round either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...heads.drafting.drafter import Reading
from ...targets.layers.target_output import TargetOutput


class Piece(NamedTuple):
    """The committed positions of a row in one reading, n of them."""

    tokens: Tensor  # [n]
    next_tokens: Tensor  # [n]
    features: Tensor  # [n, L, D]
    post_norm: Tensor  # [n, D]


@dataclass
class Unread:
    """The positions that a head has not read, by row.

    pieces: of each row, in order. first: where its unread positions begin. lengths: how many there are. max_length:
    slots of a row. extent, shift: of the last reading.
    """

    pieces: list[list[Piece]]
    first: list[int]
    lengths: list[int]
    max_length: int
    extent: int = 0
    shift: Tensor | None = None

    @classmethod
    def of(cls, batch_size: int, *, max_length: int) -> "Unread":
        return cls([[] for _ in range(batch_size)], [0] * batch_size, [0] * batch_size, max_length)

    @property
    def is_from_start(self) -> bool:
        """Whether all that is unread begins with its prompt."""
        rows = zip(self.first, self.lengths, strict=True)
        return all(first == 0 for first, length in rows if length)

    def follows(self, read: Reading) -> bool:
        """Whether a reading can be added: it continues every row, and all of them, padded to one width, fit the slots.

        Where it does not, the head reads what is unread first.
        """
        width = max(self.lengths) + read.tokens.shape[1]
        for first, length, start, count in zip(
            self.first, self.lengths, read.start.tolist(), read.num_valid.tolist(), strict=True
        ):
            begin = first if length else start
            if count and (start != begin + length or begin + width > self.max_length):
                return False
        return True

    def add(self, read: Reading) -> None:
        """Keep what a reading adds."""
        output = read.output
        for row, (start, count) in enumerate(zip(read.start.tolist(), read.num_valid.tolist(), strict=True)):
            if not count:
                continue
            if not self.lengths[row]:
                self.first[row] = start
            self.lengths[row] += count
            tokens, next_tokens = read.tokens[row, :count], read.next_tokens[row, :count]
            # cloned, as the engine may write the next forward's states into the same memory
            states = (value[row, :count].clone() for value in (output.features, output.post_norm))
            self.pieces[row].append(Piece(tokens, next_tokens, *states))
        self.extent, self.shift = read.extent, read.shift

    def take(self) -> Reading | None:
        """All unread positions as one reading [B, Q], Q those of the row with most; None if there are none. After this,
        there are none."""
        lengths, width = self.lengths, max(self.lengths)
        if not width:
            return None
        tokens, next_tokens, features, post_norm = (
            joined_rows([[piece[field] for piece in row] for row in self.pieces]) for field in range(len(Piece._fields))
        )
        # padding is written too: behind the unread positions, and in rows that have ended from the start
        rows = zip(self.first, lengths, strict=True)
        start = torch.tensor([first if length and first + width <= self.max_length else 0 for first, length in rows])
        extent = min(max(self.extent, int(start.max()) + width), self.max_length) if self.extent else 0
        for row, length in enumerate(lengths):
            self.pieces[row], self.first[row] = [], self.first[row] + length
        self.lengths = [0] * len(lengths)
        device = features.device
        return Reading(
            tokens.to(device),
            next_tokens.to(device),
            TargetOutput(features, post_norm),
            start.to(device),
            torch.tensor(lengths).to(device),
            extent=extent,
            shift=self.shift,
        )


def joined_rows(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Per row some tensors [n, ...] -> [B, widest, ...], zeros behind a row's own."""
    if len(rows) == 1:
        return torch.cat(list(rows[0]))[None]
    like = next(part for row in rows for part in row)
    nothing = like.new_zeros(0, *like.shape[1:])
    return pad_sequence([torch.cat(list(row)) if row else nothing for row in rows], batch_first=True)
