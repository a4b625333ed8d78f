"""Answers that the target gave before, as drafters look them up: the rows that `headstart data regenerate` writes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ...configs.errors import BadInput, first_line
from ...configs.jsonl import naming_faults
from ..suites.prompts import file_rows, prompt_ids
from .suffix import SuffixTrie

MAX_DEPTH = 5  # tokens of context that are told apart; 16 were no better on two domains, with four times the nodes
MAX_NODES = 2**22  # two or three per token; about 150 bytes each
LEAD_IN = 8  # of a prompt's last tokens, which an answer's first ones follow


@dataclass
class Answers:
    """Prompts and what the target answered, token ids each; those of prompts that are left out are not looked up."""

    rows: list[tuple[list[int], list[int]]]
    left_out: set[tuple[int, ...]] = field(default_factory=set)

    def leave_out(self, prompts: Sequence[Sequence[int]]) -> None:
        """Look up no answers to these prompts from now on."""
        more = {tuple(prompt) for prompt in prompts} - self.left_out
        if any(tuple(prompt) in more for prompt, _ in self.rows):
            self.__dict__.pop("trie", None)
        self.left_out |= more

    @cached_property
    def trie(self) -> SuffixTrie:
        """Of all answers that are not left out."""
        trie = SuffixTrie(max_depth=MAX_DEPTH, max_nodes=MAX_NODES)
        for prompt, answer in self.rows:
            if tuple(prompt) not in self.left_out:
                contexts = [0]
                for token in (*prompt[-LEAD_IN:], *answer):
                    contexts = trie.add(contexts, token)
        return trie

    @cached_property
    def digest(self) -> str:
        """Which answers these are."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:16]


def load_answers(path: str | Path, tokenizer: Any) -> Answers:
    """Answers of a JSON Lines file with `messages` that end with the assistant's, `prompt` and `response`, or
    `input_ids` and `prompt_length`, as a target's tokenizer and its chat template read them.

    Raises: BadInput naming the file's line.
    """
    rows = []
    for origin, row in file_rows(path):
        with naming_faults(row, origin):
            rows.append(answered(row, tokenizer, origin=origin))
    return Answers(rows)


def answered(row: dict[str, Any], tokenizer: Any, *, origin: str) -> tuple[list[int], list[int]]:
    """Token ids of a row's prompt and of its answer. Raises BadInput naming the origin."""
    if "input_ids" not in row and not ("messages" in row or {"prompt", "response"} <= row.keys()):
        raise BadInput(f"{origin}: an answer needs `messages` or `prompt` and `response`, found {sorted(row)}")
    prompt = prompt_ids(row, tokenizer, origin=origin)
    if "input_ids" in row:
        return prompt, row["input_ids"][len(prompt) :]
    if "messages" not in row:
        return prompt, token_ids(row["response"], tokenizer, origin=origin)
    last = row["messages"][-1]
    if last["role"] != "assistant":
        raise BadInput(f"{origin}: the last of `messages` should be the assistant's, got the {last['role']}'s")
    try:
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    except (TemplateError, TypeError, ValueError) as error:
        raise BadInput(f"{origin}: the chat template refuses the messages: {first_line(error)}") from error
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    return prompt, token_ids(last.get("content"), tokenizer, origin=origin)  # the template rewrites earlier turns


def token_ids(text: Any, tokenizer: Any, *, origin: str) -> list[int]:
    """Of an answer's text, and the token that ends it."""
    if not isinstance(text, str):
        raise BadInput(f"{origin}: the answer should be text, got {json.dumps(text)[:60]}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer(text, add_special_tokens=False).input_ids, *end]
