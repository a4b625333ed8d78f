"""Earlier answers of the target, which drafters look up: the rows that `headstart data regenerate` writes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.errors import BadInput, first_line
from ...base.jsonl import naming_faults
from ...targets.chat.prompts import RENDER_ERRORS, ChatTemplate, prompt_ids
from ...targets.chat.rows import UnusableRow, chat_of, is_chat
from ...targets.chat.written_ids import KEY, tokenizer_fingerprint, written_sequences
from ..suites.prompts import file_rows, question_of
from .suffix import SuffixTrie

MAX_DEPTH = 5  # tokens of context; 16 were no better on two domains, with four times the nodes
MAX_NODES = 2**22  # two or three per token; about 150 bytes each
LEAD_IN = 8  # last tokens of the prompt, as context for the answer's first ones


@dataclass
class Answers:
    """Prompts with the target's answers, as token ids; rows that are left out are not looked up.

    questions: `question_of` each row. left_out: prompts as token ids, and questions.
    """

    rows: list[tuple[list[int], list[int]]]
    questions: list[str | None] = field(default_factory=list)
    left_out: set[tuple[int, ...] | str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.questions) != len(self.rows):
            self.questions = [None] * len(self.rows)

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        """From now on do not look up answers to these prompts, or to these questions in any prompt."""
        num_before = len(self.looked_up)
        self.left_out |= {*map(tuple, prompts), *questions}
        if len(self.looked_up) < num_before and "trie" in vars(self):
            del self.trie  # the next use makes it anew

    @property
    def looked_up(self) -> list[tuple[list[int], list[int]]]:
        """The rows that are not left out."""
        return [
            (prompt, answer)
            for (prompt, answer), question in zip(self.rows, self.questions, strict=True)
            if tuple(prompt) not in self.left_out and question not in self.left_out
        ]

    @cached_property
    def trie(self) -> SuffixTrie:
        """The trie of all answers that are not left out."""
        trie = SuffixTrie(max_depth=MAX_DEPTH, max_nodes=MAX_NODES)
        for prompt, answer in self.looked_up:
            node = 0
            for token in (*prompt[-LEAD_IN:], *answer):
                node = trie.add(node, token)
        return trie

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify these answers."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()[:16]


def load_answers(path: str | Path, tokenizer: Any, *, vocab_size: int | None = None) -> Answers:
    """Read answers from a JSON Lines file and tokenise them as the target's prompts are. A row has `messages` that end
    with the assistant's, or `prompt` and `response`, or `input_ids` and `prompt_length`. The ids of `written_ids` are
    taken where they are of this tokenizer.

    Args: vocab_size: of the target's table, which those must lie in; None: it is not checked.
    Raises: BadInput naming the file's line.
    """
    rows, questions = [], []
    fingerprint = tokenizer_fingerprint(tokenizer)
    for origin, row in file_rows(path):
        with naming_faults(row, origin):
            rows.append(answered(row, tokenizer, origin=origin, fingerprint=fingerprint, vocab_size=vocab_size))
            questions.append(question_of(row))
    return Answers(rows, questions)


def answered(
    row: dict[str, Any], tokenizer: Any, *, origin: str, fingerprint: str, vocab_size: int | None
) -> tuple[list[int], list[int]]:
    """Token ids of a row's prompt and of its answer. Raises BadInput naming the origin.

    Args: fingerprint: of the tokenizer. vocab_size: as of `load_answers`.
    """
    if "input_ids" not in row and not (is_chat(row) or {"prompt", "response"} <= row.keys()):
        raise BadInput(f"{origin}: an answer needs `messages` or `prompt` and `response`, found {sorted(row)}")
    if KEY in row and "messages" in row:
        sequences = written_sequences(
            row, row["messages"], tokenizer, origin=origin, fingerprint=fingerprint, vocab_size=vocab_size
        )
        if sequences:
            ids, (start, end) = sequences[-1].input_ids, sequences[-1].spans[-1]
            return ids[:start], ids[start:end]
    prompt = prompt_ids(row, tokenizer, origin=origin)
    if "input_ids" in row:
        return prompt, row["input_ids"][len(prompt) :]
    if not is_chat(row):
        return prompt, token_ids(row["response"], tokenizer, origin=origin)
    chat = chat_of(row, origin)
    last = chat.messages[-1]
    if last["role"] != "assistant" or not chat.is_answered:
        role = last["role"] if chat.is_answered else "user"
        raise BadInput(f"{origin}: the last of `messages` should be the assistant's, got the {role}'s")
    template = ChatTemplate(tokenizer, chat.tools, chat.variables)
    try:
        whole = template.render(template.placed(chat.messages, origin))
    except RENDER_ERRORS as error:
        raise UnusableRow(origin, f"the chat template refuses the messages: {first_line(error)}") from error
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    return prompt, token_ids(last["content"], tokenizer, origin=origin)  # the template rewrites earlier turns


def token_ids(text: Any, tokenizer: Any, *, origin: str) -> list[int]:
    """Token ids of an answer's text, followed by the end token. Raises BadInput if it is not text."""
    if not isinstance(text, str):
        raise BadInput(f"{origin}: the answer should be text, got {json.dumps(text)[:60]}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer(text, add_special_tokens=False).input_ids, *end]
