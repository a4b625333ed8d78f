"""The base of drafters on the host: each row's committed text in Python, copied from the device once per round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...heads.base import Proposal
from ...heads.drafter import Drafter, Reading


def committed_tokens(read: Reading) -> list[list[int]]:
    """Per row, the tokens that this reading adds to its text, the pending one last; none in rows that had ended."""
    # a row's first token, then the successor of each token; the last successor is the pending token
    packed = torch.cat([read.start[:, None], read.num_valid[:, None], read.tokens[:, :1], read.next_tokens], 1)
    return [
        [*([first] if start == 0 and num_valid else []), *following[:num_valid]]
        for start, num_valid, first, *following in packed.tolist()
    ]


class RowText:
    """The committed text of one row, the pending token included."""

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Append the prompt and the first token after it."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        raise NotImplementedError

    def draft(self, num_tokens: int) -> list[int]:
        """Exactly num_tokens tokens that may follow."""
        raise NotImplementedError


def commit_texts(rows: Sequence[Any], read: Reading) -> list[bool]:
    """Append to each row the tokens that this reading adds; returns which rows grew."""
    news = committed_tokens(read)
    for row, new, start in zip(rows, news, read.start.tolist(), strict=True):
        if start == 0 and new:
            row.read_prompt(new)
        else:
            row.extend(new)
    return [bool(new) for new in news]


@dataclass
class TextState:
    """rows: the texts, with `extend`, and with `draft` if `TextDrafter` proposes. active: rows that still grow."""

    rows: list[Any]
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
