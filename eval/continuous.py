"""Continuous batching of answers: a row that ends makes room for the next prompt, which is read alone and joins."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..heads.target import Target
from .engine import DecodeState, Engine
from .generate import Stop, Texts, prefill, run_round
from .replay import Stopwatch


@dataclass(frozen=True)
class Asked:
    """A prompt that waits for its answer. key: by which the answer is told."""

    key: str
    prompt: list[int]


def answer_continuously(
    target: Target, waiting: deque[Asked], *, batch_size: int, max_new_tokens: int, stop: Stop | None = None
) -> Iterator[tuple[str, list[int]]]:
    """Greedy answers, as they end: the same as `generate` gives each prompt alone, up to rounding.

    Args:
        waiting: what is asked, emptied as it is answered; the caller may append while it takes answers.
        batch_size: rows that decode together.
        max_new_tokens: per answer.

    Yields: the key and the new tokens of each.
    """
    while waiting:
        # no row of this pass needs more slots; what is appended later and is longer waits for the next pass
        longest = max(len(asked.prompt) for asked in waiting)
        yield from _Pass(target, longest, min(batch_size, len(waiting)), max_new_tokens, stop).run(waiting)


class _Pass:
    """One batch of fixed capacity, from when its first row joins until no row is left that fits it."""

    def __init__(self, target: Target, longest: int, batch_size: int, max_new_tokens: int, stop: Stop | None):
        self.longest, self.max_new_tokens = longest, max_new_tokens
        self.stop, self.watch = stop or Stop.of(target), Stopwatch(target.device)
        max_length = longest + max_new_tokens
        self.reader = Engine(target, None, batch_size=1, max_length=max_length)
        self.engine = Engine(target, None, batch_size=batch_size, max_length=max_length)
        self.texts = Texts([[] for _ in range(batch_size)], max_new_tokens, self.stop)
        self.texts.ended = [True] * batch_size
        zeros = torch.zeros(batch_size, dtype=torch.long, device=target.device)
        self.state = DecodeState(None, zeros[:, None].clone(), zeros)
        self.keys: list[str | None] = [None] * batch_size  # None: an idle row

    def run(self, waiting: deque[Asked]) -> Iterator[tuple[str, list[int]]]:
        while True:
            for row in range(len(self.keys)):
                while self.keys[row] is None and (asked := self._next(waiting)) is not None:
                    self._join(row, asked)
                    if self.texts.ended[row]:  # at its first token
                        yield self._leave(row)
            if all(key is None for key in self.keys):
                return
            _, self.state = run_round(self.engine, self.texts, self.state, self.watch)
            for row, key in enumerate(self.keys):
                if key is not None and self.texts.ended[row]:
                    yield self._leave(row)

    def _next(self, waiting: deque[Asked]) -> Asked | None:
        for asked in waiting:
            if len(asked.prompt) <= self.longest:
                waiting.remove(asked)
                return asked
        return None

    def _join(self, row: int, asked: Asked) -> None:
        """Read a prompt alone, and copy its keys, values and first token into the row."""
        alone = Texts([asked.prompt], self.max_new_tokens, self.stop)
        read = prefill(self.reader, alone, self.watch).state
        if not self.engine.cache.is_filled:  # comes into being with the first forward of the batch
            run_round(self.engine, self.texts, self.state, self.watch)
        self.engine.cache.take_row(row, self.reader.cache, 0)
        self.state.last[row], self.state.start[row] = read.last[0], read.start[0]
        self.texts.prompts[row], self.texts.new[row] = asked.prompt, alone.new[0]
        self.texts.ended[row], self.keys[row] = alone.ended[0], asked.key

    def _leave(self, row: int) -> tuple[str, list[int]]:
        key, tokens = self.keys[row], self.texts.new[row]
        assert key is not None
        self.keys[row], self.texts.prompts[row], self.texts.new[row] = None, [], []
        self.state.start[row] = 0  # an idle row reads few slots
        return key, tokens
