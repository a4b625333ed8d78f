"""The token ids that a target wrote, as a row carries them beside its text: their shape, and when they are used.

    "written_ids": {
      "sequences": [{"input_ids": [1, 4, ...], "turns": [[1, 17, 42], ...]}],
      "tokenizer": "91d1c2b43ff5e0a9"}

A sequence is what the target read and wrote: the ids of a prompt, of the answer to it, of what follows up to the next
answer, and so on. Each of its `turns` is an answer: its message's index in the row, its first token, and the end of its
tokens, an end token included. Mostly there is one sequence. A later turn begins another one if its prompt does not
begin with the tokens before it: where a template drops earlier traces, or tokenising an earlier answer's text gives
other ids than the target wrote. Each answer is thus in one sequence, behind the very prompt that it answers.

`tokenizer` is a fingerprint; it is missing if a server gave the ids. Tokenising the text is what is left if the ids are
of another tokenizer or template, or no longer say what the row's messages say.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...base.errors import BadInput
from .reasoning import short_hash, template_hash

KEY = "written_ids"
WROTE = "written_answers"  # the numbers, from 0, of the answers that the target wrote, in a row that has others too
NEW_KEYS = ("token_ids", "response_token_ids")  # of a choice in a response of vLLM, of SGLang


class AnswerIds(NamedTuple):
    """The ids of a prompt, of the answer to it, and the fingerprint of their tokenizer; None: it is not known."""

    prompt: list[int]
    new: list[int]
    tokenizer: str | None = None


@dataclass(frozen=True)
class Written:
    """A sequence. spans: [start, end) of each answer."""

    input_ids: list[int]
    spans: list[tuple[int, int]]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits, equal for tokenizers whose ids mean the same, special ones too, with equal chat templates."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    return short_hash(json.dumps([words, special, template_hash(tokenizer)]))


def joined(turns: Iterable[tuple[list[int], list[int]]]) -> list[Written]:
    """The sequences of a conversation: each answer stands behind the very ids of its prompt.

    Args: turns: the ids of each prompt and of the answer to it, in order. A prompt that does not begin with the
        sequence so far begins another one.
    """
    sequences: list[Written] = []
    for prompt, new in turns:
        before = sequences[-1].input_ids if sequences else None
        if before is None or prompt[: len(before)] != before:
            sequences.append(Written([], []))
        spans = [*sequences[-1].spans, (len(prompt), len(prompt) + len(new))]
        sequences[-1] = Written([*prompt, *new], spans)
    return sequences


def as_entry(answers: Iterable[tuple[int, AnswerIds | None]]) -> dict[str, Any]:
    """The entry of a row, under KEY, for the answers in the order of their turns; none if the ids of one are missing.

    Args: answers: with the index of each one's message.
    """
    given = list(answers)
    known = [ids for _, ids in given if ids is not None]
    if len(known) < len(given):
        return {}
    indexes = iter([index for index, _ in given])
    sequences = [
        {"input_ids": one.input_ids, "turns": [[next(indexes), start, end] for start, end in one.spans]}
        for one in joined((ids.prompt, ids.new) for ids in known)
    ]
    tokenizer = known[-1].tokenizer if known else None
    return {KEY: {"sequences": sequences, **({} if tokenizer is None else {"tokenizer": tokenizer})}}


def answers_written(messages: Sequence[Mapping[str, Any]], places: Iterable[int]) -> dict[str, list[int]]:
    """The entry of a row under WROTE, by which its text teaches what its ids do; none if the target wrote all answers.

    Args: places: of the messages that it wrote.
    """
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    numbers = [answers.index(place) for place in places]
    return {WROTE: numbers} if len(numbers) < len(answers) else {}


def ids_in_response(data: Mapping[str, Any]) -> AnswerIds | None:
    """The ids in a response of a server that was asked for them (`return_token_ids`); None if it gives none."""
    choice = next(iter(data.get("choices") or data.get("outputs") or [{}]))
    new = next((choice[key] for key in NEW_KEYS if choice.get(key)), None)
    prompt = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    is_whole = all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in (prompt, new))
    return AnswerIds(prompt, new) if is_whole and prompt and new else None


def written_sequences(
    row: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    fingerprint: str,
    vocab_size: int | None,
    origin: str,
) -> list[Written]:
    """The row's sequences; none if it has no ids, or their tokenizer, template or text is another one.

    Args: messages: the row's, normalised. fingerprint: of the tokenizer. vocab_size: of the target's table, None: not
        known.
    Raises: BadInput, naming the origin, if the entry has another shape, or this tokenizer's ids are outside the table.
    """
    entry = row.get(KEY)
    if entry is None:
        return []
    try:
        sequences = [(one["input_ids"], [tuple(turn) for turn in one["turns"]]) for one in entry["sequences"]]
        check_shape(sequences)
        theirs = entry.get("tokenizer")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{origin}: `{KEY}` has another shape than `headstart data regenerate` writes") from error
    if theirs not in (None, fingerprint) or not all(turns for _, turns in sequences):
        return []
    for ids, turns in sequences:
        for index, start, end in turns:
            if not (index < len(messages) and says(tokenizer, ids[start:end], messages[index])):
                return []
            if not asks(tokenizer, ids[:start], messages[:index]):
                return []
        is_outside = vocab_size is not None and max(ids) >= vocab_size
        if is_outside and theirs is None:
            return []
        if is_outside:
            raise BadInput(f"{origin}: `{KEY}` has the id {max(ids)}, outside the target's table of {vocab_size}")
    return [Written(ids, [(start, end) for _, start, end in turns]) for ids, turns in sequences]


def check_shape(sequences: Sequence[tuple[list[int], Sequence[tuple[int, ...]]]]) -> None:
    """Raises ValueError if ids or spans are not whole numbers, or spans not within their sequence and in order."""
    for ids, turns in sequences:
        last = 0
        for index, start, end in turns:
            if not (type(index) is int and index >= 0 and last <= start < end <= len(ids)):
                raise ValueError
            last = end
        if not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise ValueError


def says(tokenizer: Any, ids: list[int], message: Mapping[str, Any]) -> bool:
    """Whether the ids of an answer say what its message says: its text, with or without special tokens, but for outer
    blanks and a half character at its end; of a trace beside the text and of tool calls, that all parts occur."""
    ways = ((ids[:-1], False), (ids, False), (ids, True))  # mostly the last token is the end token, and the first holds
    texts = (
        tokenizer.decode(part, skip_special_tokens=skips, clean_up_tokenization_spaces=False) for part, skips in ways
    )
    content = trimmed(str(message.get("content") or ""))
    others = [trimmed(str(message[key])) for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)]
    others += [str((call.get("function") or {}).get("name", "")) for call in message.get("tool_calls") or ()]
    if not others:
        return any(content == trimmed(text) for text in texts)
    return any(all(part in text for part in (content, *others)) for text in texts)


def asks(tokenizer: Any, ids: list[int], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ids of a prompt hold the questions of its messages, in their order, but for blanks and for what the
    tokenizer itself changes. One that was cut at an end is not noticed."""

    def bare(part: list[int]) -> str:
        return "".join(tokenizer.decode(part, clean_up_tokenization_spaces=False).split())

    prompt, end = bare(ids), 0
    for message in messages:
        if message.get("role") != "user" or not isinstance(message.get("content"), str):
            continue
        question = bare(tokenizer(message["content"], add_special_tokens=False)["input_ids"])
        if (at := prompt.find(question, end)) < 0:
            return False
        end = at + len(question)
    return True


def trimmed(text: str) -> str:
    return text.strip().rstrip("\ufffd").strip()
