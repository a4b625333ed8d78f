"""Several streams of rows as one, in proportion to their weights."""

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

UNTIL = ("first", "all")  # which of the streams has to end for the mixture to end


def interleave(
    streams: Sequence[Iterator[T]], *, weights: Sequence[float], seed: int = 0, until: str = "first"
) -> Iterator[T]:
    """Items of all streams, each stream's in its own order, nothing twice; one item of each in memory at a time.

    Wherever the mixture is cut, each of n streams has given its share (weight / sum of weights) of the items to within
    one item for two streams, n - 1 items for more: the k-th item of a stream has a random place, by seed, in the k-th
    interval of length 1 / weight, and items come by place.

    until: `first`: the mixture ends where a stream has no more, so that the proportions hold to the end; `all`: the
    other streams go on in their proportions. Streams and weights (above 0) are of one length.
    """
    assert len(streams) == len(weights) and min(weights) > 0 and until in UNTIL
    sources = [random.Random(f"{seed} {index}") for index in range(len(streams))]
    counts = [0] * len(streams)

    def place(index: int) -> float:
        return (counts[index] + sources[index].random()) / weights[index]

    heap = [(place(index), index) for index in range(len(streams))]
    heapq.heapify(heap)
    while heap:
        _, index = heap[0]
        try:
            item = next(streams[index])
        except StopIteration:
            if until == "first":
                return
            heapq.heappop(heap)
            continue
        yield item
        counts[index] += 1
        heapq.heapreplace(heap, (place(index), index))
