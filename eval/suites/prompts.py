"""Prompt sets: rows with `prompt`, `messages` or `turns`, as the target's tokenizer and chat template read them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ...configs.errors import BadInput, first_line
from ...configs.jsonl import iter_jsonl, naming_faults
from ...heads.loading import quiet_loading
from ...heads.reasoning import template_hash, think_tokens
from ...heads.target import Target

Row = dict[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How a chat becomes a prompt."""

    system: str | None = None  # a system prompt, put in front of chats that have none
    thinking: bool | None = None  # what the chat template gets as `enable_thinking`; None: nothing


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True)
class PromptSource:
    """Where a prompt came from."""

    number: int  # of its row in the suite, from 0
    row: str  # `FILE:LINE`
    domain: str | None = None  # the row's `category` or `domain`
    question: str | None = None  # as `question_of` has it


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that is in no figure. prompt: the number of its row in the suite, from 0. row: `FILE:LINE`."""

    prompt: int
    row: str
    reason: str


@dataclass
class Suite:
    """Prompts under a name."""

    name: str  # the file's stem, or that of a named suite
    prompts: list[list[int]]  # token ids, ready to be continued
    think_tokens: tuple[int, int] | None = None  # around a reasoning trace, where the tokenizer has a token for each
    sources: list[PromptSource] = field(default_factory=list)
    failed: list[FailedPrompt] = field(default_factory=list)  # rows that do not become prompts of this target
    chat: ChatOptions = DEFAULT_CHAT
    template_hash: str | None = None  # of the chat template that rows went through; None: through none
    version: int | None = None  # of a named suite
    calibration: list[list[int]] = field(default_factory=list)  # prompts that shape trees, and are not measured
    num_repeated: int = 0  # of the prompts the last so many are the first again, so that batches are full

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.prompts):
            self.sources = [PromptSource(i, f"prompt {i}") for i in range(len(self.prompts))]

    def subset(self, indices: Sequence[int]) -> "Suite":
        """The same with these prompts alone."""
        prompts, sources = [self.prompts[i] for i in indices], [self.sources[i] for i in indices]
        return replace(self, prompts=prompts, sources=sources, num_repeated=0)

    def filled(self, batch_size: int) -> "Suite":
        """The same with prompts repeated until the last batch is full."""
        indices = filled(len(self.prompts), batch_size)
        return replace(self.subset(indices), num_repeated=len(indices) - len(self.prompts))

    @property
    def questions(self) -> list[str]:
        """What is asked, whatever stands around it in the prompts, of the rows that say it in words."""
        return [source.question for source in self.sources if source.question]

    @property
    def digest(self) -> str:
        """Which prompts these are: of their token ids, in order, each once."""
        once = self.prompts[: len(self.prompts) - self.num_repeated]
        return hashlib.sha256(json.dumps(once).encode()).hexdigest()[:16]


class UnusablePrompt(BadInput):
    """A row that gives no prompt for this target; others of its suite may."""

    def __init__(self, origin: str, reason: str):
        super().__init__(f"{origin}: {reason}")
        self.reason = reason


class NoUsablePrompt(BadInput):
    """A suite none of whose rows gives a prompt for this target."""

    def __init__(self, suite: Suite):
        first = suite.failed[0]
        super().__init__(f"no prompt of {suite.name} can be asked: {first.row}: {first.reason}")
        self.suite = suite


def is_chat(row: Row, tokenizer: Any) -> bool:
    """Whether a row goes through the chat template."""
    return "input_ids" not in row and ("messages" in row or ("turns" in row and bool(tokenizer.chat_template)))


def prompt_ids(row: Row, tokenizer: Any, *, origin: str, chat: ChatOptions = DEFAULT_CHAT) -> list[int]:
    """Token ids of one prompt row.

    `input_ids` are taken as they are (up to `prompt_length` where the row has one). `prompt` is plain text, tokenised
    with the tokenizer's own special tokens. `messages` go through its chat template up to where the assistant answers;
    a trailing assistant message is left out. Of `turns` the first is taken, as a user message, or as plain text where
    the tokenizer has no chat template.

    Raises: BadInput naming the origin; UnusablePrompt where the template refuses the chat.
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
    """The token ids that a row brings, up to its `prompt_length`."""
    ids, length = row["input_ids"], row.get("prompt_length")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    if length is not None and (type(length) is not int or not 0 <= length <= len(ids)):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(ids)}, got {length!r}")
    return ids[:length]


def distinct_names(candidates: Sequence[Sequence[str]]) -> list[str]:
    """One name of each, the shortest by which all differ. Args: candidates: of each its names, the shortest first.

    Raises BadInput where two have the same names only.
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
    """What a prompt file's suite may be called: `gsm8k`, `gsm8k.test`, and with more and more of its folders."""
    place = Path(path).absolute()
    folders, name = place.parts[1:-1], place.name.removesuffix(".gz").removesuffix(".jsonl")
    longer = ["/".join((*folders[i:], name)) for i in reversed(range(len(folders)))]
    return [name.split(".")[0], name, *longer, str(place)]


def filled(count: int, batch_size: int) -> list[int]:
    """Indices of so many rows, repeated from the first on until the last batch is full."""
    return [i % count for i in range(-(-count // batch_size) * batch_size)]


def file_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, with their origins."""
    return ((f"{path}:{line}", row) for line, row in iter_jsonl(path))


def load_suite(
    path: str | Path, target: Target, *, max_new_tokens: int, limit: int | None = None, chat: ChatOptions = DEFAULT_CHAT
) -> Suite:
    """Read a prompt file; rows that give no prompt for this target go to the suite's `failed`.

    Raises: BadInput on malformed rows; NoUsablePrompt, a BadInput, where no prompt is left.
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
    """A suite of rows with their origins; where none gives a prompt, it names the reasons in `failed`. Raises BadInput
    on malformed rows, and where there are none."""
    tokenizer = target.tokenizer
    suite = Suite(name, [], think_tokens(tokenizer), chat=chat, version=version)
    for number, (origin, row) in enumerate(islice(rows, limit)):
        try:
            with naming_faults(row, origin), quiet_loading():  # of prompts beyond the context, which are named here
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
    """Raises BadInput on no prompt and on tokens that the target has not, UnusablePrompt beyond its context."""
    if not ids:
        raise BadInput(f"{origin}: empty prompt")
    wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise BadInput(f"{origin}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
    if len(ids) + max_new_tokens > target.max_positions:
        raise UnusablePrompt(
            origin,
            f"{len(ids)} prompt tokens + {max_new_tokens} new ones exceed the context of {target.max_positions}; "
            "lower --max-new-tokens or shorten the prompt",
        )


def domain_of(row: Row, *, origin: str) -> str | None:
    """A row's category, else its domain."""
    domain = next((row[key] for key in ("category", "domain") if row.get(key) is not None), None)
    if not isinstance(domain, str | None):
        raise BadInput(f"{origin}: `category` or `domain` should be text, got {json.dumps(domain)[:60]}")
    return domain


def question_of(row: Row) -> str | None:
    """What a row asks, in words: a chat's last user message, the first of `turns`, or `prompt`; in small letters with
    single blanks, so that it is known again behind another system prompt. None where the row has token ids only."""
    asked: Any = row.get("prompt")
    if "messages" in row:
        asked = next((each.get("content") for each in reversed(row["messages"]) if each.get("role") == "user"), None)
    elif "turns" in row:
        asked = row["turns"][0]
    if isinstance(asked, list):  # of parts, of which some are text
        asked = " ".join(str(part.get("text", "")) for part in asked if isinstance(part, dict))
    return " ".join(asked.split()).casefold() or None if isinstance(asked, str) else None
