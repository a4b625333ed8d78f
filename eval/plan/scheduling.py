"""Verifying the drafts that pay, as a drafter's confidence says, against a fixed K: which is faster at which load.

Both are simulated from the same records, all rows busy. A text is decoded once, a token at a time, and at each position
K tokens are drafted and verified, but not committed; so what every schedule would have accepted of that text is known.
Greedy texts are replayed exactly, except that a shorter fixed K counts as the first drafts of the longest one. Sampled
texts are replayed as if what follows had been drawn anew at each position.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch

from ...heads.drafter import Drafter
from ...heads.drafting import worth_verifying
from ...heads.target import Target
from ..decoding.draft_setting import chain
from ..decoding.verify import AcceptedPath, AcceptRule, Candidates, accept_chain
from ..measurement.config import MeasureConfig
from ..measurement.metrics import LEAST_TIMED
from ..measurement.runner import Runner
from .prediction import LEAST_GAIN, StepTimes

LEAST_ROUNDS = 256  # simulated of each load


@dataclass(frozen=True)
class WatchedText:
    """A text of T tokens behind its first. estimates [T, K] of the drafts at each position; accepted [T] of them."""

    estimates: np.ndarray
    accepted: np.ndarray


@torch.no_grad()
def watch_texts(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], config: MeasureConfig, *, num_draft_tokens: int
) -> list[WatchedText]:
    """Decode the prompts, config.batch_size at a time, and record what would have been accepted at each position."""
    seen, texts = list[torch.Tensor](), list[WatchedText]()

    def watch(drafted: Candidates) -> AcceptedPath:
        chosen = drafted.chosen()
        seen.append(accept_chain(chosen, drafted.tokens))
        return AcceptedPath(torch.zeros_like(seen[-1]), drafted.parents + 1, chosen[:, 0])

    verifies_all = replace(chain(num_draft_tokens), verify_cost=0.0)  # and estimates them
    rule = AcceptRule("watch", watch, takes_offered=True)
    run = Runner(target, drafter, [*prompts], replace(config, setting=verifies_all, accept=rule, steps="eager"))
    for i in range(0, len(prompts), config.batch_size):
        seen.clear()
        text = run([*prompts[i : i + config.batch_size]], config.seed)
        num_rows = len(text.token_ids)
        accepted = torch.stack(seen).cpu().numpy() if seen else np.zeros((0, num_rows), dtype=int)
        for row in range(num_rows):
            living = [at for at, one in enumerate(text.rounds[1:]) if one.num_committed[row]]
            estimates = np.array([text.rounds[1 + at].estimates[row] for at in living]).reshape(-1, num_draft_tokens)
            texts.append(WatchedText(estimates, accepted[living, row]))
    return [text for text in texts if len(text.accepted)]


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of a round of `batch_size` rows. scheduled: [B * K + 1] with K drafted tokens per row, by the number
    that is verified in all. fixed: by K, 0 being a step without drafts."""

    batch_size: int
    scheduled: np.ndarray
    fixed: dict[int, float]

    @classmethod
    def of(cls, times: StepTimes, lengths: Sequence[int], *, batch_size: int, context: float) -> "RoundTimes":
        """From the step times of chains of these lengths, linear between them."""
        where = {"batch_size": batch_size, "context": context}
        steps = {0: times.at(None, **where), **{k: times.at(chain(k), **where) for k in sorted(lengths)}}
        verify = np.maximum.accumulate([step.verify_ms for step in steps.values()])
        most, longest = max(steps), steps[max(steps)]
        drafts = np.arange(batch_size * most + 1) / batch_size
        scheduled = longest.draft_ms + longest.overhead_ms + np.interp(drafts, list(steps), verify)
        return cls(batch_size, scheduled, {k: step.round_ms for k, step in steps.items()})

    @property
    def verify_cost(self) -> float:
        """As in `worth_verifying`: of one more token of each row."""
        num_drafted = (len(self.scheduled) - 1) // self.batch_size
        return float(self.scheduled[-1] / self.scheduled[0] - 1) / num_drafted


def drafts_within_budget(estimates: np.ndarray, last: np.ndarray, times: np.ndarray) -> np.ndarray:
    """[B] drafts that vLLM verifies of each row (`enable_adaptive_verification`, vLLM 0.32, its PR 47808).

    The budget, drafts of all rows together, is the one with the most expected tokens per time, by the estimates of the
    round before, as the newest are not on the host yet; it goes to the drafts that are likeliest to be reached and
    accepted by the newest estimates.

    Args: estimates, last: [B, K] of this round and of the one before, ones where a row had none. times: [B * K + 1] of
        a round by drafts verified in all.
    """
    likeliest = np.sort(last.cumprod(1), axis=None)[::-1]
    tokens = len(last) + np.concatenate([[0.0], likeliest.cumsum()])
    budget = int(np.argmax(tokens / times))
    admitted = np.zeros(estimates.size, dtype=bool)
    admitted[np.argsort(-estimates.cumprod(1), axis=None, kind="stable")[:budget]] = True
    return admitted.reshape(estimates.shape).sum(1)


def drafts_of_rows(estimates: np.ndarray, cost: float) -> np.ndarray:
    """[B] drafts that our engine verifies of each row, which goes by its own estimates [B, K]."""
    return worth_verifying(torch.from_numpy(estimates), cost).numpy()


@dataclass(frozen=True)
class ScheduledLoad:
    """A load with the best fixed K (0: no drafts), and with a schedule of an engine."""

    engine: str  # whose schedule: vllm or headstart
    batch_size: int
    context: int
    fixed_num_draft_tokens: int
    fixed_tokens_per_second: float
    longest_tokens_per_second: float  # all drafts of the longest chain verified
    scheduled_tokens_per_second: float
    drafts_verified: float  # of each row and round, on average
    num_texts: int  # that it is simulated on

    @property
    def gain(self) -> float:
        """The schedule's speed over that of the best fixed K."""
        return self.scheduled_tokens_per_second / self.fixed_tokens_per_second

    @property
    def gain_over_longest(self) -> float:
        """The schedule's speed over that of verifying all that it drafts."""
        return self.scheduled_tokens_per_second / self.longest_tokens_per_second

    @property
    def pays(self) -> bool:
        """Whether it is faster, on enough texts to say so."""
        return self.gain >= 1 + LEAST_GAIN and self.num_texts >= LEAST_TIMED

    def to_json(self) -> dict[str, Any]:
        gains = {"gain": round(self.gain, 4), "gain_over_longest": round(self.gain_over_longest, 4)}
        return {**asdict(self), **gains, "pays": self.pays}


def schedule_loads(
    texts: Sequence[WatchedText],
    times: StepTimes,
    lengths: Sequence[int],
    *,
    batch_sizes: Sequence[int],
    context: int,
    engines: Sequence[str] = ("vllm", "headstart"),
) -> list[ScheduledLoad]:
    """The best fixed K and each engine's schedule at each batch size. Args: lengths: K of chains; the longest is what
    schedules draft, and as long as the texts' estimates."""
    loads: list[ScheduledLoad] = []
    for size in batch_sizes if texts else ():
        of_round = RoundTimes.of(times, lengths, batch_size=size, context=context)
        speeds = {k: size * 1000 / ms * fixed_length(texts, k) for k, ms in of_round.fixed.items()}
        best = max(speeds, key=lambda k: speeds[k])
        for engine in engines:
            speed, verified = run_schedule(texts, of_round, engine)
            load = ScheduledLoad(
                engine=engine,
                batch_size=size,
                context=context,
                fixed_num_draft_tokens=best,
                fixed_tokens_per_second=round(speeds[best], 3),
                longest_tokens_per_second=round(speeds[max(speeds)], 3),
                scheduled_tokens_per_second=round(speed, 3),
                drafts_verified=round(verified, 3),
                num_texts=len(texts),
            )
            loads.append(load)
    return loads


def never_slower(loads: Sequence[ScheduledLoad], engine: str) -> bool:
    """Whether an engine's schedule can be left on at all loads: slower than the best fixed K at none, faster at one."""
    own = [load for load in loads if load.engine == engine]
    return all(load.gain >= 1 for load in own) and any(load.pays for load in own)


def fixed_length(texts: Sequence[WatchedText], num_draft_tokens: int) -> float:
    """Tokens per round with the first num_draft_tokens drafts verified everywhere; last rounds end with their text."""
    tokens = rounds = 0
    for text in texts:
        at = 0
        while at < len(text.accepted):
            at += min(int(text.accepted[at]), num_draft_tokens) + 1
            rounds += 1
        tokens += len(text.accepted)
    return tokens / rounds


def run_schedule(texts: Sequence[WatchedText], times: RoundTimes, engine: str) -> tuple[float, float]:
    """Tokens per second, and drafts verified per row and round, of an engine's schedule with all rows busy.

    The rows start at different places of the texts, and go on with the next one when theirs ends. Our engine's round is
    as long as that of its widest row, vLLM's is by the drafts verified in all.
    """
    size, num_drafted = times.batch_size, texts[0].estimates.shape[1]
    following = cycle(texts)
    rows = [next(following) for _ in range(size)]
    at = [len(row.accepted) * number // size for number, row in enumerate(rows)]
    last, cost = np.ones((size, num_drafted)), times.verify_cost
    least = max(2 * sum(len(text.accepted) for text in texts), LEAST_ROUNDS * size)
    num_tokens = num_rounds = num_verified = 0
    milliseconds = 0.0
    while num_tokens < least:
        estimates = np.stack([row.estimates[place] for row, place in zip(rows, at, strict=True)])
        if engine == "vllm":
            drafts = drafts_within_budget(estimates, last, times.scheduled)
            milliseconds += float(times.scheduled[drafts.sum()])
        else:
            drafts = drafts_of_rows(estimates, cost)
            milliseconds += float(times.scheduled[size * drafts.max()])
        last = estimates
        num_rounds, num_verified = num_rounds + 1, num_verified + int(drafts.sum())
        for number, (row, place) in enumerate(zip(rows, at, strict=True)):
            committed = min(int(row.accepted[place]), int(drafts[number])) + 1
            num_tokens += min(committed, len(row.accepted) - place)
            at[number] = place + committed
            if at[number] >= len(row.accepted):
                rows[number], at[number], last[number] = next(following), 0, 1.0
    return 1000 * num_tokens / milliseconds, num_verified / num_rounds / size
