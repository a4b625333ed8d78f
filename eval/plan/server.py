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
from .load import Request
from .rows import take_row


@dataclass
class Batch:
    """Rows that run together in an engine: numbers of their requests, their texts, and what the next round takes."""

    engine: Engine
    texts: Texts
    numbers: list[int]  # of the first rows; the others are idle
    state: DecodeState


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
        self.stop = stop or Stop.of(target)
        self.watch = Stopwatch(target.device)
        warm = sampling is not None and sampling.temperature > 0
        generator = torch.Generator(target.device).manual_seed(0) if warm else None

        def engine(batch_size: int) -> Engine:
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
        self.reader, self.engines = engine(1), {size: engine(size) for size in sizes}
        self.max_batch_size = max_batch_size
        for one in (self.reader, *self.engines.values()):  # caches come into being, steps are recorded
            texts = Texts([prompts[0]] * one.batch_size, 4, Stop(frozenset()))
            run_round(one, texts, prefill(one, texts, self.watch).state, self.watch)

    def serve(self, requests: Sequence[Request]) -> float:
        """See `load.Serves`."""
        return self.decode(requests)[1]

    def decode(self, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
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
                batch, seconds = self.join(batch, number, self.prompts[requests[number].number])
                requests[number].first = now + seconds
                now += self.watch.now() - began
            began = self.watch.now()
            if not all(batch.texts.ended):
                rows, rounds = rows + len(batch.numbers), rounds + 1
                _, batch.state = run_round(batch.engine, batch.texts, batch.state, self.watch)
            for place, number in enumerate(batch.numbers):
                if batch.texts.ended[place]:
                    new[number] = batch.texts.new[place]
                    requests[number].tokens = len(new[number])
                    requests[number].finish = now + self.watch.now() - began
            batch = self.regroup(batch, [place for place in range(len(batch.numbers)) if not batch.texts.ended[place]])
            now += self.watch.now() - began
        return new, rows / max(1, rounds)

    def empty(self, num_rows: int) -> Batch:
        """A batch with room for so many rows, all idle."""
        size = min(size for size in self.engines if size >= num_rows)
        texts = Texts([[] for _ in range(size)], self.max_new_tokens, self.stop)
        texts.ended = [True] * size
        nothing = torch.zeros(size, dtype=torch.long, device=self.target.device)
        return Batch(self.engines[size], texts, [], DecodeState(None, nothing[:, None].clone(), nothing))

    def join(self, batch: Batch, number: int, prompt: list[int]) -> tuple[Batch, float]:
        """Read a prompt, and copy its row behind the others; with the seconds until its first token was there."""
        texts = Texts([prompt], self.max_new_tokens, self.stop)
        first, state, _ = prefill(self.reader, texts, self.watch)
        place = len(batch.numbers)
        batch = self.regroup(batch, list(range(place)), num_rows=place + 1)
        self.move(batch.engine, place, self.reader, 0)
        batch.numbers.append(number)
        batch.texts.prompts[place], batch.texts.new[place], batch.texts.ended[place] = (
            prompt,
            texts.new[0],
            texts.ended[0],
        )
        batch.state.last[place], batch.state.start[place] = state.last[0], state.start[0]
        if state.read is not None:
            read = with_row(batch.state.read, place, state.read, num_rows=batch.engine.batch_size)
            batch.state = replace(batch.state, read=read)
        return batch, first.seconds

    def regroup(self, batch: Batch, places: list[int], *, num_rows: int = 0) -> Batch:
        """The rows at these places, in the smallest batch that holds them, and num_rows."""
        found = self.empty(max(len(places), num_rows, 1))
        if found.engine is batch.engine and places == list(range(len(batch.numbers))):
            return batch
        for place, old in enumerate(places):
            if found.engine is not batch.engine or place != old:
                self.move(found.engine, place, batch.engine, old)
            mine, other = found.texts, batch.texts
            mine.prompts[place], mine.new[place], mine.ended[place] = (
                other.prompts[old],
                other.new[old],
                other.ended[old],
            )
            found.state.last[place], found.state.start[place] = batch.state.last[old], batch.state.start[old]
        found.numbers = [batch.numbers[old] for old in places]
        if batch.state.read is not None:
            read = rows_of(batch.state.read, places, num_rows=found.engine.batch_size)
            found.state = replace(found.state, read=read)
        return found

    def move(self, into: Engine, row: int, source: Engine, source_row: int) -> None:
        """Copy a row's keys, values and what the drafter keeps of it."""
        take_row(into.cache, row, source.cache, source_row)
        take_row(into.state, row, source.state, source_row)


def rows_of(read: Reading, places: list[int], *, num_rows: int) -> Reading:
    """Those rows of a reading, and idle ones behind them up to num_rows."""

    def pick(tensor: Tensor) -> Tensor:
        picked = tensor.new_zeros(num_rows, *tensor.shape[1:])
        picked[: len(places)] = tensor[places]
        return picked

    output = TargetOutput(pick(read.output.features), pick(read.output.post_norm))
    return Reading(pick(read.tokens), pick(read.next_tokens), output, pick(read.start), pick(read.num_valid))


def with_row(read: Reading | None, place: int, row: Reading, *, num_rows: int) -> Reading:
    """A reading with another's only row in a place; of drafters on the host, prompts are wider than rounds."""
    if read is None:
        read = rows_of(row, [], num_rows=num_rows)
    width = max(read.tokens.shape[1], row.tokens.shape[1])

    def put(into: Tensor, one: Tensor) -> Tensor:
        wide = into.new_zeros(len(into), width, *into.shape[2:])
        wide[:, : into.shape[1]] = into
        wide[place, : one.shape[1]], wide[place, one.shape[1] :] = one[0], 0
        return wide

    output = TargetOutput(
        put(read.output.features, row.output.features), put(read.output.post_norm, row.output.post_norm)
    )
    start, num_valid = read.start.clone(), read.num_valid.clone()
    start[place], num_valid[place] = row.start[0], row.num_valid[0]
    return Reading(put(read.tokens, row.tokens), put(read.next_tokens, row.next_tokens), output, start, num_valid)
