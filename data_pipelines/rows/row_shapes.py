"""Converts rows of all supported shapes to one form, with the turns as text for filters and hashes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from ...base.errors import BadInput
from ...targets.chat.messages import plain_text, text_in
from ...targets.chat.rows import VARIABLES, answer_in, chat_of, instruction_in, is_chat, known_keys
from ...targets.chat.written_ids import KEY, WROTE
from ...targets.images.pictures import sources_in
from .sources import Row

SHAPES = (
    "`messages` (role, content), `conversations` (from, value), `prompt` + `response` or `completion`, "
    "`instruction` + `output` or `response`, `question` + `answer`, `text`; a source's `columns` renames other keys"
)


@dataclass(frozen=True)
class Conversation:
    """A row in one form."""

    # to be written: `messages` (with `tools`, variables, `written_ids` and `written_answers`), `prompt`, or `text`
    data: dict[str, Any]
    turns: list[tuple[str, str]]  # (role, text with reasoning and tool calls); the role of a plain text is `text`
    truncated: bool  # see `is_cut`

    @property
    def answers(self) -> Iterator[str]:
        """The texts that a head learns to draft."""
        return (text for role, text in self.turns if role in ("assistant", "text"))

    @cached_property
    def num_characters(self) -> int:
        return sum(len(text) for _, text in self.turns)

    @property
    def question(self) -> list[tuple[str, str]]:
        """The first user turn, by which rows are split; for a plain text the text itself. Where nobody asks, the first
        answer."""
        asked = [turn for turn in self.turns if turn[0] in ("user", "text")]
        return (asked or [turn for turn in self.turns if turn[0] == "assistant"])[:1]

    @property
    def tools(self) -> str:
        """The tools that the assistant may call, and the variables of the template, as JSON; empty without any."""
        told = [self.data[key] for key in ("tools", VARIABLES) if key in self.data]
        return "".join(json.dumps(part, default=str) for part in told)

    def id(self, own: object) -> str:
        """32 hex digits, equal only for equal turns, tools, and ids of the rows' own."""
        return turns_digest([*self.turns, ("tools", self.tools), ("more", str(own))], exact=True).hex()


def turns_digest(turns: list[tuple[str, str]], *, exact: bool = False) -> bytes:
    """16 bytes of BLAKE2b over the turns. Not exact: ignoring case and white space."""
    hashed = blake2b(digest_size=16)
    for role, text in turns:
        text = text if exact else plain_text(text)
        hashed.update(f"{role}\x1f{text}\x1e".encode("utf-8", "surrogatepass"))
    return hashed.digest()


def conversation_of(row: Row) -> Conversation:
    """Convert a row of one of SHAPES. Keys with the value None count as missing.

    `prompt` and `response` may be lists of turns. A text under `system` becomes the first turn. A prompt with its
    response, or an instruction with its output, becomes a user and an assistant turn.

    Raises: BadInput, naming the row's origin, if it has another shape, an unknown role, or content that is not text.
    """
    data = known_keys(row.data)
    answer = answer_in(data)
    if is_chat(data):
        shaped = _shaped_chat(data, row.origin)
    elif "prompt" in data and (answer is not None or "text" not in data):
        shaped = _prompted(data, data["prompt"], answer, row.origin)
    elif "instruction" in data and answer is not None:
        shaped = _prompted(data, instruction_in(data, row.origin).strip(), answer, row.origin)
    elif "text" in data:
        shaped = {"text": data["text"]}
    else:
        known = f"{SHAPES}, or `prompt` alone"
        raise BadInput(f"{row.origin}: unknown row shape with keys {', '.join(data) or '(none)'}; known are {known}")
    return Conversation(shaped, list(_turn_texts(shaped, row.origin)), is_cut(data))


def is_cut(data: Mapping[str, Any]) -> bool:
    """Whether a row's last answer was cut, and so has no end to learn."""
    return bool(data.get("truncated")) or data.get("finish_reason") == "length"


def _shaped_chat(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """A chat with its tools and the variables of its template, as rows are written."""
    chat = chat_of(data, origin)
    if not chat.is_answered:
        raise BadInput(f"{origin}: `turns` are questions without answers; `headstart data regenerate` takes them")
    more: dict[str, Any] = {"tools": chat.tools, VARIABLES: dict(chat.variables), WROTE: data.get(WROTE)}
    if not data.get("system"):  # else the target may have read another prompt
        more[KEY] = data.get(KEY)
    return {"messages": chat.messages, **{key: value for key, value in more.items() if value}}


def _prompted(data: Mapping[str, Any], prompt: Any, answer: Any, origin: str) -> dict[str, Any]:
    if answer is None:
        return {"prompt": prompt}
    return _shaped_chat({**data, "prompt": [{"role": "user", "content": prompt}], "response": answer}, origin)


def _turn_texts(data: Mapping[str, Any], origin: str) -> Iterator[tuple[str, str]]:
    for message in data.get("messages", ()):
        parts = [message.get("reasoning_content"), text_in(message["content"])]
        parts += [f"picture {blake2b(one.encode(), digest_size=8).hexdigest()}" for one in sources_in([message])]
        calls = message.get("tool_calls")
        parts.append(json.dumps(calls, ensure_ascii=False, default=str) if calls else None)
        yield message["role"], "\n".join(part for part in parts if part)
    for key, role in (("prompt", "user"), ("text", "text")):
        if key in data:
            if not isinstance(data[key], str):
                raise BadInput(f"{origin}: `{key}` should be text, got {type(data[key]).__name__}")
            yield role, data[key]
