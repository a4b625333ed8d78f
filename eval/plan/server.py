"""Continuous batching with this engine: requests join a running batch when there is room, and leave when they end.

A request's prompt is read by itself while the others wait; then its row is copied into the batch. The batch runs in the
smallest of several engines (1, 2, 4, ... rows) that holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding.continuous import stacked, take_row
from ..decoding.draft_setting import DraftSetting
from ..decoding.engine import DecodeState, Engine
from ..decoding.loop import Texts, prefill, run_round
from ..decoding.replay import Stopwatch
from ..decoding.stopping import Stop
from ..measurement.config import MeasureConfig
from ..measurement.runner import build_engine
from .load import ServedRequest


@dataclass(eq=False)
class RunningBatch:
    """Rows that run together in an engine, their texts, and what the next round takes."""

    engine: Engine
    texts: Texts
    state: DecodeState
    requests: list[ServedRequest]  # of the first rows; the others are idle

    def take(self, row: int, source: "RunningBatch", source_row: int) -> None:
        """Copy a row: its text, its keys and values, and what the drafter keeps of it; all but `state.read`."""
        if source.engine is not self.engine or row != source_row:
            take_row(self.engine.cache, row, source.engine.cache, source_row)
            take_row(self.engine.state, row, source.engine.state, source_row)
        self.texts.prompts[row] = source.texts.prompts[source_row]
        self.texts.new[row] = source.texts.new[source_row]
        self.texts.ended[row] = source.texts.ended[source_row]
        self.state.last[row], self.state.start[row] = source.state.last[source_row], source.state.start[source_row]
        self.requests.append(source.requests[source_row])


Row = tuple[RunningBatch, int]


class LiveServer:
    """Decodes requests; `load.serve` brings them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        setting: DraftSetting | None,
        prompts: Sequence[list[int]],
        config: MeasureConfig,
        *,
        max_batch_size: int,
        stop: Stop | None = None,
    ):
        """Args: as of `Engine`. prompts: what requests ask, by their numbers. setting: None to draft nothing."""
        self.target, self.prompts, self.max_new_tokens = target, prompts, config.max_new_tokens
        self.stop, self.max_batch_size = stop or Stop.of(target), max_batch_size
        self.watch = Stopwatch(target.device)
        generator = torch.Generator(target.device).manual_seed(0) if config.temperature > 0 else None
        length = max(map(len, prompts)) + config.max_new_tokens

        def new_engine(batch_size: int) -> Engine:
            return build_engine(
                target,
                drafter,
                setting,
                batch_size=batch_size,
                max_length=length,
                sampling=config.sampling,
                steps=config.steps,
                generator=generator,
            )

        sizes = [1 << i for i in range((max_batch_size - 1).bit_length() + 1)]
        self.reader, self.engines = new_engine(1), {size: new_engine(size) for size in sizes}
        for engine in (self.reader, *self.engines.values()):  # allocate caches and record steps beforehand
            texts = Texts([prompts[0]] * engine.batch_size, 4, Stop(frozenset()))
            _, state = run_round(engine, texts, prefill(engine, texts, self.watch).state, self.watch)
            for num_bits in range(engine.num_slots.bit_length() + 1):  # steps read powers of two of slots
                engine.begin_round(1 << num_bits)
                if engine is not self.reader:  # which runs no rounds
                    engine.rehearse(state)
        self.batch = self.gathered([])
        self.rows: list[Row] = []  # that take part in the next round

    def join(self, request: ServedRequest) -> tuple[float, float]:
        """See `load.Server`."""
        began = self.watch.now()
        texts = Texts([self.prompts[request.prompt]], self.max_new_tokens, self.stop)
        first, state, _ = prefill(self.reader, texts, self.watch)
        self.batch = self.gathered([*self.rows, (RunningBatch(self.reader, texts, state, [request]), 0)])
        self.rows = [(self.batch, row) for row in range(len(self.batch.requests))]
        return first.seconds, self.watch.now() - began

    def run_round(self) -> tuple[list[ServedRequest], float]:
        """See `load.Server`."""
        began = self.watch.now()
        batch = self.batch = self.gathered(self.rows)
        if not all(batch.texts.ended):
            _, batch.state = run_round(batch.engine, batch.texts, batch.state, self.watch)
        ended = []
        for row, request in enumerate(batch.requests):
            if batch.texts.ended[row]:
                request.token_ids, request.tokens = batch.texts.new[row], len(batch.texts.new[row])
                ended.append(request)
        self.rows = [(batch, row) for row in range(len(batch.requests)) if not batch.texts.ended[row]]
        return ended, self.watch.now() - began

    def gathered(self, rows: list[Row]) -> RunningBatch:
        """These rows, in the smallest engine that holds them; the same batch where they are all of it."""
        size = min(size for size in self.engines if size >= len(rows))
        if rows and rows == [(self.batch, row) for row in range(len(self.batch.requests))]:
            return self.batch
        texts = Texts([[] for _ in range(size)], self.max_new_tokens, self.stop)
        texts.ended = [True] * size
        zeros = torch.zeros(size, dtype=torch.long, device=self.target.device)
        batch = RunningBatch(self.engines[size], texts, DecodeState(None, zeros[:, None].clone(), zeros), [])
        for row, (source, source_row) in enumerate(rows):
            batch.take(row, source, source_row)
        reads = [(source.state.read, row) for source, row in rows if source.state.read is not None]
        if reads:
            batch.state = replace(batch.state, read=stacked(reads, num_rows=size))
        return batch
