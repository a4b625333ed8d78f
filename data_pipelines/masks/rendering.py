"""A chat template; a rendered conversation as text and as ids, and where in it an answer begins and ends."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from .messages import REASONING_KEYS, Message
from .segments import TokenTable


class Unproved(ValueError):
    """The marked rendering does not prove where the assistant's tokens are; they must be found turn by turn."""


RENDER_ERRORS = (TemplateError, TypeError, ValueError)  # what a template raises on messages that it does not take


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with a row's tools."""

    table: TokenTable
    tools: list[Any] | None
    markers: tuple[str, str] | None  # of reasoning traces

    @cached_property
    def template(self) -> str:
        return self.table.tokenizer.get_chat_template(tools=self.tools)

    @property
    def reasoning_key(self) -> str | None:
        """The message key under which the template takes a reasoning trace; None if it takes none."""
        known = self.table.reasoning_keys
        if self.template not in known:
            known[self.template] = next(filter(self._reads, REASONING_KEYS), None)
        return known[self.template]

    def render_text(self, messages: list[Message], *, generation_prompt: bool = False) -> str:
        return self.table.tokenizer.apply_chat_template(
            messages, tools=self.tools, add_generation_prompt=generation_prompt, tokenize=False
        )

    def render(self, messages: list[Message], *, generation_prompt: bool = False) -> list[int]:
        return self.table.ids(self.render_text(messages, generation_prompt=generation_prompt))

    def _reads(self, key: str) -> bool:
        question, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
        try:
            return self.render_text([question, {**answer, key: "Z"}]) != self.render_text([question, answer])
        except RENDER_ERRORS:
            return False


@dataclass(frozen=True)
class Rendering:
    """A whole conversation as text and as tokens."""

    text: str
    ids: list[int]
    starts: list[int]  # of each token, in characters; empty where the tokenizer does not tell
    ends: list[int]  # blanks at the edges of a token may be left out, as byte-level tokenizers do
    table: TokenTable

    @classmethod
    def of(cls, text: str, table: TokenTable) -> "Rendering":
        tokenizer = table.tokenizer
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
        offsets = encoded["offset_mapping"] if tokenizer.is_fast else []
        starts, ends = ([edges[side] for edges in offsets] for side in (0, 1))
        return cls(text, list(encoded["input_ids"]), starts, ends, table)

    def start_of_turn(
        self, behind: int, first: int, opener: list[int], markers: tuple[str, str] | None
    ) -> tuple[int, int]:
        """(the character where a turn's header begins, the token where its answer does). Unproved: that is unclear.

        behind: the character where the turn before ended. first: the first character that the assistant wrote, no
        blank, or follows the markers of its trace. opener: the ids of a generation prompt; the answer begins
        where the turn goes on otherwise.
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
            is_alone = at < 2 or ids[at - 2] not in special  # of two, the second may be the answer's own
            if not ends_prompt or not is_alone:
                raise Unproved
            return first, at
        header = self.text.rfind(self.table.text(opener[0]), behind, first)
        token = bisect_left(self.starts, header)
        if opener[0] not in special or header < 0 or (ids[token], self.starts[token]) != (opener[0], header):
            raise Unproved
        return header, min(at, token + num_common(opener, ids[token : token + len(opener)]))

    def end_of_turn(self, behind: int, markers: tuple[str, str] | None, *, is_last: bool) -> int:
        """The index after the token that ends a turn whose last non-blank character is before `behind`.

        The closing marker of a trace without an answer may lie between. The last turn (is_last) may lack an end token.
        Unproved: another turn lacks it.
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
    """The end of an answer moved to just behind the special token that ends the turn, which the target must emit.

    Blank tokens after that token are excluded, and those between the answer and the token are included.
    """
    last = end - 1
    while last > start and table.is_blank(ids[last]):
        last -= 1
    if last >= start and ids[last] in table.special:
        return last + 1
    closing = closing_token(ids, end, table)
    return end if closing is None else closing + 1


def closing_token(ids: Sequence[int], end: int, table: TokenTable) -> int | None:
    """Where the special token is that follows an answer, blank tokens apart; None if another token does."""
    while end < len(ids) and table.is_blank(ids[end]):
        end += 1
    has_end = end < len(ids) and ids[end] in table.special and ids[end] != table.tokenizer.bos_token_id
    return end if has_end else None


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the left."""
    pairs = zip(first, second, strict=False)
    return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(first), len(second)))
