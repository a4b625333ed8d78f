"""The base of drafters on the host: each row's committed text in Python, copied from the device once per round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...heads.base import Proposal
from ...heads.drafting.drafter import Drafter, Reading


class RowText:
    """The committed text of one row, the pending token included."""

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Append the prompt and the first token after it."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        raise NotImplementedError

    def draft(self, num_tokens: int) -> list[int]:
        """Exactly num_tokens tokens that may follow. Only where `TextDrafter` proposes."""
        raise NotImplementedError


def commit_texts(rows: Sequence[RowText], read: Reading) -> list[bool]:
    """Append to each row the tokens that this reading adds, the pending one last; returns which rows grew.

    Rows that have ended add none."""
    firsts, starts, counts = read.tokens[:, 0].tolist(), read.start.tolist(), read.num_valid.tolist()
    for row, first, start, count, behind in zip(rows, firsts, starts, counts, read.next_tokens.tolist(), strict=True):
        if start == 0 and count:
            row.read_prompt([first, *behind[:count]])
        else:
            row.extend(behind[:count])
    return [count > 0 for count in counts]


@dataclass
class TextState:
    """rows: the texts. active: whether each still grows."""

    rows: list[Any]  # of `RowText`, with what else a drafter asks of its own
    active: list[bool] = field(default_factory=list)


class TextDrafter(Drafter):
    """A drafter on the host that drafts row by row; a subclass makes the rows."""

    on_host = True

    def new_rows(self, batch_size: int) -> list[RowText]:
        raise NotImplementedError

    def begin(self, *, batch_size: int, max_length: int) -> TextState:
        return TextState(self.new_rows(batch_size))

    def commit(self, state: TextState, read: Reading) -> None:
        state.active = commit_texts(state.rows, read)

    def propose(self, state: TextState, *, num_draft_tokens: int) -> Proposal:
        nothing = [0] * num_draft_tokens
        rows = zip(state.rows, state.active, strict=True)
        drafts = [row.draft(num_draft_tokens) if active else nothing for row, active in rows]
        return Proposal(torch.tensor(drafts))  # [B, K]
