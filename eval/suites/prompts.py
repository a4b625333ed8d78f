"""Prompt sets: rows with `prompt`, `messages` or `turns`, as the target's tokenizer and chat template read them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ...configs.errors import BadInput, first_line
from ...configs.jsonl import iter_jsonl
from ...heads.loading import quiet_loading
from ...heads.reasoning import template_hash, think_tokens
from ...heads.target import Target


@dataclass(frozen=True)
class Asking:
    """How a chat becomes a prompt. system: a system prompt put in front of chats that have none. thinking: what the
    chat template is told as `enable_thinking`; None: nothing."""

    system: str | None = None
    thinking: bool | None = None


AS_IS = Asking()


@dataclass(frozen=True)
class Asked:
    """Where a prompt came from. number: of its row in the suite, from 0. row: `FILE:LINE`. domain: what the row calls
    its `category` or `domain`."""

    number: int
    row: str
    domain: str | None = None


@dataclass
class Suite:
    """Prompts under a name.

    name: the file's stem, or the named suite. prompts: token ids, ready to be continued. think_tokens: what opens and
    closes a reasoning trace, where the tokenizer has single tokens for it. asked: where each prompt came from. failed:
    rows that the target cannot be asked, as the report has them. asking: how rows became prompts. template_hash: of
    the chat template that they went through; None: through none. version: of a named suite.
    """

    name: str
    prompts: list[list[int]]
    think_tokens: tuple[int, int] | None = None
    asked: list[Asked] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    asking: Asking = AS_IS
    template_hash: str | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if len(self.asked) != len(self.prompts):
            self.asked = [Asked(i, f"prompt {i}") for i in range(len(self.prompts))]

    def only(self, places: Sequence[int]) -> "Suite":
        """The same with these prompts alone."""
        return replace(self, prompts=[self.prompts[i] for i in places], asked=[self.asked[i] for i in places])

    @property
    def digest(self) -> str:
        """Which prompts these are: of their token ids, in order."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]

    def described(self) -> dict[str, Any]:
        """What a result entry says of how the prompts were made."""
        return {
            "suite_version": self.version,
            "suite_digest": self.digest,
            "system": self.asking.system if self.template_hash else None,
            "thinking": self.asking.thinking if self.template_hash else None,
            "template_hash": self.template_hash,
        }


class UnaskedPrompt(BadInput):
    """A prompt that this target cannot be asked; others of its suite may be."""

    def __init__(self, origin: str, reason: str):
        super().__init__(f"{origin}: {reason}")
        self.reason = reason


class NothingToAsk(BadInput):
    """A suite no prompt of which can be asked."""

    def __init__(self, suite: Suite):
        first = suite.failed[0]
        super().__init__(f"no prompt of {suite.name} can be asked: {first['row']}: {first['reason']}")
        self.suite = suite


def is_chat(row: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a row goes through the chat template."""
    return "input_ids" not in row and ("messages" in row or ("turns" in row and bool(tokenizer.chat_template)))


def prompt_ids(row: dict[str, Any], tokenizer: Any, *, origin: str, asking: Asking = AS_IS) -> list[int]:
    """Token ids of one prompt row.

    `input_ids` are taken as they are (up to `prompt_length` where the row has one). `prompt` is plain text, tokenised
    with the tokenizer's own special tokens. `messages` go through its chat template up to where the assistant answers;
    a trailing assistant message is left out. Of `turns` the first is asked, as a user message, or as plain text where
    the tokenizer has no chat template.

    Raises: BadInput naming the origin; UnaskedPrompt where the template refuses the chat.
    """
    if not is_chat(row, tokenizer) and asking != AS_IS:
        raise BadInput(f"{origin}: a system prompt or thinking needs a chat template and rows of `messages` or `turns`")
    if "input_ids" in row:
        return ready_ids(row, origin=origin)
    if "messages" in row:
        return chat_ids(row["messages"], tokenizer, origin=origin, asking=asking)
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise BadInput(f"{origin}: `turns` should be a list of texts, got {json.dumps(turns)[:60]}")
        if not tokenizer.chat_template:
            return tokenizer(turns[0]).input_ids
        return chat_ids([{"role": "user", "content": turns[0]}], tokenizer, origin=origin, asking=asking)
    if "prompt" not in row:
        raise BadInput(f"{origin}: a prompt row needs `prompt`, `messages` or `turns`, found {sorted(row)}")
    if not isinstance(row["prompt"], str):
        raise BadInput(f"{origin}: `prompt` should be text, got {json.dumps(row['prompt'])[:60]}")
    return tokenizer(row["prompt"]).input_ids


def chat_ids(messages: Any, tokenizer: Any, *, origin: str, asking: Asking) -> list[int]:
    """A chat up to where the assistant answers, as the chat template renders it. Raises as `prompt_ids`."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise BadInput(f"{origin}: `messages` should be a list of objects, got {json.dumps(messages)[:60]}")
    if not tokenizer.chat_template:
        raise BadInput(f"{origin}: the target's tokenizer has no chat template; give plain `prompt` rows")
    if not all(isinstance(one.get("role"), str) for one in messages):
        raise BadInput(f"{origin}: `messages` should each have a `role`, got {json.dumps(messages)[:60]}")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadInput(f"{origin}: no message to answer")
    if asking.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": asking.system}, *messages]
    how: dict[str, Any] = {} if asking.thinking is None else {"enable_thinking": asking.thinking}
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **how)["input_ids"]
    except (TemplateError, TypeError, ValueError) as error:
        raise UnaskedPrompt(origin, f"the chat template refuses the messages: {first_line(error)}") from error


def ready_ids(row: dict[str, Any], *, origin: str) -> list[int]:
    """The token ids that a row brings, up to its `prompt_length`."""
    ids, length = row["input_ids"], row.get("prompt_length")
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise BadInput(f"{origin}: `input_ids` should be a list of whole numbers")
    if length is not None and (type(length) is not int or not 0 <= length <= len(ids)):
        raise BadInput(f"{origin}: `prompt_length` should be between 0 and {len(ids)}, got {length!r}")
    return ids[:length]


def load_suite(
    path: str | Path,
    target: Target,
    *,
    max_new_tokens: int,
    limit: int | None = None,
    asking: Asking = AS_IS,
) -> Suite:
    """Read a prompt file; prompts that this target cannot be asked go to the suite's `failed`.

    Raises: BadInput on malformed rows; NothingToAsk, a BadInput, where no prompt is left.
    """
    rows = ((f"{path}:{line}", row) for line, row in iter_jsonl(path))
    name = Path(path).name.split(".")[0]
    return build_suite(name, rows, target, max_new_tokens=max_new_tokens, limit=limit, asking=asking)


def build_suite(
    name: str,
    rows: Iterable[tuple[str, dict[str, Any]]],
    target: Target,
    *,
    max_new_tokens: int,
    limit: int | None = None,
    asking: Asking = AS_IS,
    version: int | None = None,
) -> Suite:
    """A suite of rows with their origins. Raises as `load_suite`."""
    tokenizer, templated = target.tokenizer, False
    prompts: list[list[int]] = []
    asked: list[Asked] = []
    failed: list[dict[str, Any]] = []
    for number, (origin, row) in enumerate(islice(rows, limit)):
        try:
            with quiet_loading():  # transformers warns of prompts beyond the context, which are named here
                ids = prompt_ids(row, tokenizer, origin=origin, asking=asking)
            check_ids(ids, target, max_new_tokens=max_new_tokens, origin=origin)
        except UnaskedPrompt as error:
            failed.append({"prompt": number, "row": Path(origin).name, "reason": error.reason})
            continue
        templated = templated or is_chat(row, tokenizer)
        prompts.append(ids)
        asked.append(Asked(number, Path(origin).name, domain_of(row, origin=origin)))
    used = template_hash(tokenizer) if templated else None
    suite = Suite(name, prompts, think_tokens(tokenizer), asked, failed, asking, used, version)
    if not prompts and not failed:
        raise BadInput(f"{name}: no row of it is in the file")
    if not prompts:
        raise NothingToAsk(suite)
    return suite


def check_ids(ids: list[int], target: Target, *, max_new_tokens: int, origin: str) -> None:
    """Raises BadInput on no prompt and on tokens that the target has not, UnaskedPrompt beyond its context."""
    if not ids:
        raise BadInput(f"{origin}: empty prompt")
    wrong = next((token for token in ids if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise BadInput(f"{origin}: token id {wrong} is outside the vocabulary of {target.vocab_size}")
    if len(ids) + max_new_tokens > target.max_positions:
        raise UnaskedPrompt(
            origin,
            f"{len(ids)} prompt tokens + {max_new_tokens} new ones exceed the context of {target.max_positions}; "
            "lower --max-new-tokens or shorten the prompt",
        )


def domain_of(row: dict[str, Any], *, origin: str) -> str | None:
    """What a row calls its category, else its domain."""
    found = next((row[key] for key in ("category", "domain") if row.get(key) is not None), None)
    if not isinstance(found, str | None):
        raise BadInput(f"{origin}: `category` or `domain` should be text, got {json.dumps(found)[:60]}")
    return found
