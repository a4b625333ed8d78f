"""Turns a row into a conversation with the target: which turns it answers, a key for resuming, the resulting row."""

import hashlib
import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import naming_faults
from ...targets.chat.messages import Message, script_of, text_in
from ...targets.chat.prompts import plain_prompt
from ...targets.chat.rows import (
    VARIABLES,
    ChatRow,
    chat_of,
    check_variables,
    is_chat,
    known_keys,
    of_request,
    with_thinking,
)
from ...targets.chat.written_ids import AnswerIds, answers_written, as_entry
from ..rows.config import check_at_least_one
from ..rows.sources import Row
from ..rows.traffic import CUT, STOPPED

PROMPT_SHAPES = "`messages`, `conversations`, `turns`, `prompt` or `instruction`"


@dataclass(kw_only=True, frozen=True)
class SamplingConfig:
    """How answers are sampled; the defaults are the target's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    max_tokens: int = 2048  # of one answer, its reasoning included
    seed: int = 0
    num_samples: int = 1  # answers per prompt
    thinking: bool | None = None  # `enable_thinking` for the chat template; None: its default
    # further variables for the template; those of either kind that a row records itself stay
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told for rows that do not record it."""
        return with_thinking(self.chat_template_kwargs, self.thinking)

    def __post_init__(self) -> None:
        check_variables(self.chat_template_kwargs, "chat_template_kwargs")
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature {self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")
        if self.top_k < 0:
            raise BadInput(f"top_k {self.top_k}: expected 0 (off) or more")
        check_at_least_one(max_tokens=self.max_tokens, num_samples=self.num_samples)


@dataclass(frozen=True)
class ChatRequest:
    """A request for one answer."""

    messages: list[Message]  # in OpenAI's format, but tool-call arguments are objects
    tools: list[Any] | None  # in OpenAI's format
    sampling: SamplingConfig
    seed: int  # of this answer, which thus does not depend on other requests
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template
    prompt: list[int] = field(default_factory=list)  # its ids, where a server is asked by them


@dataclass(frozen=True)
class Answer:
    """The target's answer to a request."""

    message: Message
    finish_reason: str  # `stop`, `length` (cut at max_tokens), `tool_calls`, or another one of the server
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    ids: AnswerIds | None = None  # None: they are not known
    variables: dict[str, Any] = field(default_factory=dict)  # that the chat template was told
    left_to_server: tuple[str, ...] = ()  # sampling settings that the server refused to be told
    is_plain: bool = False  # whether it continues the prompt's text, of a target without a chat template


class Failure(Exception):
    """A conversation that could not be answered, with the reason in one line; other conversations continue."""


@dataclass(frozen=True)
class Exchange:
    """A conversation in which the target answers some turns."""

    key: str  # hash of everything but the target that the answers depend on; equal in every run
    source_id: str  # the row's own id, else where it was read
    script: list[Message | None]  # None where the target answers
    tools: list[Any] | None
    sampling: SamplingConfig
    sample: int  # which of several answers to the same prompt, from 0
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template

    @property
    def length(self) -> int:
        """Characters of the given messages, to group conversations of similar length."""
        return sum(len(text_in(message["content"])) for message in self.script if message is not None)

    @property
    def beginning(self) -> str:
        """Sorts conversations by what their prompts begin with."""
        return repr((self.tools, self.script))

    def talk(self) -> Generator[ChatRequest, Answer | Failure, dict[str, Any] | Failure]:
        """A generator that yields a request for each turn, is sent its answer, and returns the answered row; a failure
        that it is sent is what it returns.

        The history of a request has the new answers to earlier turns, reasoning included, as the chat template gets it
        in training. An answer that was cut or calls a tool ends the conversation, because the row's later turns do not
        reply to it.
        """
        messages: list[Message] = []
        answers: list[Answer] = []
        places: list[int] = []  # of the answers among the messages
        for turn, message in enumerate(self.script):
            if message is not None:
                messages.append(message)
                continue
            answer = yield ChatRequest(list(messages), self.tools, self.sampling, self.seed(turn), self.variables)
            if isinstance(answer, Failure):
                return answer
            places.append(len(messages))
            messages.append(answer.message)
            answers.append(answer)
            if answer.finish_reason not in ("stop", STOPPED) or "tool_calls" in answer.message:
                break
        told = {"tools": self.tools, VARIABLES: answers[-1].variables}
        finish_reason = answers[-1].finish_reason
        row = {"messages": messages, **{key: value for key, value in told.items() if value}}
        if answers[0].is_plain:
            row = {"prompt": messages[0]["content"], "response": messages[1]["content"]}
        own_defaults = sorted({key for answer in answers for key in answer.left_to_server})
        return {
            "id": self.key,
            "source_id": self.source_id,
            **row,
            **as_entry((place, answer.ids) for place, answer in zip(places, answers, strict=True)),
            **answers_written(messages, places),
            "finish_reason": finish_reason,
            "truncated": finish_reason in CUT,
            "num_turns_left": sum(message is None for message in self.script) - len(answers),
            "sampling": asdict(self.sampling),
            **({"left_to_server": own_defaults} if own_defaults else {}),
            "sample": self.sample,
            "usage": {
                "prompt_tokens": sum(answer.num_prompt_tokens for answer in answers),
                "completion_tokens": sum(answer.num_tokens for answer in answers),
            },
        }

    def seed(self, turn: int) -> int:
        """The seed of a turn's answer, 31 bits: servers refuse larger and negative ones."""
        return int(_hash([self.key, turn])[:8], 16) >> 1


def exchanges(row: Row, sampling: SamplingConfig, *, turns: str) -> Iterator[Exchange]:
    """The conversations of a row, one for each of sampling.num_samples.

    Args: turns: `all`: the target answers all assistant turns; `last`: only the last one.
    Raises: BadInput, naming the row's origin, if it has no prompt or no user turn, or its messages are malformed.
    """
    data = known_keys(of_request(row.data))
    chat = _as_chat(data, row.origin, sampling.variables)
    script = script_of(chat.messages, turns=turns)
    if None not in script:
        raise BadInput(f"{row.origin}: no user turn to answer")
    own_id = data.get("id")
    for sample in range(sampling.num_samples):
        with naming_faults(row.data, row.origin):
            key = _hash([own_id, script, chat.tools, chat.variables, asdict(sampling), sample])
        source_id = row.origin if own_id is None else str(own_id)
        yield Exchange(key, source_id, script, chat.tools, sampling, sample, dict(chat.variables))


def _as_chat(data: dict[str, Any], origin: str, variables: dict[str, Any]) -> ChatRow:
    """The row as a chat; a plain prompt or an instruction is what the user says."""
    if is_chat(data):
        return chat_of(data, origin, defaults=variables)
    if "prompt" not in data and "instruction" not in data:
        keys = ", ".join(data) or "(none)"
        raise BadInput(f"{origin}: no prompt among the keys {keys}; it is read from {PROMPT_SHAPES}")
    text = plain_prompt(data, origin)
    asked = {**data, "turns": [text if "prompt" in data else text.removesuffix("\n\n")]}
    return chat_of(asked, origin, defaults=variables)


def _hash(data: Any) -> str:
    """32 hex digits of the SHA-256 of JSON data."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
