"""Mixes several streams of rows in proportion to their weights."""

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def interleave(streams: Sequence[Iterator[T]], *, weights: Sequence[float], seed: int = 0) -> Iterator[T]:
    """Yield the items of all streams, each stream in its own order, until the first ends, so that the proportions hold
    to the end; at most one item per stream is in memory.

    The k-th item of a stream has a random position in the k-th interval of length 1 / weight, and items are sorted by
    position. So after any number of items, each of n streams has had its share (weight / sum of weights) of them, to
    within one item for two streams, and n - 1 items for more.

    Args: weights: above 0, one for each stream.
    """
    assert len(streams) == len(weights) and min(weights) > 0
    sources = [random.Random(f"{seed} {index}") for index in range(len(streams))]
    counts = [0] * len(streams)

    def place(index: int) -> float:
        return (counts[index] + sources[index].random()) / weights[index]

    heap = [(place(index), index) for index in range(len(streams))]
    heapq.heapify(heap)
    while True:
        _, index = heap[0]
        try:
            item = next(streams[index])
        except StopIteration:
            return
        yield item
        counts[index] += 1
        heapq.heapreplace(heap, (place(index), index))
