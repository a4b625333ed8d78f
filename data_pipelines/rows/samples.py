"""A training sample: token ids with a segment and a supervision mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SEGMENTS = ("prompt", "think", "answer")  # names of the numbers in Sample.segments
PROMPT, THINK, ANSWER = range(3)
# where the ids of a sample are from: the row itself; its text, as the row has no ids; its text, as those are of another
# tokenizer, template or text
FROM_ROW, FROM_TEXT, NOT_ITS_IDS = "ids", "text", "text, not its ids"


@dataclass(kw_only=True, eq=False)
class Sample:
    """A row of T tokens, or a piece of a longer row."""

    input_ids: np.ndarray  # [T] int32
    segments: np.ndarray  # [T] uint8, indices into SEGMENTS
    loss_mask: np.ndarray  # [T] bool, True if a head is trained to predict this token (it is supervised)
    num_cut: int = 0  # tokens of the row that are left out because of data.max_length; not stored
    is_piece: bool = False  # of a row that was split; not stored
    source: str = FROM_TEXT
    pictures: tuple[str, ...] = ()  # at its image tokens, in order, as in targets/images/pictures.py

    @classmethod
    def of(
        cls,
        input_ids: Sequence[int],
        loss_mask: Sequence[bool],
        *,
        segments: Sequence[int] | None = None,
        num_cut: int = 0,
    ) -> "Sample":
        """A sample from lists of equal length. segments None: supervised tokens are answer, all others prompt."""
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
            and (self.num_cut, self.pictures) == (other.num_cut, other.pictures)
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("input_ids", "segments", "loss_mask")
            )
        )
