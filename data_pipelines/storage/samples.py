"""What a row is for training: its token ids, and for each token what it is part of and whether it is supervised."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SEGMENTS = ("prompt", "think", "answer")  # what a token is part of, by the number in Sample.segments
PROMPT, THINK, ANSWER = range(3)


@dataclass(kw_only=True, eq=False)
class Sample:
    """One row, or a piece of one. num_cut: tokens of the row lost on the right to data.max_length.

    input_ids: [T] int32. segments: [T] uint8, SEGMENTS by number. loss_mask: [T] bool, True where a head is trained to
    predict the token.
    """

    input_ids: np.ndarray
    segments: np.ndarray
    loss_mask: np.ndarray
    num_cut: int = 0

    @classmethod
    def of(
        cls,
        input_ids: Sequence[int],
        loss_mask: Sequence[bool],
        *,
        segments: Sequence[int] | None = None,
        num_cut: int = 0,
    ) -> "Sample":
        """From lists of one length. segments None: what is supervised is answer, all else prompt."""
        if segments is None:
            segments = [ANSWER if supervised else PROMPT for supervised in loss_mask]
        assert len(input_ids) == len(loss_mask) == len(segments)
        return cls(
            input_ids=np.asarray(input_ids, dtype=np.int32),
            segments=np.asarray(segments, dtype=np.uint8),
            loss_mask=np.asarray(loss_mask, dtype=bool),
            num_cut=num_cut,
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sample)
            and self.num_cut == other.num_cut
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("input_ids", "segments", "loss_mask")
            )
        )
