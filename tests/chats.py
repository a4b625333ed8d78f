"""Conversations in the form of OpenAI's messages."""

from typing import Any


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *chat] if system is not None else chat


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """A row of such messages. Args: more: its other keys."""
    return {"messages": turns(*contents), **more}
