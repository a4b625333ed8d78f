"""Chats joined to longer ones: rows as long as the contexts in which a head is to draft, from short conversations.

A head that is trained on short rows alone accepts less and less in long contexts (docs/data.md, "Long contexts").
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log
from random import Random
from typing import Any

from ...targets.chat.reasoning import CHANNEL, MARKERS
from ...targets.chat.rows import VARIABLES
from ...targets.chat.written_ids import KEY
from .row_shapes import turns_digest

SHORTEST = 256  # tokens; of a joined chat's length before it is drawn
JOINABLE = {"id", "source", "source_id", "messages", KEY, VARIABLES}  # keys of a row that needs no tools of its own
SYSTEM = ("system", "developer")  # roles
SIGNS_OF_TRACE = (CHANNEL[0], *(closing for _, closing in MARKERS))  # a prompt may have the opening one
MOST_OPEN = 1000  # chats of different system prompts that are joined at a time


@dataclass
class JoinedChat:
    """A chat that grows. longest: tokens; the row that would make it longer begins the next one."""

    longest: float
    rows: list[dict[str, Any]] = field(default_factory=list)  # as `headstart data prepare` writes them
    num_tokens: int = 0

    def line(self) -> bytes:
        """The row to write; as it was read if it is one alone."""
        first, *others = self.rows
        if others:
            later = [turn for row in others for turn in row["messages"] if turn["role"] not in SYSTEM]
            ids = turns_digest([("id", row["id"]) for row in self.rows], exact=True)
            variables = {VARIABLES: first[VARIABLES]} if VARIABLES in first else {}
            messages = first["messages"] + later
            first = {"id": ids.hex(), "source": first["source"], "messages": messages, **variables}
        return (json.dumps(first, ensure_ascii=False) + "\n").encode()


def is_joinable(turns: list[dict[str, Any]]) -> bool:
    """Whether a chat's turns can follow another's: it ends with an answer, its system prompts are at its start.

    One with a reasoning trace cannot: templates leave out the traces of earlier turns.
    """
    is_system = [turn["role"] in SYSTEM for turn in turns]
    has_trace = any(map(has_reasoning, turns))
    return turns[-1]["role"] == "assistant" and not any(is_system[sum(is_system) :]) and not has_trace


def has_reasoning(turn: dict[str, Any]) -> bool:
    """Whether a turn has a reasoning trace, beside its content or in it."""
    is_answer, text = turn["role"] == "assistant", turn["content"] or ""
    return is_answer and bool(turn.get("reasoning_content") or any(sign in text for sign in SIGNS_OF_TRACE))


class ChatJoiner:
    """Joins chats that have the same system prompt and variables, in their order, and leaves other rows as they are.

    The lengths are drawn log-uniformly between SHORTEST and `longest` tokens, so that contexts of all lengths occur
    about as often per octave: rows of the longest length alone would teach few heads of short contexts.
    """

    def __init__(self, longest: int, *, seed: int):
        self.longest, self.random = longest, Random(seed)
        self.open: dict[str, JoinedChat] = {}  # by system prompt and variables

    def add(self, line: bytes, num_tokens: int) -> Iterator[bytes]:
        """Add a row, and yield the rows that it completes. num_tokens: of the row as the chat template renders it."""
        row = json.loads(line)
        if not JOINABLE >= row.keys() >= {"messages"} or not is_joinable(row["messages"]):
            yield line
            return
        system = [turn for turn in row["messages"] if turn["role"] in SYSTEM]
        shared = json.dumps([system, row.get(VARIABLES)], sort_keys=True)
        chat = self.open.get(shared)
        if chat is not None and chat.num_tokens + num_tokens > chat.longest:
            yield self.open.pop(shared).line()
            chat = None
        if chat is None:
            chat = self.open[shared] = JoinedChat(exp(self.random.uniform(log(SHORTEST), log(self.longest))))
        chat.rows.append(row)
        chat.num_tokens += num_tokens
        if len(self.open) > MOST_OPEN:
            yield self.open.pop(next(iter(self.open))).line()

    def rest(self) -> Iterator[bytes]:
        """The rows that are not complete yet."""
        for chat in self.open.values():
            yield chat.line()
        self.open = {}
