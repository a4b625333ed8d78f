"""What a conversation can be dropped for: pure functions of it, each under the name that the counts give."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..configs.errors import BadInput
from .row_shapes import Conversation

BAD_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")  # control, and what stands for no character
PIECES = re.compile(r"\w{1,8}|[^\w\s]")  # words; a script without spaces, or `aaaaaa...`, in pieces
RUN = 8  # pieces
FEW = 64  # pieces, or lines' characters: below, an answer repeats itself by chance


@dataclass(kw_only=True)
class FilterConfig:
    """Which conversations are dropped; null switches a limit off.

    require_user, require_answer: no user turn; no assistant turn at all (false for prompts to be regenerated). A plain
    text needs neither. drop_empty: an assistant turn without text. drop_truncated: the last answer is cut off.
    drop_echo: an answer equal to the turn before it.
    min_characters, max_characters, max_turns: of the whole conversation. min_tokens, max_tokens: by the tokenizer of
    the `tokenizer` key, without a chat template.
    max_repeated_words: the share, 0..1, of an answer's runs of 8 words that stood in it before: loops.
    max_repeated_lines: the share of its characters in lines that stood in it before.
    max_bad_characters: the share of control and replacement characters in the conversation.
    """

    require_user: bool = True
    require_answer: bool = True
    drop_empty: bool = True
    drop_truncated: bool = True
    drop_echo: bool = True
    min_characters: int | None = 1
    max_characters: int | None = None
    max_turns: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_repeated_words: float | None = 0.8
    max_repeated_lines: float | None = 0.8
    max_bad_characters: float | None = 0.01

    def __post_init__(self) -> None:
        for name in ("max_repeated_words", "max_repeated_lines", "max_bad_characters"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise BadInput(f"{name} {share}: expected a share, 0 to 1")
        for what in ("characters", "tokens"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low is not None and high is not None and low > high:
                raise BadInput(f"min_{what} {low} is above max_{what} {high}")

    @property
    def counts_tokens(self) -> bool:
        return self.min_tokens is not None or self.max_tokens is not None


def reason_to_drop(
    conversation: Conversation, config: FilterConfig, *, count_tokens: Callable[[str], int] | None = None
) -> str | None:
    """The name of the first filter, in the order of FILTERS, that the conversation does not pass; None: it is kept.

    count_tokens: of a text; needed where the config limits tokens.
    """
    for reason, drops in FILTERS.items():
        if drops(conversation, config):
            return reason
    if config.counts_tokens:
        assert count_tokens is not None
        num_tokens = count_tokens("\n".join(text for _, text in conversation.turns))
        return _outside(num_tokens, config.min_tokens, config.max_tokens, names=("few_tokens", "many_tokens"))
    return None


def _no_user_turn(conversation: Conversation, config: FilterConfig) -> bool:
    return config.require_user and all(role not in ("user", "text") for role, _ in conversation.turns)


def _no_answer(conversation: Conversation, config: FilterConfig) -> bool:
    return config.require_answer and all(role not in ("assistant", "text") for role, _ in conversation.turns)


def _empty_answer(conversation: Conversation, config: FilterConfig) -> bool:
    return config.drop_empty and any(not answer.strip() for answer in conversation.answers)


def _truncated(conversation: Conversation, config: FilterConfig) -> bool:
    return config.drop_truncated and conversation.truncated


def _echo(conversation: Conversation, config: FilterConfig) -> bool:
    turns = conversation.turns
    return config.drop_echo and any(
        role == "assistant" and text.strip() == before.strip()
        for (_, before), (role, text) in zip(turns, turns[1:], strict=False)
    )


def _short(conversation: Conversation, config: FilterConfig) -> bool:
    return config.min_characters is not None and conversation.num_characters < config.min_characters


def _long(conversation: Conversation, config: FilterConfig) -> bool:
    return config.max_characters is not None and conversation.num_characters > config.max_characters


def _many_turns(conversation: Conversation, config: FilterConfig) -> bool:
    return config.max_turns is not None and len(conversation.turns) > config.max_turns


def _bad_characters(conversation: Conversation, config: FilterConfig) -> bool:
    if config.max_bad_characters is None:
        return False
    num_bad = sum(len(BAD_CHARACTERS.findall(text)) for _, text in conversation.turns)
    return num_bad > config.max_bad_characters * conversation.num_characters


def _repeated_words(conversation: Conversation, config: FilterConfig) -> bool:
    limit = config.max_repeated_words
    return limit is not None and any(repeats_words(answer, limit) for answer in conversation.answers)


def _repeated_lines(conversation: Conversation, config: FilterConfig) -> bool:
    limit = config.max_repeated_lines
    return limit is not None and any(repeated_lines(answer) > limit for answer in conversation.answers)


FILTERS: dict[str, Callable[[Conversation, FilterConfig], bool]] = {  # the cheap ones first
    "no_user_turn": _no_user_turn,
    "no_answer": _no_answer,
    "empty_answer": _empty_answer,
    "truncated": _truncated,
    "echo": _echo,
    "short": _short,
    "long": _long,
    "many_turns": _many_turns,
    "bad_characters": _bad_characters,
    "repeated_lines": _repeated_lines,
    "repeated_words": _repeated_words,
}


def repeats_words(text: str, limit: float) -> bool:
    """Whether more than this share, 0..1, of the text's runs of 8 words stood in it before; never for a short text.

    A word begins a run of its own unless it is among the last seven, and so does a pair: few distinct words or pairs
    are needed for many repeated runs, and most texts are cleared by these, which are cheaper to count.
    """
    pieces = PIECES.findall(text)
    if len(pieces) < FEW:
        return False
    num_runs = len(pieces) - RUN + 1
    for length in (1, 2, RUN):
        num_distinct = len(set(zip(*(pieces[start:] for start in range(length)), strict=False)))
        if 1 - (num_distinct - (RUN - length)) / num_runs <= limit:  # at length RUN, the share itself
            return False
    return True


def repeated_lines(text: str) -> float:
    """The share, 0..1, of characters in lines that stood in the text before, blank lines apart; 0 for a short text."""
    lines = [line.strip() for line in text.splitlines()]
    total = sum(map(len, lines))
    return 0.0 if total < FEW else 1 - sum(map(len, set(lines))) / total


def _outside(count: int, low: int | None, high: int | None, *, names: tuple[str, str]) -> str | None:
    if low is not None and count < low:
        return names[0]
    return names[1] if high is not None and count > high else None
