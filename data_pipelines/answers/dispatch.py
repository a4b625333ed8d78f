"""Three ways to get many conversations answered: `by_threads` (servers), `in_batches` (this process, sampled answers,
which share a random number stream), `joining` (this process, greedy answers with continuous batching)."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from threading import Thread
from typing import Any

from ..rows.parallel import chunks
from .conversations import Answer, ChatRequest, Exchange, Failure

BATCHES_IN_WINDOW = 16  # conversations of so many batches are sorted before they are batched

Outcome = tuple[str, dict[str, Any] | Failure]  # key of the conversation; its row, or why there is none


def by_threads(
    conversations: Iterable[Exchange],
    *,
    answer: Callable[[ChatRequest], Answer],
    num_threads: int,
    is_done: Callable[[str], bool],
) -> Iterator[Outcome]:
    """Yield outcomes in the order in which they finish, with `num_threads` conversations at a time.

    Args:
        answer: answers one request. A Failure becomes the conversation's outcome; any other exception is raised here.
        is_done: whether the conversation with a key is answered already; these are skipped.
    """
    waiting: Queue[Exchange | None] = Queue()
    finished: Queue[Outcome | BaseException] = Queue()

    def answered(requests: list[ChatRequest]) -> list[Answer | Failure]:
        try:
            return [answer(request) for request in requests]
        except Failure as failure:
            return [failure]

    def work() -> None:
        while (conversation := waiting.get()) is not None:
            try:
                finished.put(next(_turn_by_turn([conversation], answered)))
            except BaseException as error:  # raised again in the consumer's thread
                finished.put(error)

    def next_outcome() -> Outcome:
        outcome = finished.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    for _ in range(num_threads):
        Thread(target=work, daemon=True).start()  # daemons: an interrupted run need not wait for slow answers
    num_open = 0
    try:
        for conversation in conversations:
            if is_done(conversation.key):
                continue
            if num_open == 2 * num_threads:  # enough that an idle thread always finds a waiting conversation
                yield next_outcome()
                num_open -= 1
            waiting.put(conversation)
            num_open += 1
        for _ in range(num_open):
            yield next_outcome()
    finally:
        while not waiting.empty():
            waiting.get()
        for _ in range(num_threads):
            waiting.put(None)


def in_batches(
    conversations: Iterable[Exchange],
    *,
    answer: Callable[[list[ChatRequest]], list[Answer | Failure]],
    batch_size: int,
    is_done: Callable[[str], bool],
) -> Iterator[Outcome]:
    """Yield outcomes batch by batch; conversations of a batch have similar length.

    Batches do not depend on which conversations are done, and a batch is answered as a whole. So an answer that depends
    on its batch (by the shared random number stream, or by rounding) is the same in a resumed run. A batch is skipped
    if all of it is done; otherwise its done conversations are yielded again.
    """
    for window in chunks(conversations, size=BATCHES_IN_WINDOW * batch_size):
        window.sort(key=lambda conversation: (conversation.length, conversation.key))
        for batch in chunks(window, size=batch_size):
            if not all(is_done(conversation.key) for conversation in batch):
                yield from _turn_by_turn(batch, answer)


def _turn_by_turn(
    batch: list[Exchange], answer: Callable[[list[ChatRequest]], list[Answer | Failure]]
) -> Iterator[Outcome]:
    """The conversations of a batch: the first turns of all of them, then the second turns, ..."""
    talks = {conversation.key: conversation.talk() for conversation in batch}
    requests = {key: next(talk) for key, talk in talks.items()}
    while requests:
        answers = answer(list(requests.values()))
        for key, answered in zip(list(requests), answers, strict=True):
            try:
                requests[key] = talks[key].send(answered)
            except StopIteration as end:
                del requests[key]
                yield key, end.value


def joining(
    conversations: Iterable[Exchange],
    *,
    answers: Callable[[deque[tuple[str, ChatRequest]]], Iterator[tuple[str, Answer | Failure]]],
    batch_size: int,
    is_done: Callable[[str], bool],
) -> Iterator[Outcome]:
    """Yield outcomes in the order in which they finish, for answers that depend only on their own conversation.

    Prompts that begin alike follow each other, as what one shares with the one before it is not read again.

    Args: answers: answers the requests of a queue, to which the conversations' later turns are appended meanwhile.
    """
    undone = (conversation for conversation in conversations if not is_done(conversation.key))
    for window in chunks(undone, size=BATCHES_IN_WINDOW * batch_size):
        window.sort(key=lambda conversation: (conversation.beginning, conversation.key))
        talks = {conversation.key: conversation.talk() for conversation in window}
        waiting = deque((key, next(talk)) for key, talk in talks.items())
        for key, answered in answers(waiting):
            try:
                waiting.append((key, talks[key].send(answered)))
            except StopIteration as end:
                yield key, end.value
