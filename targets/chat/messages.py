"""Converts chat turns (OpenAI, ShareGPT, responses of OpenAI-compatible servers) to OpenAI messages."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import loads
from ..images.pictures import PART, as_part, as_url, is_picture

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
    "developer": "developer",
}
SHAREGPT_KEYS = {"from": "role", "value": "content"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # message keys for a trace outside the content


def normalise(turns: Any, origin: str, pictures: Iterable[Any] = ()) -> list[Message]:
    """Convert OpenAI or ShareGPT turns to OpenAI messages: known roles, tool-call arguments as objects, and as content
    a text, or where there are pictures a list of parts, as `pictures.as_part` has them.

    A reasoning trace under any of REASONING_KEYS is moved to `reasoning_content`.

    Args: origin: where the row was read, the prefix of error messages. pictures: of the row, see `images/pictures.py`.
    Raises: BadInput if there are no turns, a role is unknown, or content or reasoning is not text.
    """
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{origin}: a chat should be a list of turns with at least one")
    own = iter(pictures)
    return [_message(turn, f"{origin}: turn {index}", origin, own) for index, turn in enumerate(turns)]


def _message(turn: Any, where: str, origin: str, pictures: Iterator[Any]) -> Message:
    if not isinstance(turn, Mapping):
        raise BadInput(f"{where} should be an object, got {type(turn).__name__}")
    message: Message = {
        SHAREGPT_KEYS.get(str(key), str(key)): value for key, value in turn.items() if value is not None
    }
    role = str(message.get("role"))
    if role not in ROLES:
        raise BadInput(f"{where} has the role {role!r}; known are {', '.join(ROLES)}")
    message["role"] = ROLES[role]
    has_pictures = isinstance(message.get("content"), list) and any(map(is_picture, message["content"]))
    if has_pictures and message["role"] != "assistant":
        message["content"] = [
            as_part(part, pictures, origin) if is_picture(part) else {"type": "text", "text": _text_of(part, where)}
            for part in message["content"]
        ]
    elif isinstance(message.get("content"), list):
        message["content"] = "".join(_text_of(part, where) for part in message["content"])
    traces = [message.pop(key) for key in REASONING_KEYS if key in message]
    if not all(isinstance(trace, str) for trace in traces):
        raise BadInput(f"{where} has reasoning that is not text: {str(traces[0])[:60]}")
    if any(traces) and message["role"] == "assistant":
        message["reasoning_content"] = next(trace for trace in traces if trace)
    may_be_empty = "tool_calls" in message or "reasoning_content" in message
    message.setdefault("content", "" if may_be_empty else None)
    if not isinstance(message["content"], str) and not has_pictures:
        raise BadInput(f"{where} ({role}) has no text as its content")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_call_with_object(call) for call in message["tool_calls"]]
    return message


def place_reasoning(messages: list[Message], key: str | None, markers: tuple[str, str] | None) -> list[Message]:
    """The messages with each `reasoning_content` where the chat template expects reasoning.

    Args:
        key: the message key that the template reads; None: it reads none, so the trace is put between the markers at
            the start of the content, unless the content has a closing marker already.
        markers: texts that open and close a trace; None: unknown, so traces are left out if there is no key either.
    """
    placed = []
    for given in messages:
        message = dict(given)
        trace = message.pop("reasoning_content", None)
        placed.append(message)
        if trace is None:
            continue
        if key is not None:
            message[key] = trace
        elif markers is not None and markers[1] not in message["content"]:
            opens, closes = markers
            message["content"] = f"{opens}\n{trace.strip()}\n{closes}\n\n{message['content']}"
    return placed


def script_of(messages: list[Message], *, turns: str) -> list[Message | None]:
    """The messages with None in place of each turn that the target answers; one is added after a final question.

    Consecutive assistant turns are one answer. Assistant turns before the first question stay as they are, as do tool
    calls whose results are in the row, because a new call would need a new result.

    Args: turns: `all`: the target answers all assistant turns; `last`: only the last one; `recorded`: all of them, tool
    calls too, and each recorded one stays behind its None, so that the next is asked behind it.
    """
    groups = groupby(messages, key=lambda message: message["role"] == "assistant")
    runs = [(is_answer, list(run)) for is_answer, run in groups]
    if not runs[-1][0]:
        runs.append((True, []))
    script: list[Message | None] = []
    has_question = False
    for index, (is_answer, run) in enumerate(runs):
        has_question |= any(message["role"] in ("user", "tool") for message in run)
        is_last = index == len(runs) - 1
        has_result = is_answer and not is_last and runs[index + 1][1][0]["role"] == "tool"
        if turns == "recorded" and is_answer and has_question:
            script += [None, *run]
            continue
        is_asked = is_answer and has_question and not has_result and (is_last or turns == "all")
        script += [None] if is_asked else run
    return script


def text_in(content: Any) -> str:
    """The text of a normalised message's content, without its pictures."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if not is_picture(part))


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise BadInput(f"{where} has content that is not text: {str(part)[:60]}")


def _call_with_object(call: Any) -> Any:
    """The tool call with its arguments parsed: OpenAI's API gives them as JSON text, chat templates expect objects."""
    try:
        return {**call, "function": {**call["function"], "arguments": loads(call["function"]["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call  # already an object, or a form that the chat template may support


def for_api(message: Message) -> Message:
    """The message as OpenAI's API expects it: tool-call arguments as JSON text, pictures as data URLs.

    Raises: UnreadablePicture."""
    if isinstance(message.get("content"), list):
        content = [
            {"type": "image_url", "image_url": {"url": as_url(part[PART])}} if is_picture(part) else part
            for part in message["content"]
        ]
        message = {**message, "content": content}
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", {})
        arguments = function.get("arguments")
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": as_text}})
    return {**message, "tool_calls": calls}


def plain_text(text: str) -> str:
    """In lower case with single spaces: texts that are equal so are the same question."""
    return " ".join(text.split()).casefold()
