"""Continuous batching with this engine: requests join a running batch when there is room, and leave when they end.

A request's prompt is read alone, while the others wait; then its row is copied into the batch. The batch runs in the
smallest of several engines (1, 2, 4, ... rows) that holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...heads.drafter import Drafter, Reading
from ...heads.target import Target, TargetOutput
from ..engine import DecodeState, Engine, build_engine
from ..generate import Stopwatch, Texts, prefill, run_round
from ..measurement.config import DraftSetting
from ..sampling import Sampling
from ..stopping import Stop
from .load import ServedRequest
from .rows import take_row


@dataclass
class RunningBatch:
    """Rows that run together in an engine, their texts, and what the next round takes."""

    engine: Engine
    texts: Texts
    state: DecodeState
    numbers: list[int]  # of the requests of the first rows; the others are idle

    def take(self, row: int, engine: Engine, texts: Texts, state: DecodeState, source_row: int) -> None:
        """Copy a row: its text, its keys and values, and what the drafter keeps of it; all but `state.read`."""
        if engine is not self.engine or row != source_row:
            take_row(self.engine.cache, row, engine.cache, source_row)
            take_row(self.engine.state, row, engine.state, source_row)
        self.texts.prompts[row] = texts.prompts[source_row]
        self.texts.new[row] = texts.new[source_row]
        self.texts.ended[row] = texts.ended[source_row]
        self.state.last[row], self.state.start[row] = state.last[source_row], state.start[source_row]


class LiveServer:
    """Decodes requests as they arrive, in a time of its own that counts what was computed, and waits for nobody."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        setting: DraftSetting | None,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        max_batch_size: int,
        stop: Stop | None = None,
        sampling: Sampling | None = None,
        steps: str = "eager",
    ):
        """Args: as of `Engine`. prompts: what requests ask, by their numbers. setting: None to draft nothing."""
        self.target, self.prompts, self.max_new_tokens = target, prompts, max_new_tokens
        self.stop, self.max_batch_size = stop or Stop.of(target), max_batch_size
        self.watch = Stopwatch(target.device)
        draws = sampling is not None and sampling.temperature > 0
        generator = torch.Generator(target.device).manual_seed(0) if draws else None

        def new_engine(batch_size: int) -> Engine:
            return build_engine(
                target,
                drafter,
                setting,
                batch_size=batch_size,
                max_length=max(map(len, prompts)) + max_new_tokens,
                sampling=sampling,
                steps=steps,
                generator=generator,
            )

        sizes = [1 << i for i in range((max_batch_size - 1).bit_length() + 1)]
        self.reader, self.engines = new_engine(1), {size: new_engine(size) for size in sizes}
        for engine in (self.reader, *self.engines.values()):  # caches come into being, steps are recorded
            texts = Texts([prompts[0]] * engine.batch_size, 4, Stop(frozenset()))
            run_round(engine, texts, prefill(engine, texts, self.watch).state, self.watch)

    def serve(self, requests: Sequence[ServedRequest]) -> float:
        """See `load.Server`."""
        return self.decode(requests)[1]

    def decode(self, requests: Sequence[ServedRequest]) -> tuple[list[list[int]], float]:
        """Run until all have ended, filling in when each got its first and last token.

        Args: requests: by time of arrival, in seconds.

        Returns: the new tokens of each, and the mean number of rows per round.
        """
        waiting, new = list(range(len(requests))), [[] for _ in requests]
        batch, now, rows, rounds = self.empty(1), 0.0, 0, 0
        while waiting or batch.numbers:
            if not batch.numbers:
                now = max(now, requests[waiting[0]].arrival)
            while waiting and requests[waiting[0]].arrival <= now and len(batch.numbers) < self.max_batch_size:
                began, number = self.watch.now(), waiting.pop(0)
                batch, seconds = self.join(batch, number, self.prompts[requests[number].prompt])
                requests[number].first = now + seconds
                now += self.watch.now() - began
            began = self.watch.now()
            if not all(batch.texts.ended):
                rows, rounds = rows + len(batch.numbers), rounds + 1
                _, batch.state = run_round(batch.engine, batch.texts, batch.state, self.watch)
            for row, number in enumerate(batch.numbers):
                if batch.texts.ended[row]:
                    new[number] = batch.texts.new[row]
                    requests[number].tokens = len(new[number])
                    requests[number].finish = now + self.watch.now() - began
            batch = self.regroup(batch, [row for row in range(len(batch.numbers)) if not batch.texts.ended[row]])
            now += self.watch.now() - began
        return new, rows / max(1, rounds)

    def empty(self, num_rows: int) -> RunningBatch:
        """A batch with room for so many rows, all idle."""
        size = min(size for size in self.engines if size >= num_rows)
        texts = Texts([[] for _ in range(size)], self.max_new_tokens, self.stop)
        texts.ended = [True] * size
        zeros = torch.zeros(size, dtype=torch.long, device=self.target.device)
        return RunningBatch(self.engines[size], texts, DecodeState(None, zeros[:, None].clone(), zeros), [])

    def join(self, batch: RunningBatch, number: int, prompt: list[int]) -> tuple[RunningBatch, float]:
        """Read a prompt, and copy its row behind the others; with the seconds until its first token was there."""
        texts, row = Texts([prompt], self.max_new_tokens, self.stop), len(batch.numbers)
        first, state, _ = prefill(self.reader, texts, self.watch)
        batch = self.regroup(batch, list(range(row)), num_rows=row + 1)
        batch.take(row, self.reader, texts, state, 0)
        batch.numbers.append(number)
        if state.read is not None:
            read = with_row(batch.state.read, row, state.read, num_rows=batch.engine.batch_size)
            batch.state = replace(batch.state, read=read)
        return batch, first.seconds

    def regroup(self, batch: RunningBatch, rows: list[int], *, num_rows: int = 0) -> RunningBatch:
        """These rows, in the smallest batch that holds them, and num_rows."""
        regrouped = self.empty(max(len(rows), num_rows, 1))
        if regrouped.engine is batch.engine and rows == list(range(len(batch.numbers))):
            return batch
        for row, source_row in enumerate(rows):
            regrouped.take(row, batch.engine, batch.texts, batch.state, source_row)
        regrouped.numbers = [batch.numbers[row] for row in rows]
        if batch.state.read is not None:
            read = rows_of(batch.state.read, rows, num_rows=regrouped.engine.batch_size)
            regrouped.state = replace(regrouped.state, read=read)
        return regrouped


def rows_of(read: Reading, rows: list[int], *, num_rows: int) -> Reading:
    """Those rows of a reading, and idle ones behind them up to num_rows."""

    def pick(tensor: Tensor) -> Tensor:
        picked = tensor.new_zeros(num_rows, *tensor.shape[1:])
        picked[: len(rows)] = tensor[rows]
        return picked

    output = TargetOutput(pick(read.output.features), pick(read.output.post_norm))
    return Reading(pick(read.tokens), pick(read.next_tokens), output, pick(read.start), pick(read.num_valid))


def with_row(read: Reading | None, row: int, single: Reading, *, num_rows: int) -> Reading:
    """A reading with the only row of another in a row; of drafters on the host, prompts are wider than rounds."""
    if read is None:
        read = rows_of(single, [], num_rows=num_rows)
    width = max(read.tokens.shape[1], single.tokens.shape[1])

    def put(into: Tensor, source: Tensor) -> Tensor:
        wide = into.new_zeros(len(into), width, *into.shape[2:])
        wide[:, : into.shape[1]] = into
        wide[row, : source.shape[1]], wide[row, source.shape[1] :] = source[0], 0
        return wide

    features = put(read.output.features, single.output.features)
    output = TargetOutput(features, put(read.output.post_norm, single.output.post_norm))
    start, num_valid = read.start.clone(), read.num_valid.clone()
    start[row], num_valid[row] = single.start[0], single.num_valid[0]
    tokens, next_tokens = put(read.tokens, single.tokens), put(read.next_tokens, single.next_tokens)
    return Reading(tokens, next_tokens, output, start, num_valid)
