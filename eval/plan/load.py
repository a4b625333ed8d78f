"""What users see when requests arrive at a rate: figures of a server with continuous batching, run or simulated.

A request joins the batch when there is room for it: its prompt is read while the others wait, and then all rows run
rounds together. `serving.LiveServer` does that; `SimulatedServer` follows the same rules with prompts, answers and what
each round accepts as they were decoded, and times as a table or a profile has them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..measurement.config import DraftSetting
from .prediction import Accepted, StepTimes, Workload

NUM_SIMULATED = 256  # requests
NUM_SERVED = 64
SHARES = (0.25, 0.5, 0.75, 1.0, 1.25)  # rates, of what a full batch serves without drafts
SEED = 0


@dataclass
class Request:
    """number: of its prompt. arrival, first, finish: seconds. tokens: it has so far. rounds: it has run."""

    number: int
    arrival: float
    first: float = 0.0
    finish: float = 0.0
    tokens: int = 1
    rounds: int = 0


Choice = Callable[[int], Accepted | None]  # what is drafted when so many rows run; None: nothing


class Serves(Protocol):
    """A server, run or simulated."""

    def serve(self, requests: Sequence[Request]) -> float:
        """Fill in when each request got its first token and its last; returns the mean number of rows per round."""
        ...


@dataclass(frozen=True)
class SimulatedServer:
    """choice: what to draft by the number of rows; lengths: new tokens of each prompt."""

    workload: Workload
    lengths: Sequence[int]
    times: StepTimes
    choice: Choice
    max_batch_size: int

    def serve(self, requests: Sequence[Request]) -> float:
        """See `Serves`."""
        now, waiting, active = 0.0, list(requests), []
        rows, rounds = 0, 0
        while waiting or active:
            if not active and waiting[0].arrival > now:
                now = waiting[0].arrival
            while waiting and waiting[0].arrival <= now and len(active) < self.max_batch_size:
                now += self.prefill_seconds(waiting[0])
                waiting[0].first = now
                active.append(waiting.pop(0))
            now += self.round_seconds(active)
            rows, rounds = rows + len(active), rounds + 1
            self.advance(active, now)
            active = [one for one in active if not one.finish]
        return rows / rounds

    def prefill_seconds(self, request: Request) -> float:
        context = self.workload.prompt_lengths[request.number]
        drafted = self.choice(1)
        seconds = self.times.at(None, batch_size=1, context=context).prefill_ms
        if drafted is not None:
            seconds += self.times.at(drafted.setting, batch_size=1, context=context).reading_ms
        return seconds / 1000

    def round_seconds(self, active: Sequence[Request]) -> float:
        context = sum(self.workload.prompt_lengths[one.number] + one.tokens for one in active) / len(active)
        drafted = self.choice(len(active))
        setting: DraftSetting | None = drafted.setting if drafted else None
        return self.times.at(setting, batch_size=len(active), context=context).round_ms / 1000

    def advance(self, active: Sequence[Request], now: float) -> None:
        """Give each row what a round of its own text gave, round after round; one token where nothing is drafted."""
        drafted = self.choice(len(active))
        for one in active:
            gained = 1
            if drafted is not None:
                pattern = drafted.emitted[one.number]
                gained = pattern[one.rounds % len(pattern)] if pattern else 1
            one.tokens, one.rounds = one.tokens + gained, one.rounds + 1
            if one.tokens >= self.lengths[one.number]:
                one.tokens, one.finish = self.lengths[one.number], now


def arrivals(rate: float, num_prompts: int, *, num_requests: int) -> list[Request]:
    """A Poisson process of `rate` requests per second (all at once at infinity), prompts in turn."""
    source, now, found = random.Random(SEED), 0.0, []
    for number in range(num_requests):
        now += source.expovariate(1.0) / rate
        found.append(Request(number % num_prompts, now))
    return found


def figures(requests: Sequence[Request], mean_batch: float) -> dict[str, Any]:
    """What a run gave: throughput of all, and quantiles over requests."""
    start, end = min(one.arrival for one in requests), max(one.finish for one in requests)
    first = [1000 * (one.first - one.arrival) for one in requests]
    whole = [1000 * (one.finish - one.arrival) for one in requests]
    each = [1000 * (one.finish - one.first) / max(1, one.tokens - 1) for one in requests]
    return {
        "tokens_per_second": round(sum(one.tokens for one in requests) / (end - start), 2),
        "mean_batch_size": round(mean_batch, 2),
        **quantiles("ttft_ms", first),
        **quantiles("time_per_output_token_ms", each),
        **quantiles("latency_ms", whole),
    }


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """`NAME_p50` and `NAME_p90`."""
    found = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.9], dtype=torch.float64))
    return {f"{name}_{label}": round(value, 3) for label, value in zip(("p50", "p90"), found.tolist(), strict=True)}


def simulated_servers(
    accepted: Sequence[Accepted],
    workload: Workload,
    times: StepTimes,
    *,
    fixed: str,
    schedule: Sequence[Sequence[int]],
    max_batch_size: int,
) -> dict[str, Serves]:
    """Servers without drafts, with one setting, and with K by the schedule.

    Args: fixed: the name of the one setting. schedule: [from, to, K] over batch sizes, as `prediction.schedule` has it.
    """
    by_name = {one.setting.name: one for one in accepted}
    by_length = {one.setting.num_draft_tokens: one for one in accepted if one.setting.tree is None}

    def scheduled(rows: int) -> Accepted | None:
        length = next((length for low, high, length in schedule if low <= rows <= high), 0)
        return by_length.get(length)

    choices: dict[str, Choice] = {"none": lambda rows: None, fixed: lambda rows: by_name[fixed]}
    choices |= {"schedule": scheduled} if by_length else {}
    lengths = by_name[fixed].tokens
    return {name: SimulatedServer(workload, lengths, times, one, max_batch_size) for name, one in choices.items()}


def load_curve(
    servers: Mapping[str, Serves], num_prompts: int, *, served: str, num_requests: int
) -> list[dict[str, Any]]:
    """plan.json's `load`: what each server gives at each of SHARES of what the one without drafts can serve.

    Args: servers: by what they draft, `none` among them. served: `run` or `simulated`.
    """
    at_once = arrivals(float("inf"), num_prompts, num_requests=num_requests)
    servers["none"].serve(at_once)
    capacity = len(at_once) / max(one.finish for one in at_once)  # requests per second
    found = []
    for share in SHARES:
        for name, server in servers.items():
            requests = arrivals(share * capacity, num_prompts, num_requests=num_requests)
            mean_batch = server.serve(requests)
            entry = {"served": served, "requests_per_second": round(share * capacity, 4), "share_of_capacity": share}
            found.append({**entry, "drafts": name, **figures(requests, mean_batch)})
    return found
