"""Drafters that look up the text so far, and perhaps earlier answers of the target: n-grams and suffixes.

They keep the committed texts on the host and copy the new tokens of all rows from the device once per round. They
always draft K tokens: if fewer were found, filler tokens follow, which are verified like any other draft.
"""

from collections.abc import Sequence

from ...base.errors import BadInput
from ...engines.servers.engine import LONGEST_MATCH
from .answers import Answers
from .host import RowText, TextDrafter, TextState
from .rates import LookupRates
from .suffix import SuffixRow, SuffixTrie

MAX_SUFFIX = 16  # tokens of a row's own text that are looked up
MAX_NODES = 2**20  # of all rows' tries together, about 150 bytes each
ANSWERED_DRAFT_TOKENS = 7  # default K with answers to look up, as drafting costs nothing and only verifying does


class NgramRow(RowText):
    """A text and, for each n-gram in it, the position after its latest occurrence that is followed by a token."""

    def __init__(self, max_ngram: int):
        self.max_ngram = max_ngram
        self.text: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        text = self.text
        for token in tokens:
            end = len(text)
            for size in range(1, min(self.max_ngram, end) + 1):
                self.behind[tuple(text[end - size :])] = end
            text.append(token)

    def draft(self, num_tokens: int) -> list[int]:
        text, guess = self.text, self.text[-1:]  # without a match, the last token again
        for size in range(min(self.max_ngram, len(text)), 0, -1):
            start = self.behind.get(tuple(text[-size:]))
            if start is not None:
                guess = text[start : start + num_tokens]
                break
        return [guess[i % len(guess)] for i in range(num_tokens)]


class NgramDrafter(TextDrafter):
    """Prompt lookup (Saxena 2023): what followed the latest earlier occurrence of the text's last tokens.

    The longest match decides, of at most max_ngram tokens. If fewer than K tokens follow it, they are
    repeated, as a text with that period would continue; without a match, the last token is repeated.
    """

    def __init__(self, max_ngram: int = LONGEST_MATCH):
        if max_ngram < 1:
            raise BadInput(f"n-grams of 1 to {max_ngram} tokens: expected 1 or more, in ascending order")
        self.max_ngram = max_ngram

    def new_rows(self, batch_size: int) -> list[RowText]:
        return [NgramRow(self.max_ngram) for _ in range(batch_size)]


def suffix_rows(batch_size: int, answers: Answers | None, rates: LookupRates) -> list[SuffixRow]:
    """Empty rows that look up their own text and, if there are any, the target's answers to other prompts."""
    most, trie = max(2, MAX_NODES // batch_size), answers.trie if answers else None
    own = (SuffixTrie(max_depth=MAX_SUFFIX, max_nodes=most) for _ in range(batch_size))
    return [SuffixRow(text, trie, rates=rates) for text in own]


class SuffixDrafter(TextDrafter):
    """The most frequent continuation of the longest suffix seen before (after SuffixDecoding, Oliaro et al. 2024).

    Args: answers: the target's to other prompts, also looked up; `SuffixRow` chooses between both sources.
    """

    def __init__(self, *, answers: Answers | None = None):
        self.answers = answers
        self.answers_digest = answers.digest if answers else None  # tells measurements apart
        if answers is not None:
            self.default_draft_tokens = ANSWERED_DRAFT_TOKENS

    def begin(self, *, batch_size: int, max_length: int) -> TextState:
        return TextState(suffix_rows(batch_size, self.answers, LookupRates()))

    def restart(self, state: TextState, *, batch_size: int, max_length: int) -> TextState:
        """With the rates so far: they are of all texts of an engine."""
        return TextState(suffix_rows(batch_size, self.answers, state.rows[0].rates))

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        if self.answers is not None:
            self.answers.leave_out(prompts, questions)
