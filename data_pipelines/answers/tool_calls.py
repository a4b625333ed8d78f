"""Finds the tool calls in a text that a target wrote, and proves them by its chat template: no format is built in."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import TemplateError

from ...targets.chat.messages import Message

ARGUMENTS = ("arguments", "parameters")


def with_tool_calls(text: str, render: Callable[[list[Message]], str]) -> Message | None:
    """The assistant's message with `tool_calls`, if the chat template writes just this text for it, but for blanks and
    the end of the turn; None if there are none or it writes another text, so that the text is all there is to keep.

    Args: render: the chat up to and including these messages of the assistant, as the template writes it.
    """
    values = list(json_calls(text))
    if not values:
        return None
    calls = [
        {"type": "function", "id": str(value.get("id") or f"call{i:05}"), "function": function_of(value)}
        for i, (_, value) in enumerate(values)
    ]
    first = values[0][0]
    try:
        prompt = render([])
        alone = render([{"role": "assistant", "content": "", "tool_calls": calls}])
        if not alone.startswith(prompt):
            return None
        before = next(
            (at for at, _ in json_calls(alone[len(prompt) :])), None
        )  # what the template writes before a call
        if before is None:
            return None
        opening = alone[len(prompt) : len(prompt) + before].strip()
        content = text[:first].rstrip().removesuffix(opening).strip()
        message: Message = {"role": "assistant", "content": content, "tool_calls": calls}
        whole = render([message])
    except (TemplateError, TypeError, ValueError, KeyError):
        return None
    wanted, given = squeezed(text), squeezed(whole[len(prompt) :])
    return message if whole.startswith(prompt) and given.startswith(wanted) else None


def json_calls(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects in a text that name a function and its arguments, with their first characters."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, at + 1
        if isinstance(value, dict) and isinstance(value.get("name"), str) and any(key in value for key in ARGUMENTS):
            yield at, value
        at = text.find("{", end)


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["name"], "arguments": next(call[key] for key in ARGUMENTS if key in call)}


def squeezed(text: str) -> str:
    return "".join(text.split())
