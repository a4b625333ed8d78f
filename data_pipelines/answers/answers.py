"""Asking the target: a request, its answer, and two ways through many conversations, by threads and in batches."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from queue import Queue
from threading import Thread
from typing import Any, Protocol, TypeVar

from ...configs.errors import BadInput
from ..masks.messages import Message

T = TypeVar("T")
BATCHES_IN_WINDOW = 16  # among which rows are sorted by length


@dataclass(kw_only=True, frozen=True)
class SamplingConfig:
    """How answers are sampled; the defaults are the target's own distribution.

    temperature: 0 is greedy. top_p: 1 is off. top_k: 0 is off. max_tokens: of one answer, its reasoning included.
    seed: of everything drawn. num_samples: answers per prompt. thinking: what the chat template is told as
    `enable_thinking`; None: nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 2048
    seed: int = 0
    num_samples: int = 1
    thinking: bool | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature {self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")
        if self.top_k < 0:
            raise BadInput(f"top_k {self.top_k}: expected 0 (off) or more")
        for name in ("max_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")


@dataclass(frozen=True)
class Request:
    """One turn to answer. messages: OpenAI messages, tool-call arguments as objects. tools: as OpenAI has them.

    seed: of this answer alone, so that it does not depend on what else is asked.
    """

    messages: list[Message]
    tools: list[Any] | None
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the target said. finish_reason: `stop`, `length` (cut at max_tokens), `tool_calls`, or the server's word."""

    message: Message
    finish_reason: str
    num_prompt_tokens: int = 0
    num_tokens: int = 0


class Failure(Exception):
    """A conversation that could not be answered, and why, in one line; the others go on."""


class Conversation(Protocol):
    """What is asked turn by turn: `talk` yields requests, is sent their answers, and returns the finished row."""

    @property
    def key(self) -> str: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def length(self) -> int: ...
    def talk(self) -> Generator[Request, Answer, dict[str, Any]]: ...


Outcome = tuple[str, dict[str, Any] | Failure]  # key of the conversation; its row, or why there is none


def by_threads(
    conversations: Iterable[Conversation],
    *,
    answer: Callable[[Request], Answer],
    num_threads: int,
    is_done: Callable[[str], bool],
) -> Iterator[Outcome]:
    """Outcomes as they come, `num_threads` conversations at a time. What `answer` raises but Failure ends it all.

    is_done: told a key, says whether that conversation is answered already and to be left out.
    """
    waiting: Queue[Conversation | None] = Queue()
    finished: Queue[Outcome | BaseException] = Queue()

    def work() -> None:
        while (conversation := waiting.get()) is not None:
            try:
                finished.put((conversation.key, _through(conversation, answer)))
            except BaseException as error:  # goes to whoever waits for outcomes
                finished.put(error)

    for _ in range(num_threads):
        Thread(target=work, daemon=True).start()  # daemons: an interrupted run need not wait for slow answers
    num_open = 0
    try:
        for conversation in conversations:
            if is_done(conversation.key):
                continue
            if num_open == 2 * num_threads:  # so that a thread that is done finds the next one waiting
                yield _outcome(finished)
                num_open -= 1
            waiting.put(conversation)
            num_open += 1
        while num_open:
            yield _outcome(finished)
            num_open -= 1
    finally:
        while not waiting.empty():
            waiting.get()
        for _ in range(num_threads):
            waiting.put(None)


def _through(conversation: Conversation, answer: Callable[[Request], Answer]) -> dict[str, Any] | Failure:
    talk = conversation.talk()
    try:
        request = next(talk)
        while True:
            request = talk.send(answer(request))
    except StopIteration as end:
        return end.value
    except Failure as failure:
        return failure


def _outcome(finished: "Queue[Outcome | BaseException]") -> Outcome:
    outcome = finished.get()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def in_batches(
    conversations: Iterable[Conversation],
    *,
    answer: Callable[[list[Request]], list[Answer | Failure]],
    batch_size: int,
    is_done: Callable[[str], bool],
) -> Iterator[Outcome]:
    """Outcomes of batches of like length and equal sampling; a batch of which all are done is skipped.

    Which conversations share a batch depends on all of them, done or not, and a batch is asked as a whole: so an answer
    that depends on its batch (one stream of random numbers, rounding) is the same again in a resumed run. What was done
    of a batch comes a second time.
    """
    for window in _portions(conversations, BATCHES_IN_WINDOW * batch_size):
        window.sort(key=lambda one: (repr(one.sampling), one.length, one.key))
        for _, alike in groupby(window, key=lambda one: repr(one.sampling)):
            for batch in _portions(alike, batch_size):
                if not all(is_done(one.key) for one in batch):
                    yield from _together(batch, answer)


def _together(
    batch: list[Conversation], answer: Callable[[list[Request]], list[Answer | Failure]]
) -> Iterator[Outcome]:
    """The conversations of a batch turn by turn: the first turns of all of them, the second ones, ..."""
    talks = {one.key: one.talk() for one in batch}
    requests = {key: next(talk) for key, talk in talks.items()}
    while requests:
        answers = answer(list(requests.values()))
        for key, answered in zip(list(requests), answers, strict=True):
            if isinstance(answered, Failure):
                del requests[key]
                yield key, answered
                continue
            try:
                requests[key] = talks[key].send(answered)
            except StopIteration as end:
                del requests[key]
                yield key, end.value


def _portions(items: Iterable[T], size: int) -> Iterator[list[T]]:
    items = iter(items)
    while portion := list(islice(items, size)):
        yield portion
