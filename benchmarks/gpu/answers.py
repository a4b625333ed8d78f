"""Answers by continuous batching: how many tokens, and where the time went."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from ...eval.decoding.continuous import WaitingPrompt, answer_continuously
from ...eval.decoding.engine import Engine
from ...eval.decoding.replay import Replay, Stopwatch
from ...targets.target import Target
from ..store import Figures


@dataclass(frozen=True, kw_only=True)
class AnsweredQueue:
    """Prompts that were answered. The queue's end: all behind the last round in which every row had a text."""

    answers: dict[str, list[int]]
    num_rows: int
    rounds: list[tuple[float, int]]  # when each was launched, and for how many rows
    stopped: float
    seconds: float
    seconds_reading: float  # of the device, with what was recorded for it
    seconds_recording: float

    @property
    def num_full(self) -> int:
        """Rounds before the queue's end."""
        return max((i + 1 for i, (_, busy) in enumerate(self.rounds) if busy == self.num_rows), default=0)

    def figures(self, step_seconds: float) -> Figures:
        """Args: step_seconds: of a baseline step with as many rows."""
        launched = [when for when, _ in self.rounds]
        num_tokens, num_full = sum(map(len, self.answers.values())), self.num_full
        ends, busy = self.rounds[num_full:], sum(busy for _, busy in self.rounds[:num_full])
        seconds_end = self.stopped - ends[0][0] if ends else 0.0
        full = (num_tokens - sum(busy for _, busy in ends)) / (self.seconds - seconds_end)
        most = self.num_rows / step_seconds
        return {
            "num_prompts": len(self.answers),
            "tokens_per_second": round(num_tokens / self.seconds, 1),
            "step_ms": round(1000 * step_seconds, 3),
            "share_of_rows_over_step": round(num_tokens / self.seconds / most, 4),
            "share_before_the_queues_end": round(full / most, 4),
            "share_of_idle_rows_before": round(1 - busy / max(1, num_full * self.num_rows), 4),
            "num_rounds": len(self.rounds),
            "round_ms": round(1000 * statistics.median(after - before for before, after in pairwise(launched)), 3),
            "seconds_reading": round(self.seconds_reading, 3),
            "seconds_recording": round(self.seconds_recording, 3),
            "seconds_of_the_queues_end": round(seconds_end, 3),
        }


def answered(
    target: Target,
    prompts: list[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    now: Callable[[], float] = time.perf_counter,
) -> AnsweredQueue:
    """Answer prompts by continuous batching, with a note of each round, reading and recording."""
    watch, rounds, readings, recordings = Stopwatch(target.device), [], [], []
    verify, prefill, record = Engine.verify, Engine.prefill, Replay._record

    def noted_round(engine: Engine, state: Any, proposal: Any, ended: list[bool]) -> Any:
        if not all(ended):  # as where the first one allocates the cache
            rounds.append((now(), ended.count(False)))
        return verify(engine, state, proposal, ended)

    def noted_reading(*arguments: Any, **how: Any) -> Any:
        readings.append(watch.mark())
        result = prefill(*arguments, **how)
        readings.append(watch.mark())
        return result

    def noted_recording(*arguments: Any) -> Any:
        before = now()
        step = record(*arguments)
        recordings.append(now() - before)
        return step

    waiting = deque(WaitingPrompt(str(number), prompt) for number, prompt in enumerate(prompts))
    with ExitStack() as stack:
        for owner, name, noted in (
            (Engine, "verify", noted_round),
            (Engine, "prefill", noted_reading),
            (Replay, "_record", noted_recording),
        ):
            stack.enter_context(patch.object(owner, name, noted))
        started = now()
        answers = dict(answer_continuously(target, waiting, batch_size=batch_size, max_new_tokens=max_new_tokens))
        stopped = now()
    return AnsweredQueue(
        answers=answers, num_rows=batch_size, rounds=rounds, stopped=stopped, seconds=stopped - started,
        seconds_reading=sum(watch.between(*readings)[::2]), seconds_recording=sum(recordings),
    )  # fmt: skip
