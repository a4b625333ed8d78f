"""Prompt sets: JSONL rows with `prompt`, `messages` or `turns`, as the target's tokenizer reads them."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ..configs.errors import BadInput, first_line
from ..configs.jsonl import iter_jsonl
from ..heads.reasoning import think_tokens
from ..heads.target import Target


@dataclass
class Suite:
    """name: the file's stem. prompts: token ids, ready to be continued. think_tokens: what opens and closes a reasoning
    trace, where the tokenizer has single tokens for it."""

    name: str
    prompts: list[list[int]]
    think_tokens: tuple[int, int] | None = None


def prompt_ids(row: dict[str, Any], tokenizer: Any, *, origin: str) -> list[int]:
    """Token ids of one prompt row.

    `input_ids` are taken as they are (up to `prompt_length` where the row has one). `prompt` is plain text, tokenised
    with the tokenizer's own special tokens. `messages` go through its chat template up to where the assistant answers;
    a trailing assistant message is left out. Of `turns` the first is asked, as a user message, or as plain text where
    the tokenizer has no chat template.

    Raises: BadInput naming the origin.
    """
    if "input_ids" in row:
        return ready_ids(row, origin=origin)
    if "messages" in row:
        messages = row["messages"]
    elif "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise BadInput(f"{origin}: `turns` should be a list of texts, got {json.dumps(turns)[:60]}")
        if not tokenizer.chat_template:
            return tokenizer(turns[0]).input_ids
        messages = [{"role": "user", "content": turns[0]}]
    elif "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise BadInput(f"{origin}: `prompt` should be text, got {json.dumps(row['prompt'])[:60]}")
        return tokenizer(row["prompt"]).input_ids
    else:
        raise BadInput(f"{origin}: a prompt row needs `prompt`, `messages` or `turns`, found {sorted(row)}")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise BadInput(f"{origin}: `messages` should be a list of objects, got {json.dumps(messages)[:60]}")
    if not tokenizer.chat_template:
        raise BadInput(f"{origin}: the target's tokenizer has no chat template; give plain `prompt` rows")
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadInput(f"{origin}: no message to answer")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    except (TemplateError, TypeError, ValueError) as error:
        raise BadInput(f"{origin}: the chat template refuses the messages: {first_line(error)}") from error


def ready_ids(row: dict[str, Any], *, origin: str) -> list[int]:
    """The token ids that a row brings, up to its `prompt_length`."""
    ids, length = row["input_ids"], row.get("prompt_length")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    if length is not None and (type(length) is not int or not 0 <= length <= len(ids)):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(ids)}, got {length!r}")
    return ids[:length]


def load_suite(path: str | Path, target: Target, *, max_new_tokens: int, limit: int | None = None) -> Suite:
    """Read a prompt file. Raises BadInput on malformed rows and on prompts that exceed the context."""
    prompts = []
    for line, row in islice(iter_jsonl(path), limit):
        origin = f"{path}:{line}"
        ids = prompt_ids(row, target.tokenizer, origin=origin)
        if not ids:
            raise BadInput(f"{origin}: empty prompt")
        wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
        if wrong is not None:
            raise BadInput(f"{origin}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
        if len(ids) + max_new_tokens > target.max_positions:
            raise BadInput(
                f"{origin}: {len(ids)} prompt tokens + {max_new_tokens} new ones exceed the context of "
                f"{target.max_positions}; lower --max-new-tokens or shorten the prompt"
            )
        prompts.append(ids)
    return Suite(Path(path).name.split(".")[0], prompts, think_tokens(target.tokenizer))
