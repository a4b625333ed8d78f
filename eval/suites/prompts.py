"""Prompt sets: rows with `prompt`, `messages` or `turns`, tokenised with the target's chat template."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import iter_jsonl, naming_faults
from ...targets.chat.messages import Message, plain_text, script_of, text_in
from ...targets.chat.prompts import ChatTemplate, check_prompt, prompt_ids
from ...targets.chat.reasoning import template_hash, trace_finder
from ...targets.chat.rows import ChatRow, UnusableRow, Variables, chat_of, is_chat, of_request, with_thinking
from ...targets.images.pictures import pictures_of, sources_in
from ...targets.loading import quiet_loading
from ...targets.target import Target

Row = dict[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How a chat becomes a prompt, where its row does not say."""

    system: str | None = None  # a system prompt for chats that have none
    thinking: bool | None = None  # passed to the chat template as `enable_thinking`; None: not passed
    chat_template_kwargs: Variables = field(default_factory=dict)  # further variables for the template
    has_recorded_turns: bool = False  # its turns are asked behind the recorded answers, not behind the target's own

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told for rows that do not record it."""
        return with_thinking(self.chat_template_kwargs, self.thinking)

    def script(self, whole: ChatRow, origin: str) -> list[Message | None]:
        """Its messages with None where the target answers, see `script_of`. Raises BadInput if the answers behind which
        its turns are to be asked are not in the row."""
        if self.has_recorded_turns and not whole.is_answered:
            raise BadInput(f"{origin}: has no recorded answers; --turns recorded reads `messages`")
        return script_of(whole.messages, turns="recorded" if self.has_recorded_turns else "all")

    def of_row(self, row: Row) -> Row:
        """The row with the system prompt, which comes before its messages if they have none."""
        return row if self.system is None or row.get("system") else {**row, "system": self.system}


DEFAULT_CHAT = ChatOptions()
NEEDS_CHAT = "a system prompt, thinking or recorded turns need a chat template and rows of `messages` or `turns`"


@dataclass(frozen=True)
class PromptSource:
    """Where a prompt came from."""

    number: int  # in the suite, from 0; every turn of a row counts
    row: str  # `FILE:LINE`
    domain: str | None = None  # the row's `category` or `domain`
    question: str | None = None  # see `question_of`
    turn: int = 1  # which of the questions of its row
    kind: str | None = None  # of a recorded turn: `call` of tools, or `answer`
    chat: int | None = None  # the number of its row's first turn; None: the row has no other turn

    @property
    def first(self) -> int:
        """The number of its row's first turn, which all turns of the row share."""
        return self.number if self.chat is None else self.chat


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that was not measured. prompt: its number in the suite, as in `PromptSource`. row: `FILE:LINE`."""

    prompt: int
    row: str
    reason: str


@dataclass(frozen=True)
class Script:
    """A chat with several questions. turns: its messages, with None where the target answers; see `script_of`."""

    source: PromptSource
    chat: ChatRow
    turns: list[Message | None]


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
    variables: dict[str, Any] = field(default_factory=dict)  # what the chat template is told alike for all chats
    scripts: dict[int, Script] = field(default_factory=dict)  # of rows with several questions, by `PromptSource.number`

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.prompts):
            self.sources = [PromptSource(i, f"prompt {i}") for i in range(len(self.prompts))]

    def subset(self, indices: Sequence[int]) -> "Suite":
        """The suite with only these prompts."""
        prompts, sources = [self.prompts[i] for i in indices], [self.sources[i] for i in indices]
        return replace(self, prompts=prompts, sources=sources)

    def filled(self, batch_size: int) -> "Suite":
        """The suite with prompts repeated until the last batch is full, its chats in `whole_chats` order."""
        chats = [list(turns) for _, turns in groupby(range(len(self.prompts)), lambda i: self.sources[i].first)]
        order = whole_chats(chats, batch_size)
        return self.subset([order[i] for i in full_batches(len(order), batch_size)])

    @property
    def questions(self) -> list[str]:
        """The questions of all rows that have one, see `question_of`."""
        return [source.question for source in self.sources if source.question]

    @property
    def digest(self) -> str:
        """16 hex digits that identify the prompts, whatever the order of their batches, without repetitions."""
        by_number = {source.number: ids for source, ids in zip(self.sources, self.prompts, strict=True)}
        once = [[ids, *pictures_of(ids)] if pictures_of(ids) else ids for _, ids in sorted(by_number.items())]
        return hashlib.sha256(json.dumps(once).encode()).hexdigest()[:16]


class NoUsablePrompt(BadInput):
    """No row of a suite gives a prompt for this target."""

    def __init__(self, suite: Suite):
        first = suite.failed[0]
        super().__init__(f"no prompt of {suite.name} can be asked: {first.row}: {first.reason}")
        self.suite = suite


def distinct_names(candidates: Sequence[Sequence[str]]) -> list[str]:
    """The shortest name of each such that all differ. Args: candidates: the possible names of each, shortest first.

    Raises: BadInput if two have the same names only.
    """
    levels = [0] * len(candidates)
    while True:
        names = [names_by_level[level] for names_by_level, level in zip(candidates, levels, strict=True)]
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


def full_batches(count: int, batch_size: int) -> list[int]:
    """The indices of `count` rows, then again from the first until the last batch is full."""
    return [i % count for i in range(-(-count // batch_size) * batch_size)]


def whole_chats(chats: Sequence[list[int]], batch_size: int) -> list[int]:
    """The prompts of these chats, those of a chat together, so that a batch ends where a chat does as soon as any of
    the next chats allow it: only chats between two such ends share batches."""
    order, waiting = list[int](), {chat[0]: chat for chat in chats}
    while waiting:
        for chat in next_to_fill(waiting.values(), batch_size):
            order += waiting.pop(chat[0])
    return order


def next_to_fill(chats: Collection[list[int]], batch_size: int) -> list[list[int]]:
    """The earliest of these chats whose prompts fill batches exactly, batch_size of them at most; else all."""
    by_rest: dict[int, list[list[int]]] = {}  # by how many prompts are left over, the first chats found that leave it
    for chat in chats:
        for before in [[], *by_rest.values()]:
            taken = [*before, chat]
            by_rest.setdefault(sum(map(len, taken)) % batch_size, taken)
        if 0 in by_rest:
            return by_rest[0]
    return list(chats)


def file_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, with their origins."""
    return ((f"{path}:{line}", row) for line, row in iter_jsonl(path))


def prompt_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file of prompts, with their origins; of a server's log the requests."""
    return ((origin, of_request(row)) for origin, row in file_rows(path))


def check_rows(rows: Iterable[tuple[str, Row]], *, limit: int | None) -> None:
    """Raises BadInput on rows of which no target could be asked a prompt; those that only some cannot are left."""
    for origin, row in islice(rows, limit):
        with suppress(UnusableRow), naming_faults(row, origin):
            domain_of(row, origin=origin)
            check_prompt(row, origin)


def load_suite(
    path: str | Path, target: Target, *, max_new_tokens: int, limit: int | None = None, chat: ChatOptions = DEFAULT_CHAT
) -> Suite:
    """Read a prompt file; rows that give no prompt for this target go to the suite's `failed`.

    Raises: BadInput on malformed rows; its subclass NoUsablePrompt if no prompt is left.
    """
    name = file_names(path)[0]
    suite = build_suite(name, prompt_rows(path), target, max_new_tokens=max_new_tokens, limit=limit, chat=chat)
    if not suite.prompts and not suite.scripts:
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
) -> Suite:
    """A suite from rows with their origins; rows that give no prompt are in `failed`, even if that is all of them.

    Raises: BadInput on malformed rows, and if there are no rows."""
    tokenizer = target.tokenizer
    suite, told = Suite(name, [], trace_finder(tokenizer), chat=chat), list[dict[str, Any]]()
    for number, (origin, given) in enumerate(islice(rows, limit)):
        row = chat.of_row(given)
        asked = is_chat(row) and ("turns" not in row or bool(tokenizer.chat_template))  # through the template
        if not asked and chat != DEFAULT_CHAT:
            raise BadInput(f"{origin}: {NEEDS_CHAT}")
        with naming_faults(row, origin):
            source = PromptSource(number, Path(origin).name, domain_of(row, origin=origin), question_of(row, origin))
            if asked and tokenizer.chat_template:
                whole = chat_of(row, origin, defaults=chat.variables)
                told.append(ChatTemplate(tokenizer, whole.tools, whole.variables).recorded)
                script = chat.script(whole, origin)
                if script.count(None) > (0 if chat.has_recorded_turns else 1):
                    suite.scripts[number] = Script(source, whole, script)
        try:
            with naming_faults(row, origin), quiet_loading():  # transformers warns on long prompts, we report them
                ids = prompt_ids(row, tokenizer, origin=origin, defaults=chat.variables)
            check_ids(ids, target, max_new_tokens=max_new_tokens, origin=origin)
        except UnusableRow as error:
            suite.failed.append(FailedPrompt(number, source.row, error.reason))
            continue
        suite.prompts.append(ids)
        suite.sources.append(source)
    if told:
        suite.template_hash = template_hash(tokenizer)
        alike = [item for item in told[0].items() if all(one.get(item[0]) == item[1] for one in told)]
        suite.variables = dict(alike)
    if not suite.prompts and not suite.failed:
        raise BadInput(f"{name}: no row of it is in the file")
    return suite


def check_ids(ids: list[int], target: Target, *, max_new_tokens: int, origin: str) -> None:
    """Raises BadInput on an empty prompt or unknown tokens, UnusableRow if it exceeds the target's context."""
    if not ids:
        raise BadInput(f"{origin}: empty prompt")
    wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise BadInput(f"{origin}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
    if len(ids) + max_new_tokens > target.num_positions:
        raise UnusableRow(
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


def question_of(row: Row, origin: str = "") -> str | None:
    """What a row asks: the user's last message, the first of `turns`, or `prompt`, as `last_question` has it. None if
    the row has only token ids."""
    if is_chat(row):
        chat = chat_of(row, origin)
        return last_question(chat.messages if chat.is_answered else chat.question)
    asked: Any = row.get("prompt")
    return last_question([{"role": "user", "content": asked}]) if isinstance(asked, str) else None


def last_question(messages: Sequence[Message]) -> str | None:
    """The user's last message as `plain_text`, so that it is recognised with another system prompt. None if there is
    none."""
    asked = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    return plain_text(" ".join([*sources_in([{"content": asked}]), text_in(asked)])) or None
