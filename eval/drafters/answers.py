"""Earlier answers of the target, which drafters look up: the rows that `headstart data regenerate` writes."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import naming_faults
from ...targets.chat.messages import normalise
from ...targets.chat.prompts import ChatTemplate, chat_prompt_ids, prompt_ids, rendered
from ...targets.chat.rows import ChatRow, chat_of, is_chat
from ...targets.chat.written_ids import KEY, tokenizer_fingerprint, written_sequences
from ..suites.prompts import file_rows, last_question, question_of
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


Asked = tuple[list[int], list[int], str | None]  # a prompt, the answer to it, the question


def load_answers(path: str | Path, tokenizer: Any, *, vocab_size: int | None = None) -> Answers:
    """Read answers from a JSON Lines file and tokenise them as the target's prompts are. A row has `messages` that end
    with the assistant's, or `prompt` and `response`, or `input_ids` and `prompt_length`. The ids of `written_ids` are
    taken where they are of this tokenizer. Of `messages` every turn of the assistant is an answer, calls of tools too.

    Args: vocab_size: of the target's table, which those must lie in; None: it is not checked.
    Raises: BadInput naming the file's line.
    """
    asked = list[Asked]()
    fingerprint = tokenizer_fingerprint(tokenizer)
    for origin, row in file_rows(path):
        with naming_faults(row, origin):
            asked += answered(row, tokenizer, origin=origin, fingerprint=fingerprint, vocab_size=vocab_size)
    return Answers([(prompt, answer) for prompt, answer, _ in asked], [question for *_, question in asked])


def answered(
    row: dict[str, Any], tokenizer: Any, *, origin: str, fingerprint: str, vocab_size: int | None
) -> list[Asked]:
    """A row's answers, with their prompts. Raises BadInput naming the origin.

    Args: fingerprint: of the tokenizer. vocab_size: as of `load_answers`.
    """
    if "input_ids" not in row and not (is_chat(row) or {"prompt", "response"} <= row.keys()):
        raise BadInput(f"{origin}: an answer needs `messages` or `prompt` and `response`, found {sorted(row)}")
    if KEY in row and "messages" in row:
        messages = normalise(row["messages"], origin)
        sequences = written_sequences(
            row, messages, tokenizer, origin=origin, fingerprint=fingerprint, vocab_size=vocab_size
        )
        if sequences:
            places = [index for one in row[KEY]["sequences"] for index, *_ in one["turns"]]
            spans = [(one.input_ids, span) for one in sequences for span in one.spans]
            return [
                (ids[:start], ids[start:end], last_question(messages[:index]))
                for index, (ids, (start, end)) in zip(places, spans, strict=True)
            ]
    if is_chat(row):
        return list(answered_turns(chat_of(row, origin), tokenizer, origin))
    prompt, question = prompt_ids(row, tokenizer, origin=origin), question_of(row)
    if "input_ids" in row:
        return [(prompt, row["input_ids"][len(prompt) :], question)]
    return [(prompt, token_ids(row["response"], tokenizer, origin=origin), question)]


def answered_turns(chat: ChatRow, tokenizer: Any, origin: str) -> Iterator[Asked]:
    """The turns of the assistant that somebody asked or a tool's result led to. Raises BadInput."""
    roles = [message["role"] if chat.is_answered else "user" for message in chat.messages]
    if roles[-1] != "assistant":
        raise BadInput(f"{origin}: the last of `messages` should be the assistant's, got the {roles[-1]}'s")
    for end in range(1, len(roles) + 1):
        is_last = end == len(roles)
        if roles[end - 1] != "assistant" or (not is_last and roles[end] == "assistant"):
            continue
        if not (is_last or {"user", "tool"} & set(roles[:end])):
            continue
        turn = replace(chat, messages=chat.messages[:end])
        prompt = chat_prompt_ids(turn, tokenizer, origin=origin)
        whole = ChatTemplate(tokenizer).ids(rendered(turn, tokenizer, origin=origin))
        is_kept = whole[: len(prompt)] == prompt  # else the template rewrites earlier turns
        said = whole[len(prompt) :] if is_kept else token_ids(turn.messages[-1]["content"], tokenizer, origin=origin)
        yield prompt, said, last_question(turn.question)


def token_ids(text: Any, tokenizer: Any, *, origin: str) -> list[int]:
    """Token ids of an answer's text, followed by the end token. Raises BadInput if it is not text."""
    if not isinstance(text, str):
        raise BadInput(f"{origin}: the answer should be text, got {json.dumps(text)[:60]}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer(text, add_special_tokens=False).input_ids, *end]
