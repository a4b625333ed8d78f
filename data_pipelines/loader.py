"""Training batches as a pure function of the batch number: what makes resuming exact."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .chat import Sample


@dataclass(frozen=True)
class BatchPlan:
    """Which rows the n-th batch of a rank holds.

    Rows come from an endless sequence of permutations, one per epoch, each a function of (seed, epoch). Every batch is
    full; ranks take consecutive shares of a global batch, so that its rows do not depend on how many ranks share it.
    """

    num_rows: int
    batch_size: int  # rows per rank
    seed: int
    num_ranks: int = 1
    rank: int = 0

    def rows(self, number: int) -> list[int]:
        """Row indices of this rank's batch `number` (0-based)."""
        first = (number * self.num_ranks + self.rank) * self.batch_size
        return [self._row(place) for place in range(first, first + self.batch_size)]

    def epoch(self, number: int) -> float:
        """How many epochs have been read before batch `number`."""
        return number * self.num_ranks * self.batch_size / self.num_rows

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, self.num_rows)
        return int(self._permutation(epoch)[index])

    def _permutation(self, epoch: int) -> Tensor:
        kept: tuple[int, Tensor] | None = self.__dict__.get("_kept")
        if kept is None or kept[0] != epoch:
            # torch's CPU generator reads the low 32 bits of a seed only
            source = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
            kept = epoch, torch.randperm(self.num_rows, generator=source)
            self.__dict__["_kept"] = kept
        return kept[1]


def collate(samples: Sequence[Sample], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Right-pad samples to the longest: input_ids [B, T] and loss_mask [B, T] bool (False on padding)."""
    longest = max(len(sample.input_ids) for sample in samples)
    input_ids = torch.zeros(len(samples), longest, dtype=torch.long)  # [B, T]
    loss_mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for i, sample in enumerate(samples):
        input_ids[i, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        loss_mask[i, : len(sample.loss_mask)] = torch.tensor(sample.loss_mask, dtype=torch.bool)
    return input_ids.to(device), loss_mask.to(device)
