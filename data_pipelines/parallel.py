"""Work on many rows by several processes, in order, with a bounded number of rows under way."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")

ROWS_AT_A_TIME = 256  # that go to a worker


def chunks(rows: Iterable[T]) -> Iterator[list[T]]:
    rows = iter(rows)
    while chunk := list(islice(rows, ROWS_AT_A_TIME)):
        yield chunk


def in_order(function: Callable[[T], U], items: Iterable[T], *, num_workers: int) -> Iterator[U]:
    """function of each item, in order; with one worker in this process. What it raises comes out in its turn."""
    if num_workers == 1:
        yield from map(function, items)
        return
    how: dict[str, Any] = {"mp_context": get_context("spawn"), "initializer": _take, "initargs": (function,)}
    with ProcessPoolExecutor(num_workers, **how) as pool:
        waiting: deque[Any] = deque()
        for item in items:
            waiting.append(pool.submit(_work, item))
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_taken: list[Callable[[Any], Any]] = []  # in a worker: its function, sent once, with what may be large in it


def _take(function: Callable[[Any], Any]) -> None:
    _taken.append(function)


def _work(item: Any) -> Any:
    return _taken[0](item)
