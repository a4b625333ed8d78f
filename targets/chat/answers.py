"""How the tokens that a target wrote become the assistant's message."""

from collections.abc import Collection, Sequence
from typing import Any

from .messages import Message


def answer_text(tokens: Sequence[int], tokenizer: Any, ends: Collection[int]) -> str:
    """All that the target wrote, special tokens too; only the end token, if it is the last one, is left out."""
    text = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    return tokenizer.decode(list(text), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def answer_message(text: str, markers: tuple[str, str] | None) -> Message:
    """The message of an answer. A reasoning trace that the prompt opened, and the answer closes, stands apart; one that
    the answer opens itself stays in its text.

    Args: markers: the texts that open and close a trace; None: the prompt opened none.
    """
    if markers is None or markers[1] not in text or markers[0] in text:
        return {"role": "assistant", "content": text}
    trace, _, content = text.partition(markers[1])
    return {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": trace.strip("\n")}
