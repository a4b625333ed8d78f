"""Continuous batching: where rows have ended, the next prompts are read and take their places in the batch."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ...targets.images.pictures import pictures_of
from ...targets.target import Target
from .engine import DecodeState, Engine
from .loop import Texts, prefill, run_round
from .replay import Stopwatch, default_steps
from .stopping import Stop

JOINING = 8  # on a GPU one in so many rows is idle before prompts are read, together: reading waits for launches there
LAUNCHED_WORK = 3 * 10**12  # weights times tokens; prompts with more take a GPU longer to compute than to launch
COMPILED_FROM = 10_000  # rounds; in fewer, the seconds that compiling takes for each shape are estimated not to pay


@dataclass(frozen=True)
class Launched:
    """A round of the baseline that the device runs. tokens: [B, 1] on the host, once `copied` is over. rows: those for
    which it decodes."""

    tokens: Tensor
    copied: torch.cuda.Event | None
    rows: set[int]


@dataclass(frozen=True)
class WaitingPrompt:
    """A prompt that waits for its answer. key: identifies the answer."""

    key: str
    prompt: list[int]


def answer_continuously(
    target: Target,
    waiting: deque[WaitingPrompt],
    *,
    batch_size: int,
    max_new_tokens: int,
    stop: Stop | None = None,
) -> Iterator[tuple[str, list[int]]]:
    """Greedy answers in the order in which they end, equal to those of `generate` for each prompt alone up to rounding.

    Args:
        waiting: the queue of prompts, which is emptied; the caller may append to it while it iterates.
        batch_size: rows that decode together.
        max_new_tokens: per answer.

    Yields: the key and the new tokens of each.
    """
    while waiting:
        # sets the capacity of this pass; longer prompts that are appended later wait for the next pass
        longest = max(len(asked.prompt) for asked in waiting)
        num_rows = min(batch_size, len(waiting))
        yield from _Pass(target, longest, num_rows, max_new_tokens, stop or Stop.of(target)).run(waiting)


class _Pass:
    """One batch of fixed capacity, run until no waiting prompt fits into it."""

    def __init__(self, target: Target, longest: int, batch_size: int, max_new_tokens: int, stop: Stop):
        self.longest, self.max_new_tokens = longest, max_new_tokens
        self.stop, self.watch = stop, Stopwatch(target.device)
        max_length, steps = longest + max_new_tokens, default_steps(target.device)
        num_joining = most_joining(target.device, batch_size)
        self.reader = Engine(target, None, batch_size=num_joining, max_length=max_length, steps=steps)
        if not target.has_states:
            self.reader.recorded_prompts = LAUNCHED_WORK // sum(weight.numel() for weight in target.model.parameters())
        self.engine = Engine(target, None, batch_size=batch_size, max_length=max_length, steps=steps)
        self.texts = Texts([[] for _ in range(batch_size)], max_new_tokens, self.stop)
        self.texts.ended = [True] * batch_size
        zeros = torch.zeros(batch_size, dtype=torch.long, device=target.device)
        self.state = DecodeState(None, zeros[:, None].clone(), zeros)
        self.keys: list[str | None] = [None] * batch_size  # None: an idle row
        self.last_read: list[list[int]] = []  # the prompts whose keys and values the reader holds
        # [B] 1 where a row has a text, else 0; on the device, where a round that is launched ahead need not wait for it
        self.is_busy = torch.zeros_like(zeros)
        self.is_ahead = launches_ahead(target.device)
        self.launched: Launched | None = None

    def run(self, waiting: deque[WaitingPrompt]) -> Iterator[tuple[str, list[int]]]:
        most_rounds = len(waiting) * self.max_new_tokens / len(self.keys)
        self.engine.compiles_layers &= most_rounds >= COMPILED_FROM
        while True:
            yield from self._join_waiting(waiting)
            if all(key is None for key in self.keys):
                return
            if self.is_ahead:
                self._advance_ahead()
            else:
                _, self.state = run_round(self.engine, self.texts, self.state, self.watch)
            for row, key in enumerate(self.keys):
                if key is not None and self.texts.ended[row]:
                    yield self._leave(row)

    def _advance_ahead(self) -> None:
        """Launch a round, and commit the one before while the device runs it: of a row that has ended one token more
        is decoded, and dropped."""
        before, self.launched = self.launched, self._launch()
        if before is None:
            return
        if before.copied is not None:
            before.copied.synchronize()
        rows = enumerate(before.tokens.tolist())
        self.texts.commit([0] * len(self.keys), [new if row in before.rows else [] for row, new in rows], num_drafted=0)

    def _launch(self) -> Launched:
        """Start a round behind the one before, whose tokens, one a row, may not have been read."""
        engine, state = self.engine, self.state
        engine.begin_round(self.texts.num_committed + bool(self.launched and self.launched.rows))
        engine.rehearse(state)
        chosen = engine.verify(state, engine.draft(None), self.texts.ended).committed.clone()  # [B, 1]
        self.state = DecodeState(None, chosen, state.start + self.is_busy)
        tokens, copied = chosen.to("cpu", non_blocking=True), None
        if chosen.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(chosen.device))
        return Launched(tokens, copied, {row for row, key in enumerate(self.keys) if key is not None})

    def _join_waiting(self, waiting: deque[WaitingPrompt]) -> Iterator[tuple[str, list[int]]]:
        """Let waiting prompts take idle rows, as many together as the reader reads; yields answers of one token."""
        while idle := [row for row, key in enumerate(self.keys) if key is None]:
            fitting = (asked for asked in waiting if len(asked.prompt) <= self.longest)
            joining = list(islice(fitting, min(len(idle), self.reader.batch_size)))
            is_last = len(joining) == len(waiting) or len(idle) == len(self.keys)
            if not joining or (len(joining) < self.reader.batch_size and not is_last):
                return
            for asked in joining:
                waiting.remove(asked)
            rows = idle[: len(joining)]
            self._join(rows, joining)
            yield from (self._leave(row) for row in rows if self.texts.ended[row])

    def _join(self, rows: list[int], joining: list[WaitingPrompt]) -> None:
        """Read prompts by themselves, and copy their keys, values and first tokens into rows."""
        prompts = [asked.prompt for asked in joining]
        prompts += prompts[:1] * (self.reader.batch_size - len(prompts))
        apart = Texts(prompts, self.max_new_tokens, self.stop)
        read = prefill(self.reader, apart, self.watch, num_kept=self._num_known(prompts)).state
        self.last_read = prompts
        if not self.engine.cache.is_filled:  # it is allocated by a batch's first forward: a round of idle rows
            run_round(self.engine, self.texts, self.state, self.watch)
        for source_row, (row, asked) in enumerate(zip(rows, joining, strict=True)):
            self.engine.cache.take_row(row, self.reader.cache, source_row)
            self.texts.prompts[row], self.texts.new[row] = asked.prompt, apart.new[source_row]
            self.texts.ended[row], self.keys[row] = apart.ended[source_row], asked.key
        if self.launched is not None:
            self.launched.rows.difference_update(rows)
        self.state.last[rows], self.state.start[rows] = read.last[: len(rows)], read.start[: len(rows)]
        self.is_busy[rows] = 1

    def _num_known(self, prompts: list[list[int]]) -> int:
        """Tokens with which all begin that lie in the reader's cache already, as chat templates begin alike.

        None with recurrent layers, of which only the state behind all of a prompt is kept, or with pictures, whose
        tokens are alike.
        """
        alike = [*self.last_read, *prompts]
        if not self.last_read or self.engine.target.has_states or any(map(pictures_of, alike)):
            return 0
        return min(min(num_shared(alike[0], prompt) for prompt in alike), min(map(len, prompts)) - 1)

    def _leave(self, row: int) -> tuple[str, list[int]]:
        key, tokens = self.keys[row], self.texts.new[row]
        assert key is not None
        self.keys[row], self.texts.prompts[row], self.texts.new[row] = None, [], []
        self.state.start[row] = self.is_busy[row] = 0  # an idle row reads few slots
        return key, tokens


def launches_ahead(device: torch.device) -> bool:
    """Whether a round is launched before the last one's tokens are read."""
    return device.type == "cuda"


def most_joining(device: torch.device, num_rows: int) -> int:
    """Prompts that are read together."""
    return max(1, num_rows // JOINING) if device.type == "cuda" else 1


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
