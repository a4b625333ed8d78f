"""Training batches as a pure function of their number, so that a resumed run sees the same batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..heads.base import DraftBatch
from ..targets.layers.target_output import TargetOutput
from .row_sequence import RowSequence
from .rows.samples import SEGMENTS
from .storage.shard_file import StoredSample


@dataclass(frozen=True)
class BatchPlan:
    """The rows of each batch of a rank.

    Every batch is full. Ranks take consecutive parts of a global batch, whose rows do not depend on how many ranks
    there are.
    """

    sequence: RowSequence
    batch_size: int  # rows per rank
    num_ranks: int = 1
    rank: int = 0

    def rows(self, number: int) -> list[int]:
        """The sample, by index, of each row of this rank's batch `number` (0-based)."""
        first = (number * self.num_ranks + self.rank) * self.batch_size
        return [self.sequence[row] for row in range(first, first + self.batch_size)]

    def epoch(self, number: int) -> float:
        """How many times the samples have been read before batch `number`."""
        return number * self.num_ranks * self.batch_size / len(self.sequence.lengths)

    def padding(self, *, num_batches: int = 16) -> float:
        """The share of padding among the positions of the first `num_batches` batches, 0..1."""
        filled = positions = 0
        for number in range(num_batches):
            lengths = self.sequence.lengths[self.rows(number)].tolist()
            filled, positions = filled + sum(lengths), positions + len(lengths) * max(lengths)
        return 1 - filled / positions


@dataclass
class TrainingBatch:
    """A batch of rows, with the target's states if they are stored. Fields as in `DraftBatch` unless noted."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T]
    weights: Tensor | None  # [B, T]
    output: TargetOutput | None  # None: the target has to run
    num_tokens: int  # without padding
    pictures: Sequence[tuple[str, ...]] = ()  # of each row

    def to(self, device: torch.device | str) -> "TrainingBatch":
        def moved(value: Any) -> Any:
            return None if value is None else value.to(device, non_blocking=True)

        output = self.output
        if output is not None:
            output = replace(
                output, **{name: moved(getattr(output, name)) for name in ("features", "post_norm", "shift")}
            )
        tensors = {name: moved(getattr(self, name)) for name in ("input_ids", "loss_mask", "weights")}
        return replace(self, **tensors, output=output)

    def filled(self, read: Callable[..., TargetOutput]) -> DraftBatch:
        """The input of a head's loss. Args: read: as `DraftHead.read_target`; called if no states are stored."""
        output = self.output or read(self.input_ids, *([self.pictures] if any(self.pictures) else []))
        return DraftBatch(self.input_ids, self.loss_mask, output, self.weights)


def collate(rows: Sequence[StoredSample], *, segment_weights: Mapping[str, float] | None = None) -> TrainingBatch:
    """Pad B rows on the right to the longest one. The first token of a row is not supervised, because there is no state
    before it to draft it from.

    Args: segment_weights: loss weight by segment; 1 for segments not named.
    """
    lengths = [len(stored.sample) for stored in rows]
    shape = len(rows), max(lengths)
    input_ids = torch.zeros(shape, dtype=torch.long)  # [B, T]
    loss_mask, segments = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    output = None
    if (states := rows[0].states) is not None:  # features [T, L, D], post_norm [T, D]
        both = (states.features, states.post_norm)
        output = TargetOutput(*(tensor.new_zeros(*shape, *tensor.shape[1:]) for tensor in both))
    for i, (stored, num) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[i, :num] = torch.from_numpy(stored.sample.input_ids).long()
        loss_mask[i, :num] = torch.from_numpy(stored.sample.loss_mask)
        segments[i, :num] = torch.from_numpy(stored.sample.segments).long()
        if output is not None and stored.states is not None:
            output.features[i, :num], output.post_norm[i, :num] = stored.states.features, stored.states.post_norm
            if stored.states.shift is not None:
                output.shift = torch.zeros(shape, dtype=torch.long) if output.shift is None else output.shift
                output.shift[i, :num] = stored.states.shift
    loss_mask[:, 0] = False
    weights = None
    if segment_weights:
        weights = torch.tensor([segment_weights.get(name, 1.0) for name in SEGMENTS])[segments]  # [B, T]
    pictures = [stored.sample.pictures for stored in rows]
    return TrainingBatch(input_ids, loss_mask, weights, output, num_tokens=sum(lengths), pictures=pictures)
