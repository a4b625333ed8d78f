"""Prompt sets: JSONL rows with `prompt`, `messages` or `turns`, as the target's tokenizer reads them."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..configs.errors import BadInput
from ..configs.jsonl import iter_jsonl
from ..heads.target import Target


@dataclass
class Suite:
    """name: the file's stem. prompts: token ids, ready to be continued."""

    name: str
    prompts: list[list[int]]


def prompt_ids(row: dict[str, Any], tokenizer: Any, *, origin: str) -> list[int]:
    """Token ids of one prompt row.

    `input_ids` are taken as they are (up to `prompt_length` where the row has one). `prompt` is plain text, tokenised
    with the tokenizer's own special tokens. `messages` go through its chat template up to where the assistant answers;
    a trailing assistant message is left out. Of `turns` the first is asked, as a user message, or as plain text where
    the tokenizer has no chat template.

    Raises: BadInput naming the origin.
    """
    if "input_ids" in row:
        return list(row["input_ids"][: row.get("prompt_length")])
    if "messages" in row:
        messages = row["messages"]
    elif "turns" in row and row["turns"]:
        if not tokenizer.chat_template:
            return tokenizer(row["turns"][0]).input_ids
        messages = [{"role": "user", "content": row["turns"][0]}]
    elif "prompt" in row:
        return tokenizer(row["prompt"]).input_ids
    else:
        raise BadInput(f"{origin}: a prompt row needs `prompt`, `messages` or `turns`, found {sorted(row)}")
    if not tokenizer.chat_template:
        raise BadInput(f"{origin}: the target's tokenizer has no chat template; give plain `prompt` rows")
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadInput(f"{origin}: no message to answer")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def load_suite(path: str | Path, target: Target, *, max_new_tokens: int, limit: int | None = None) -> Suite:
    """Read a prompt file. Raises BadInput on malformed rows and on prompts that exceed the context."""
    prompts = []
    for line, row in islice(iter_jsonl(path), limit):
        origin = f"{path}:{line}"
        ids = prompt_ids(row, target.tokenizer, origin=origin)
        if not ids:
            raise BadInput(f"{origin}: empty prompt")
        if len(ids) + max_new_tokens > target.max_positions:
            raise BadInput(
                f"{origin}: {len(ids)} prompt tokens + {max_new_tokens} new ones exceed the context of "
                f"{target.max_positions}; lower --max-new-tokens or shorten the prompt"
            )
        prompts.append(ids)
    return Suite(Path(path).name.split(".")[0], prompts)
