"""Maps a function over many rows in processes or a thread, in order, with a bounded number of pending items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")

ROWS_AT_A_TIME = 256  # sent to a worker in one chunk


def chunks(items: Iterable[T], *, size: int | None = None) -> Iterator[list[T]]:
    items = iter(items)
    while chunk := list(islice(items, size or ROWS_AT_A_TIME)):
        yield chunk


def in_order(function: Callable[[T], U], items: Iterable[T], *, num_workers: int) -> Iterator[U]:
    """Yield function(item) for each item, in order; with several workers computed in as many processes.

    An exception is raised when its item's result is due."""
    if num_workers == 1:
        yield from map(function, items)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_take, initargs=(function,)) as pool:
        yield from chain.from_iterable(_results(pool, _work, chunks(items), ahead=2 * num_workers))


def read_ahead(function: Callable[[T], U], items: Iterable[T], *, depth: int = 2) -> Iterator[U]:
    """Yield function(item) for each item, in order, computed by one thread up to `depth` items ahead.

    An exception is raised when its item's result is due."""
    with ThreadPoolExecutor(1, thread_name_prefix="read_ahead") as thread:
        yield from _results(thread, function, items, ahead=depth)


def _results(pool: Executor, function: Callable[[T], U], items: Iterable[T], *, ahead: int) -> Iterator[U]:
    waiting: deque[Future[U]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


_taken: list[Callable[[Any], Any]] = []  # in a worker: its function, sent only once since it may hold large objects


def _take(function: Callable[[Any], Any]) -> None:
    _taken.append(function)


def _work(items: list[Any]) -> list[Any]:
    return [_taken[0](item) for item in items]
