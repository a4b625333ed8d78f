"""A rendered conversation as text and tokens, and where an answer begins and ends in it."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .segments import Span, TokenTable


class Unproved(ValueError):
    """The rendering with marks does not prove where the assistant's tokens are."""


@dataclass(frozen=True)
class Rendering:
    """A whole conversation as text and as tokens."""

    text: str
    ids: list[int]
    starts: list[int]  # first character of each token; empty for slow tokenizers, which have no offsets
    ends: list[int]  # behind the last character of each token; byte-level tokenizers may exclude a token's blanks
    table: TokenTable

    @classmethod
    def of(cls, text: str, table: TokenTable) -> "Rendering":
        tokenizer = table.tokenizer
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
        offsets = encoded["offset_mapping"] if tokenizer.is_fast else []
        starts, ends = ([edges[side] for edges in offsets] for side in (0, 1))
        return cls(text, list(encoded["input_ids"]), starts, ends, table)

    def border(self, start: int, opener: str) -> int:
        """Where the prompt of an answer ends, in characters: the text of the generation prompt ends there, if the
        answer's first token is within it or behind it."""
        near = self.starts[start] if start < len(self.ids) else len(self.text)
        if not opener or self.text.endswith(opener, 0, near):
            return near
        at = self.text.rfind(opener, max(0, near - len(opener)), near + len(opener) - 1)
        return near if at < 0 else at + len(opener)

    def turn(self, span: Span, border: int | None) -> tuple[list[int], list[int]]:
        """The ids of an answer's prompt, as the tokenizer gives them for that text alone, and those of the answer.

        Args: span: of the answer, in tokens. border: where its prompt ends, in characters; None: before the span.
        """
        start, end = span
        if border is None:
            return self.ids[:start], self.ids[start:end]
        # after a special token, tokens do not depend on earlier text
        at = next((i for i in range(start - 1, 0, -1) if self.ids[i] in self.table.special), 0) if self.starts else 0
        prompt = [*self.ids[:at], *self.table.ids(self.text[self.starts[at] if at else 0 : border])]
        if self.ids[: len(prompt)] == prompt:
            start = max(start, len(prompt))
            return self.ids[:start], self.ids[start:end]
        first = bisect_left(self.starts, border)
        is_edge = first < len(self.starts) and self.starts[first] == border
        # offsets may leave out a blank before a word, which then belongs to both
        if is_edge and self.table.text(self.ids[first])[:1] == self.text[border]:
            return prompt, self.ids[first:end]
        rest = self.table.ids(self.text[border:])
        return prompt, rest[: len(rest) - (len(self.ids) - end)]

    def start_of_turn(
        self, behind: int, first: int, opener: list[int], markers: tuple[str, str] | None
    ) -> tuple[int, int]:
        """(first character of a turn's header, first token of its answer). Raises Unproved if they are not certain.

        Args:
            behind: the end, in characters, of the turn before.
            first: the first character of the assistant's text (not a blank), perhaps after the markers of a trace.
            opener: token ids of the generation prompt. The answer begins where the turn's tokens differ from them.
            markers: texts that open and close a reasoning trace.
        """
        ids, special = self.ids, self.table.special
        if not opener and markers:
            opens, closes = map(re.escape, markers)
            trace = re.search(rf"{opens}\s*({closes}\s*)?$", self.text[behind:first])
            first = behind + trace.start() if trace else first
        at = bisect_right(self.ends, first)
        if not opener:
            while at and self.table.is_blank(ids[at - 1]):
                at -= 1
            ends_prompt = at > 0 and ids[at - 1] in special
            is_alone = at < 2 or ids[at - 2] not in special  # of two special tokens, the second may be the answer's
            if not ends_prompt or not is_alone:
                raise Unproved
            return first, at
        header = self.text.rfind(self.table.text(opener[0]), behind, first)
        token = bisect_left(self.starts, header)
        if opener[0] not in special or header < 0 or (ids[token], self.starts[token]) != (opener[0], header):
            raise Unproved
        return header, min(at, token + num_common(opener, ids[token : token + len(opener)]))

    def end_of_turn(self, behind: int, markers: tuple[str, str] | None, *, is_last: bool) -> int:
        """The index after the end token of a turn whose last non-blank character is before the character `behind`.

        The closing marker of a trace may follow that character, if the answer after the trace is empty. Only the last
        turn (is_last) may have no end token: raises Unproved if another turn has none.
        """
        closes = re.compile(rf"\s*{re.escape(markers[1])}").match(self.text, behind) if markers else None
        token = bisect_left(self.starts, closes.end() if closes else behind)
        closing = closing_token(self.ids, token, self.table)
        if closing is not None:
            return closing + 1
        if not is_last or not all(map(self.table.is_blank, self.ids[token:])):
            raise Unproved
        return len(self.ids)


def close(ids: Sequence[int], start: int, end: int, table: TokenTable) -> int:
    """The end of the answer [start, end), moved to directly after the special token that ends the turn, because the
    target has to write that token.

    Blank tokens between the answer and that token are included, those after it excluded. If there is no such token, the
    end stays.
    """
    last = end - 1
    while last > start and table.is_blank(ids[last]):
        last -= 1
    if last >= start and ids[last] in table.special:
        return last + 1
    closing = closing_token(ids, end, table)
    return end if closing is None else closing + 1


def closing_token(ids: Sequence[int], end: int, table: TokenTable) -> int | None:
    """The index of the special token that follows an answer, after blank tokens; None if another token follows."""
    while end < len(ids) and table.is_blank(ids[end]):
        end += 1
    has_end = end < len(ids) and ids[end] in table.special and ids[end] != table.tokenizer.bos_token_id
    return end if has_end else None


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = zip(first, second, strict=False)
    return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(first), len(second)))
