"""Turns a row into a conversation with the target: which turns it answers, a key for resuming, the resulting row."""

import hashlib
import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from ...configs.errors import BadInput
from ...configs.jsonl import loads, naming_faults
from ..config import check_at_least_one
from ..masks.messages import Message, normalise
from ..row_shapes import known_keys
from ..sources import Row

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

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class Answer:
    """The target's answer to a request."""

    message: Message
    finish_reason: str  # `stop`, `length` (cut at max_tokens), `tool_calls`, or another one of the server
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    left_to_server: tuple[str, ...] = ()  # sampling settings that the server refused to be told


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

    @property
    def length(self) -> int:
        """Characters of the given messages, to group conversations of similar length."""
        return sum(len(message["content"]) for message in self.script if message is not None)

    def talk(self) -> Generator[ChatRequest, Answer, dict[str, Any]]:
        """A generator that yields a request for each turn, is sent its answer, and returns the answered row.

        The history of a request has the new answers to earlier turns, reasoning included, as the chat template gets it
        in training. An answer that was cut or calls a tool ends the conversation, because the row's later turns do not
        reply to it.
        """
        messages: list[Message] = []
        answers: list[Answer] = []
        for turn, message in enumerate(self.script):
            if message is not None:
                messages.append(message)
                continue
            answer = yield ChatRequest(list(messages), self.tools, self.sampling, self.seed(turn))
            messages.append(answer.message)
            answers.append(answer)
            if answer.finish_reason != "stop" or "tool_calls" in answer.message:
                break
        tools = {} if self.tools is None else {"tools": self.tools}
        finish_reason = answers[-1].finish_reason
        own_defaults = sorted({key for answer in answers for key in answer.left_to_server})
        return {
            "id": self.key,
            "source_id": self.source_id,
            "messages": messages,
            **tools,
            "finish_reason": finish_reason,
            "truncated": finish_reason == "length",
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
    data = known_keys(row.data)
    script = ask(_messages(data, row.origin), turns=turns)
    if None not in script:
        raise BadInput(f"{row.origin}: no user turn to answer")
    tools = data.get("tools") or None
    try:
        tools = loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise BadInput(f"{row.origin}: `tools` is not JSON: {error}") from error
    own_id = data.get("id")
    for number in range(sampling.num_samples):
        sample = row.epoch * sampling.num_samples + number
        with naming_faults(row.data, row.origin):
            key = _hash([own_id, script, tools, asdict(sampling), sample])
        source_id = row.origin if own_id is None else str(own_id)
        yield Exchange(key, source_id, script, tools, sampling, sample)


def ask(messages: list[Message], *, turns: str) -> list[Message | None]:
    """The messages with None in place of each turn that the target answers; one is added after a final question.

    Consecutive assistant turns are one answer. Assistant turns before the first question stay as they are, as do tool
    calls whose results are in the row, because a new call would need a new result.
    """
    groups = groupby(messages, key=lambda message: message["role"] == "assistant")
    runs = [(is_answer, list(run)) for is_answer, run in groups]
    if not runs[-1][0]:
        runs.append((True, []))
    script: list[Message | None] = []
    has_question = False
    for index, (is_answer, run) in enumerate(runs):
        has_question |= any(message["role"] in ("user", "tool") for message in run)
        is_last = index == len(runs) - 1
        has_result = is_answer and not is_last and runs[index + 1][1][0]["role"] == "tool"
        is_asked = is_answer and has_question and not has_result and (is_last or turns == "all")
        script += [None] if is_asked else run
    return script


def _messages(data: dict[str, Any], origin: str) -> list[Message]:
    if "messages" in data or "conversations" in data:
        return normalise(data.get("messages", data.get("conversations")), origin)
    if "turns" in data:
        if not isinstance(data["turns"], list) or not data["turns"]:
            raise BadInput(f"{origin}: `turns` should be a list of texts with at least one")
        questions = [{"role": "user", "content": text} for text in data["turns"]]
        between = [{"role": "assistant", "content": ""}] * len(questions)
        return normalise([turn for pair in zip(questions, between, strict=True) for turn in pair], origin)
    for key in ("prompt", "instruction"):
        if key in data:
            parts = [data[key], *([data["input"]] if key == "instruction" and data.get("input") else [])]
            if not all(isinstance(part, str) for part in parts):
                raise BadInput(f"{origin}: `{key}` should be text")
            return [{"role": "user", "content": "\n\n".join(parts)}]
    raise BadInput(f"{origin}: no prompt among the keys {', '.join(data) or '(none)'}; it is read from {PROMPT_SHAPES}")


def _hash(data: Any) -> str:
    """32 hex digits of the SHA-256 of JSON data."""
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
