"""Converts rows of all supported shapes to one form, with the turns as text for filters and hashes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from ..configs.errors import BadInput
from ..configs.jsonl import loads
from ..heads.targets.written_ids import KEY
from .masks.messages import normalise
from .sources import Row

SHAPES = (
    "`messages` (role, content), `conversations` (from, value), `prompt` + `response` or `completion`, "
    "`instruction` + `output` or `response`, `question` + `answer`, `text`; a source's `columns` renames other keys"
)


@dataclass(frozen=True)
class Conversation:
    """A row in one form."""

    data: dict[str, Any]  # to be written: `messages` (with `tools`), `prompt` + `response`, `prompt`, or `text`
    turns: list[tuple[str, str]]  # (role, text with reasoning and tool calls); the role of a plain text is `text`
    truncated: bool  # whether the last answer was cut: the row has `truncated` or `finish_reason: length`

    @property
    def answers(self) -> Iterator[str]:
        """The texts that a head learns to draft."""
        return (text for role, text in self.turns if role in ("assistant", "text"))

    @cached_property
    def num_characters(self) -> int:
        return sum(len(text) for _, text in self.turns)

    @property
    def prompt(self) -> list[tuple[str, str]]:
        """The turns before the first answer; for a plain text the text itself."""
        answers = (index for index, (role, _) in enumerate(self.turns) if role == "assistant")
        return self.turns[: next(answers, None)]

    @property
    def question(self) -> list[tuple[str, str]]:
        """The first user turn; for a plain text the text itself."""
        return [turn for turn in self.turns if turn[0] in ("user", "text")][:1]

    @property
    def tools(self) -> str:
        """The tools that the assistant may call, as JSON; empty if there are none."""
        return json.dumps(self.data["tools"], default=str) if "tools" in self.data else ""

    def id(self, *more: object) -> str:
        """32 hex digits, equal only for equal turns, tools, and `more`."""
        return digest([*self.turns, ("tools", self.tools), *(("more", str(one)) for one in more)], exact=True).hex()


def digest(turns: list[tuple[str, str]], *, exact: bool = False) -> bytes:
    """16 bytes of BLAKE2b over the turns. Not exact: ignoring case and white space."""
    hashed = blake2b(digest_size=16)
    for role, text in turns:
        text = text if exact else " ".join(text.split()).casefold()
        hashed.update(f"{role}\x1f{text}\x1e".encode("utf-8", "surrogatepass"))
    return hashed.digest()


def conversation_of(row: Row, *, as_messages: bool = True) -> Conversation:
    """Convert a row of one of SHAPES. Keys with the value None count as missing.

    `prompt` and `response` may be lists of turns. A text under `system` becomes the first turn.

    Args: as_messages: convert a prompt with its response, or an instruction with its output, to a user and an assistant
        turn; False: to `prompt` and `response`, which training reads as plain text.
    Raises: BadInput, naming the row's origin, if it has another shape, an unknown role, or content that is not text.
    """
    data = known_keys(row.data)
    answer = answer_in(data)
    if "messages" in data or "conversations" in data:
        kept = _messages(data.get("messages", data.get("conversations")), data, row.origin)
    elif "prompt" in data and (answer is not None or "text" not in data):
        kept = _prompted(data["prompt"], answer, data, row.origin, as_messages=as_messages)
    elif "instruction" in data and answer is not None:
        prompt = instruction_in(data, row.origin)
        prompt = prompt.strip() if as_messages else prompt
        kept = _prompted(prompt, answer, data, row.origin, as_messages=as_messages)
    elif "text" in data:
        kept = {"text": data["text"]}
    else:
        known = f"{SHAPES}, or `prompt` alone"
        raise BadInput(f"{row.origin}: unknown row shape with keys {', '.join(data) or '(none)'}; known are {known}")
    truncated = data.get("truncated") is True or data.get("finish_reason") == "length"
    return Conversation(kept, list(_turns(kept, row.origin)), truncated)


def known_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """A row without keys that are None; without another shape, `question` and `answer` become prompt and response."""
    data = {key: value for key, value in data.items() if value is not None}
    others = ("messages", "conversations", "prompt", "instruction", "text", "input_ids")
    if {"question", "answer"} <= data.keys() and not any(key in data for key in others):
        data |= {"prompt": data.pop("question"), "response": data.pop("answer")}
    return data


def answer_in(data: Mapping[str, Any]) -> Any:
    """The answer to a prompt or an instruction, under any of the known keys; None if there is none."""
    return next((data[key] for key in ("response", "completion", "output") if key in data), None)


def instruction_in(data: Mapping[str, Any], origin: str) -> str:
    """An instruction and its input, each followed by a blank line. Raises BadInput if they are not text."""
    parts = [data["instruction"], data.get("input", "")]
    if not all(isinstance(part, str) for part in parts):
        raise BadInput(f"{origin}: `instruction` and `input` should be text")
    return "".join(f"{part}\n\n" for part in parts if part)


def _messages(turns: Any, data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    messages = normalise(turns, origin)
    ids = {KEY: data[KEY]} if KEY in data else {}
    system = data.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        ids = {}  # the target read another prompt
    tools = data.get("tools")
    try:
        tools = loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        raise BadInput(f"{origin}: `tools` is text, but not JSON: {error}") from error
    return {"messages": messages, **({"tools": tools} if tools else {}), **ids}


def _prompted(prompt: Any, answer: Any, data: Mapping[str, Any], origin: str, *, as_messages: bool) -> dict[str, Any]:
    if answer is None and not isinstance(prompt, list):
        return {"prompt": prompt}
    if not as_messages and not isinstance(prompt, list):
        return {"prompt": prompt, "response": answer}
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if answer is not None:
        turns = turns + (answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])
    return _messages(turns, data, origin)


def _turns(data: Mapping[str, Any], origin: str) -> Iterator[tuple[str, str]]:
    for message in data.get("messages", ()):
        parts = [message.get("reasoning_content"), message["content"]]
        calls = message.get("tool_calls")
        parts.append(json.dumps(calls, ensure_ascii=False, default=str) if calls else None)
        yield message["role"], "\n".join(part for part in parts if part)
    for key, role in (("prompt", "user"), ("response", "assistant"), ("text", "text")):
        if key in data:
            if not isinstance(data[key], str):
                raise BadInput(f"{origin}: `{key}` should be text, got {type(data[key]).__name__}")
            yield role, data[key]
