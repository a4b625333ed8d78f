"""Filters that drop conversations. Each has a name, under which dropped rows are counted."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...base.errors import BadInput
from .row_shapes import Conversation

BAD_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")  # control and replacement characters
PIECES = re.compile(r"\w{1,8}|[^\w\s]")  # words; long ones, as in scripts without spaces, in pieces of 8 characters
RUN = 8  # pieces in a run
FEW = 64  # pieces or characters; shorter answers may repeat themselves by chance


@dataclass(kw_only=True)
class FilterConfig:
    """Which conversations are dropped; null disables a limit."""

    require_user: bool = True  # drop chats without a user turn
    require_answer: bool = True  # drop chats without an assistant turn; false for prompts to be regenerated
    drop_empty: bool = True  # drop if an assistant turn has no text
    drop_truncated: bool = True  # drop if the last answer is cut off
    drop_echo: bool = True  # drop if an answer is equal to the turn before it
    min_characters: int | None = 1  # of the whole conversation
    max_characters: int | None = None
    # shares, 0..1, that find answers which loop: of an answer's runs of 8 words that occurred earlier in it, and of its
    # characters in lines that occurred earlier in it
    max_repeated_words: float | None = 0.8
    max_repeated_lines: float | None = 0.8
    max_bad_characters: float | None = 0.01  # share, 0..1, of control and replacement characters in the conversation

    def __post_init__(self) -> None:
        for name in ("max_repeated_words", "max_repeated_lines", "max_bad_characters"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise BadInput(f"{name} {share}: expected a share, 0 to 1")
        low, high = self.min_characters, self.max_characters
        if low is not None and high is not None and low > high:
            raise BadInput(f"min_characters {low} is above max_characters {high}")


def reason_to_drop(conversation: Conversation, config: FilterConfig) -> str | None:
    """The name of the first filter that drops the conversation; None if it is kept."""
    return next(_reasons(conversation, config), None)


def _reasons(conversation: Conversation, config: FilterConfig) -> Iterator[str]:
    """The names of all filters that drop the conversation, computed lazily, cheap ones first."""
    turns, answers = conversation.turns, list(conversation.answers)
    roles = {role for role, _ in turns}
    if config.require_user and not roles & {"user", "text"}:
        yield "no_user_turn"
    if config.require_answer and not roles & {"assistant", "text"}:
        yield "no_answer"
    if config.drop_empty and not all(answer.strip() for answer in answers):
        yield "empty_answer"
    if config.drop_truncated and conversation.truncated:
        yield "truncated"
    if config.drop_echo and any(
        role == "assistant" and text.strip() == before.strip() for (_, before), (role, text) in pairwise(turns)
    ):
        yield "echo"
    if config.min_characters is not None and conversation.num_characters < config.min_characters:
        yield "short"
    if _is_above(conversation.num_characters, config.max_characters):
        yield "long"
    if config.max_bad_characters is not None:
        num_bad = sum(len(BAD_CHARACTERS.findall(text)) for _, text in turns)
        if num_bad > config.max_bad_characters * conversation.num_characters:
            yield "bad_characters"
    if any(_is_above(repeated_lines(answer), config.max_repeated_lines) for answer in answers):
        yield "repeated_lines"
    limit = config.max_repeated_words
    if limit is not None and any(repeats_words(answer, limit) for answer in answers):
        yield "repeated_words"


def _is_above(value: float, limit: float | None) -> bool:
    return limit is not None and value > limit


def repeats_words(text: str, limit: float) -> bool:
    """Whether more than this share, 0..1, of the text's runs of 8 words occurred earlier in it; False if it is short.

    A text with many repeated runs has few distinct words and pairs of words. These are cheaper to count, and rule out
    most texts.
    """
    pieces = PIECES.findall(text)
    if len(pieces) < FEW:
        return False
    num_runs = len(pieces) - RUN + 1
    for length in (1, 2, RUN):
        num_distinct = len(set(zip(*(pieces[start:] for start in range(length)), strict=False)))
        if 1 - (num_distinct - (RUN - length)) / num_runs <= limit:  # an upper bound; at length RUN the share itself
            return False
    return True


def repeated_lines(text: str) -> float:
    """The share, 0..1, of characters in lines that occurred earlier in the text; 0 for a short text. Blanks at the ends
    of lines, and blank lines, are ignored."""
    lines = [line.strip() for line in text.splitlines()]
    total = sum(map(len, lines))
    return 0.0 if total < FEW else 1 - sum(map(len, set(lines))) / total
