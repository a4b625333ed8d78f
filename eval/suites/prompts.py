"""Prompt sets: rows with `prompt`, `messages` or `turns`, tokenised with the target's chat template."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ...configs.errors import BadInput, first_line
from ...configs.jsonl import iter_jsonl, naming_faults
from ...heads.loading import quiet_loading
from ...heads.reasoning import template_hash, trace_finder
from ...heads.target import Target

Row = dict[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How a chat becomes a prompt."""

    system: str | None = None  # a system prompt for chats that have none
    thinking: bool | None = None  # passed to the chat template as `enable_thinking`; None: not passed


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True)
class PromptSource:
    """Where a prompt came from."""

    number: int  # of its row in the suite, from 0
    row: str  # `FILE:LINE`
    domain: str | None = None  # the row's `category` or `domain`
    question: str | None = None  # see `question_of`


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that was not measured. prompt: the number of its row in the suite, from 0. row: `FILE:LINE`."""

    prompt: int
    row: str
    reason: str


@dataclass
class Suite:
    """Prompts under a name."""

    name: str  # the file's stem, or that of a named suite
    prompts: list[list[int]]  # token ids, ready to be continued
    in_trace: Callable[[Sequence[int]], list[bool]] | None = None  # see `trace_finder`; None: there are no traces
    sources: list[PromptSource] = field(default_factory=list)
    failed: list[FailedPrompt] = field(default_factory=list)  # rows that give no prompt for this target
    chat: ChatOptions = DEFAULT_CHAT
    template_hash: str | None = None  # of the chat template; None: no row used one
    version: int | None = None  # of a named suite
    calibration: list[list[int]] = field(default_factory=list)  # prompts that shape trees and are not measured
    num_repeated: int = 0  # this many of the last prompts repeat the first ones, to fill the last batch

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.prompts):
            self.sources = [PromptSource(i, f"prompt {i}") for i in range(len(self.prompts))]

    def subset(self, indices: Sequence[int]) -> "Suite":
        """The suite with only these prompts."""
        prompts, sources = [self.prompts[i] for i in indices], [self.sources[i] for i in indices]
        return replace(self, prompts=prompts, sources=sources, num_repeated=0)

    def filled(self, batch_size: int) -> "Suite":
        """The suite with prompts repeated until the last batch is full."""
        indices = filled(len(self.prompts), batch_size)
        return replace(self.subset(indices), num_repeated=len(indices) - len(self.prompts))

    @property
    def questions(self) -> list[str]:
        """The questions of all rows that have one, see `question_of`."""
        return [source.question for source in self.sources if source.question]

    @property
    def digest(self) -> str:
        """16 hex digits that identify the prompts, without repetitions."""
        once = self.prompts[: len(self.prompts) - self.num_repeated]
        return hashlib.sha256(json.dumps(once).encode()).hexdigest()[:16]


class UnusablePrompt(BadInput):
    """A row gives no prompt for this target; other rows of the suite may."""

    def __init__(self, origin: str, reason: str):
        super().__init__(f"{origin}: {reason}")
        self.reason = reason


class NoUsablePrompt(BadInput):
    """No row of a suite gives a prompt for this target."""

    def __init__(self, suite: Suite):
        first = suite.failed[0]
        super().__init__(f"no prompt of {suite.name} can be asked: {first.row}: {first.reason}")
        self.suite = suite


def is_chat(row: Row, tokenizer: Any) -> bool:
    """Whether a row goes through the chat template."""
    return "input_ids" not in row and ("messages" in row or ("turns" in row and bool(tokenizer.chat_template)))


def prompt_ids(row: Row, tokenizer: Any, *, origin: str, chat: ChatOptions = DEFAULT_CHAT) -> list[int]:
    """Token ids of one prompt row.

    `input_ids` are taken as they are (up to `prompt_length`, if given). `prompt` is plain text, tokenised with the
    tokenizer's own special tokens. `messages` are rendered by the chat template up to where the assistant answers; a
    trailing assistant message is dropped. Of `turns` the first is used, as a user message, or as plain text if the
    tokenizer has no chat template.

    Raises: BadInput naming the origin; UnusablePrompt if the template rejects the chat.
    """
    if not is_chat(row, tokenizer) and chat != DEFAULT_CHAT:
        raise BadInput(f"{origin}: a system prompt or thinking needs a chat template and rows of `messages` or `turns`")
    if "input_ids" in row:
        return ready_ids(row, origin=origin)
    if "messages" in row:
        return chat_ids(row["messages"], tokenizer, origin=origin, chat=chat)
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise BadInput(f"{origin}: `turns` should be a list of texts, got {json.dumps(turns)[:60]}")
        if not tokenizer.chat_template:
            return tokenizer(turns[0]).input_ids
        return chat_ids([{"role": "user", "content": turns[0]}], tokenizer, origin=origin, chat=chat)
    if "prompt" not in row:
        raise BadInput(f"{origin}: a prompt row needs `prompt`, `messages` or `turns`, found {sorted(row)}")
    if not isinstance(row["prompt"], str):
        raise BadInput(f"{origin}: `prompt` should be text, got {json.dumps(row['prompt'])[:60]}")
    return tokenizer(row["prompt"]).input_ids


def chat_ids(messages: Any, tokenizer: Any, *, origin: str, chat: ChatOptions) -> list[int]:
    """A chat up to where the assistant answers, as the chat template renders it. Raises as `prompt_ids`."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadInput(f"{origin}: `messages` should be a list of objects, got {json.dumps(messages)[:60]}")
    if not tokenizer.chat_template:
        raise BadInput(f"{origin}: the target's tokenizer has no chat template; give plain `prompt` rows")
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise BadInput(f"{origin}: `messages` should each have a `role`, got {json.dumps(messages)[:60]}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadInput(f"{origin}: no message to answer")
    if chat.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": chat.system}, *messages]
    variables: dict[str, Any] = {} if chat.thinking is None else {"enable_thinking": chat.thinking}
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **variables)
    except (TemplateError, TypeError, ValueError) as error:
        raise UnusablePrompt(origin, f"the chat template refuses the messages: {first_line(error)}") from error
    return rendered["input_ids"]


def ready_ids(row: Row, *, origin: str) -> list[int]:
    """A row's `input_ids`, up to its `prompt_length`. Raises BadInput if either is malformed."""
    ids, length = row["input_ids"], row.get("prompt_length")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    if length is not None and (type(length) is not int or not 0 <= length <= len(ids)):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(ids)}, got {length!r}")
    return ids[:length]


def distinct_names(candidates: Sequence[Sequence[str]]) -> list[str]:
    """The shortest name of each such that all differ. Args: candidates: the possible names of each, shortest first.

    Raises: BadInput if two have the same names only.
    """
    levels = [0] * len(candidates)
    while True:
        names = [each[level] for each, level in zip(candidates, levels, strict=True)]
        alike = [i for i, name in enumerate(names) if names.count(name) > 1]
        if not alike:
            return names
        longer = [i for i in alike if levels[i] + 1 < len(candidates[i])]
        if not longer:
            raise BadInput(f"{names[alike[0]]}: is given twice")
        for i in longer:
            levels[i] += 1


def file_names(path: str | Path) -> list[str]:
    """Possible names for a prompt file's suite: `gsm8k`, `gsm8k.test`, then with more and more of its folders."""
    place = Path(path).absolute()
    folders, name = place.parts[1:-1], place.name.removesuffix(".gz").removesuffix(".jsonl")
    longer = ["/".join((*folders[i:], name)) for i in reversed(range(len(folders)))]
    return [name.split(".")[0], name, *longer, str(place)]


def filled(count: int, batch_size: int) -> list[int]:
    """The indices of `count` rows, then again from the first until the last batch is full."""
    return [i % count for i in range(-(-count // batch_size) * batch_size)]


def file_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, with their origins."""
    return ((f"{path}:{line}", row) for line, row in iter_jsonl(path))


def load_suite(
    path: str | Path, target: Target, *, max_new_tokens: int, limit: int | None = None, chat: ChatOptions = DEFAULT_CHAT
) -> Suite:
    """Read a prompt file; rows that give no prompt for this target go to the suite's `failed`.

    Raises: BadInput on malformed rows; its subclass NoUsablePrompt if no prompt is left.
    """
    name = file_names(path)[0]
    suite = build_suite(name, file_rows(path), target, max_new_tokens=max_new_tokens, limit=limit, chat=chat)
    if not suite.prompts:
        raise NoUsablePrompt(suite)
    return suite


def build_suite(
    name: str,
    rows: Iterable[tuple[str, Row]],
    target: Target,
    *,
    max_new_tokens: int,
    limit: int | None = None,
    chat: ChatOptions = DEFAULT_CHAT,
    version: int | None = None,
) -> Suite:
    """A suite from rows with their origins; rows that give no prompt are in `failed`, even if that is all of them.

    Raises: BadInput on malformed rows, and if there are no rows."""
    tokenizer = target.tokenizer
    suite = Suite(name, [], trace_finder(tokenizer), chat=chat, version=version)
    for number, (origin, row) in enumerate(islice(rows, limit)):
        try:
            with naming_faults(row, origin), quiet_loading():  # transformers warns on long prompts, we report them
                ids = prompt_ids(row, tokenizer, origin=origin, chat=chat)
            check_ids(ids, target, max_new_tokens=max_new_tokens, origin=origin)
        except UnusablePrompt as error:
            suite.failed.append(FailedPrompt(number, Path(origin).name, error.reason))
            continue
        if suite.template_hash is None and is_chat(row, tokenizer):
            suite.template_hash = template_hash(tokenizer)
        suite.prompts.append(ids)
        domain = domain_of(row, origin=origin)
        suite.sources.append(PromptSource(number, Path(origin).name, domain, question_of(row)))
    if not suite.prompts and not suite.failed:
        raise BadInput(f"{name}: no row of it is in the file")
    return suite


def check_ids(ids: list[int], target: Target, *, max_new_tokens: int, origin: str) -> None:
    """Raises BadInput on an empty prompt or unknown tokens, UnusablePrompt if it exceeds the target's context."""
    if not ids:
        raise BadInput(f"{origin}: empty prompt")
    wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise BadInput(f"{origin}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
    if len(ids) + max_new_tokens > target.num_positions:
        raise UnusablePrompt(
            origin,
            f"{len(ids)} prompt tokens + {max_new_tokens} new ones exceed the context of {target.context}; "
            "lower --max-new-tokens or shorten the prompt",
        )


def domain_of(row: Row, *, origin: str) -> str | None:
    """A row's category, else its domain, else None. Raises BadInput if it is not text."""
    domain = next((row[key] for key in ("category", "domain") if row.get(key) is not None), None)
    if not isinstance(domain, str | None):
        raise BadInput(f"{origin}: `category` or `domain` should be text, got {json.dumps(domain)[:60]}")
    return domain


def question_of(row: Row) -> str | None:
    """What a row asks: a chat's last user message, the first of `turns`, or `prompt`. In lower case with single spaces,
    so that it is recognised with another system prompt. None if the row has only token ids."""
    asked: Any = row.get("prompt")
    if "messages" in row:
        asked = next((each.get("content") for each in reversed(row["messages"]) if each.get("role") == "user"), None)
    elif "turns" in row:
        asked = row["turns"][0]
    if isinstance(asked, list):  # of parts, some of which are text
        asked = " ".join(str(part.get("text", "")) for part in asked if isinstance(part, dict))
    return " ".join(asked.split()).casefold() or None if isinstance(asked, str) else None
