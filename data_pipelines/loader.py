"""Training batches as a pure function of their number, which makes resuming exact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..heads.base import DraftBatch
from ..heads.nn.documents import Documents
from ..heads.target import TargetOutput
from .packing import Row, RowSequence
from .storage.samples import SEGMENTS
from .storage.shard_file import StoredSample


@dataclass(frozen=True)
class BatchPlan:
    """Which rows the n-th batch of a rank holds.

    Every batch is full; ranks take consecutive shares of a global batch, so that its rows do not depend on how many
    ranks share it.
    """

    sequence: RowSequence
    batch_size: int  # rows per rank
    num_ranks: int = 1
    rank: int = 0

    def rows(self, number: int) -> list[Row]:
        """The samples, by index, of each row of this rank's batch `number` (0-based)."""
        first = (number * self.num_ranks + self.rank) * self.batch_size
        return [self.sequence[row] for row in range(first, first + self.batch_size)]

    def epoch(self, number: int) -> float:
        """How many times the samples have been read before batch `number`."""
        row = number * self.num_ranks * self.batch_size
        return self.sequence.num_samples_before(row) / len(self.sequence.lengths)

    def padding(self, *, num_batches: int = 16) -> float:
        """The share of padding among the positions of the first `num_batches` batches, 0..1."""
        filled = positions = 0
        for number in range(num_batches):
            lengths = [int(self.sequence.lengths[row].sum()) for row in self.rows(number)]
            filled, positions = filled + sum(lengths), positions + len(lengths) * max(lengths)
        return 1 - filled / positions


@dataclass
class TrainingBatch:
    """Rows on a device, with the target's stored states; `output` None means that the target has to run.

    Fields as in `heads.base.DraftBatch`. num_tokens: without padding.
    """

    input_ids: Tensor
    loss_mask: Tensor
    weights: Tensor | None
    documents: Documents | None
    output: TargetOutput | None
    num_tokens: int

    def to(self, device: torch.device | str) -> "TrainingBatch":
        def moved(value: Any) -> Any:
            return None if value is None else value.to(device, non_blocking=True)

        output = self.output and TargetOutput(moved(self.output.features), moved(self.output.post_norm))
        tensors = {name: moved(getattr(self, name)) for name in ("input_ids", "loss_mask", "weights", "documents")}
        return replace(self, **tensors, output=output)

    def filled(self, read: Callable[..., TargetOutput]) -> DraftBatch:
        """The input of a head's loss. read(input_ids, documents=...): runs the target; used if no states are stored."""
        output = self.output or read(self.input_ids, documents=self.documents)
        return DraftBatch(self.input_ids, self.loss_mask, output, self.weights, self.documents)


def collate(
    rows: Sequence[Sequence[StoredSample]], *, segment_weights: Mapping[str, float] | None = None
) -> TrainingBatch:
    """Samples placed into rows [B, T], padded on the right to the longest row.

    Samples that share a row do not attend to each other. The first token of each is not supervised: nothing precedes
    it from which to draft it. `segment_weights`: loss weight by segment; 1 for segments not named.
    """
    lengths = [[len(stored.sample) for stored in row] for row in rows]
    shape = len(rows), max(sum(row) for row in lengths)
    input_ids = torch.zeros(shape, dtype=torch.long)  # [B, T]
    loss_mask, segments = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    output = None
    if (states := rows[0][0].states) is not None:  # features [T, L, D], post_norm [T, D]
        kept = (states.features, states.post_norm)
        output = TargetOutput(*(tensor.new_zeros(*shape, *tensor.shape[1:]) for tensor in kept))
    for i, row in enumerate(rows):
        start = 0
        for stored in row:
            here = slice(start, start + len(stored.sample))
            input_ids[i, here] = torch.from_numpy(stored.sample.input_ids).long()
            loss_mask[i, here] = torch.from_numpy(stored.sample.loss_mask)
            segments[i, here] = torch.from_numpy(stored.sample.segments).long()
            loss_mask[i, start] = False
            if output is not None and stored.states is not None:
                output.features[i, here], output.post_norm[i, here] = stored.states.features, stored.states.post_norm
            start = here.stop
    weights = None
    if segment_weights:
        weights = torch.tensor([segment_weights.get(name, 1.0) for name in SEGMENTS])[segments]  # [B, T]
    is_packed = any(len(row) > 1 for row in rows)
    documents = Documents.of(lengths, num_positions=shape[1]) if is_packed else None
    return TrainingBatch(input_ids, loss_mask, weights, documents, output, num_tokens=sum(map(sum, lengths)))
