"""How many drafts of each row a round verifies."""

from collections.abc import Sequence
from math import inf

import torch.nn.functional as F
from torch import Tensor

from ...base.errors import BadInput
from ...heads.drafting.trees import worth_verifying


class Widths:
    """How many drafts of each row a round verifies, and how wide its forward is: as wide as its widest row.

    Eager steps have any width. Recorded ones read 1, 2, 4, ... tokens, as each width is recorded separately, and pad
    their results to one width, as drafting is recorded for one.
    """

    def __init__(self, num_drafted: int, cost: float | None, steps: str):
        """Args: cost: of verifying one more token, as in `worth_verifying`, not negative; None: all are verified."""
        if cost is not None and not 0 <= cost < inf:
            raise BadInput(f"verify_cost {cost}: expected 0 or more")
        self.num_drafted, self.cost, self.steps = num_drafted, cost, steps
        powers = [(1 << i) - 1 for i in range(num_drafted.bit_length())]  # 0, 1, 3, ... below num_drafted
        narrower = [] if cost is None else range(num_drafted) if steps == "eager" else powers
        self.known = [*narrower, num_drafted]

    def offered(self, confidence: Tensor | None, ended: Sequence[bool]) -> list[int]:
        """The number of drafts to verify per row: with a cost those that pay, else all; 0 in rows that have ended.

        Args: confidence: [B, K] of a Proposal.
        """
        if self.cost is None or confidence is None:
            worth = [self.num_drafted] * len(ended)
        else:
            worth = worth_verifying(confidence, self.cost).tolist()
        return [0 if over else num for num, over in zip(worth, ended, strict=True)]

    def of(self, num_offered: Sequence[int]) -> int:
        """The width of the forward, in drafts, for these numbers of drafts per row."""
        return next(width for width in self.known if width >= max(num_offered))

    def filled(self, result: Tensor) -> Tensor:
        """[B, width + 1, ...] padded with zeros to the full width if steps are recorded."""
        if self.cost is None or self.steps == "eager":
            return result
        return F.pad(result, (0, 0) * (result.ndim - 2) + (0, self.num_drafted + 1 - result.shape[1]))
