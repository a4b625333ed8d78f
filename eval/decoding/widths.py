"""How many drafts of each row a round verifies."""

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ...configs.errors import BadInput
from ...heads.drafter import Reading
from ...heads.drafting import worth_verifying
from .sampling import choose_tokens
from .verify import AcceptedPath, AcceptRule, Candidates


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
        few = [(1 << i) - 1 for i in range(num_drafted.bit_length())]
        less = [] if cost is None else range(num_drafted) if steps == "eager" else few
        self.known = [*less, num_drafted] if num_drafted not in less else list(less)

    def offered(self, confidence: Tensor | None, read: Reading | None, num_rows: int) -> list[int]:
        """The number of drafts to verify per row: with a cost, those that pay, and 0 in rows that have ended.

        Args: confidence: [B, K] of a Proposal. read: the Reading that the drafter committed before it.
        """
        if self.cost is None or confidence is None:
            return [self.num_drafted] * num_rows
        worth = worth_verifying(confidence, self.cost)
        return (worth if read is None else worth * (read.num_valid > 0).to(worth.device)).tolist()

    def of(self, num_offered: Sequence[int]) -> int:
        """The width of the forward, in drafts, for these numbers of drafts per row."""
        return next(width for width in self.known if width >= max(num_offered))

    def accepted(self, rule: AcceptRule, drafted: Candidates) -> AcceptedPath:
        """Apply a rule to the offered drafts; if all of these are accepted, the target's own choice is the bonus."""
        offered, history = drafted.offered, drafted.history
        if offered is None or (drafted.is_chain and drafted.draft_probs is None and rule.takes_offered):
            return rule(drafted)
        logits = drafted.logits  # computed once, for the rule and the bonus
        accepted = rule(drafted._replace(read_logits=lambda: logits))
        rows = torch.arange(len(offered), device=offered.device)
        history = None if history is None else history[rows, offered][:, None]
        own = choose_tokens(
            logits[rows, offered][:, None], drafted.sampling, history=history, generator=drafted.generator
        )
        bonus = torch.where(accepted.num_accepted >= offered, own[:, 0], accepted.bonus)
        return AcceptedPath(torch.minimum(accepted.num_accepted, offered), accepted.path, bonus)

    def filled(self, result: Tensor) -> Tensor:
        """[B, width + 1, ...] padded with zeros to the full width if steps are recorded."""
        if self.cost is None or self.steps == "eager":
            return result
        return F.pad(result, (0, 0) * (result.ndim - 2) + (0, self.num_drafted + 1 - result.shape[1]))
