"""Latency and throughput when requests arrive at a rate, for a server with continuous batching, run or simulated.

A request joins the batch when there is room: its prompt is read while the others wait, and then all rows run rounds
together. `serve` implements these rules for both kinds: `server.LiveServer` decodes, `SimulatedServer` uses the texts
and acceptance that were decoded before, and step times from a table or a profile.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..decoding.draft_setting import DraftSetting
from .engine_settings import ScheduleRange
from .prediction import Accepted, StepTimes, Workload

NUM_SIMULATED = 256  # requests
NUM_SERVED = 64
SHARES = (0.25, 0.5, 0.75, 1.0, 1.25)  # rates, of what a full batch serves without drafts
SEED = 0


@dataclass
class ServedRequest:
    """A request for the answer to a prompt. Times in seconds."""

    prompt: int  # its number
    arrival: float
    first: float = 0.0  # when its first token was there,
    finish: float = 0.0  # and its last
    tokens: int = 1  # it has so far
    rounds: int = 0  # it has run, simulated
    token_ids: list[int] = field(default_factory=list)  # its answer, where it was decoded


class Server(Protocol):
    """A server, run or simulated, of which at most max_batch_size rows run together."""

    max_batch_size: int

    def join(self, request: ServedRequest) -> tuple[float, float]:
        """Read a prompt and put its row into the batch; seconds until its first token was there, and in all."""
        ...

    def run_round(self) -> tuple[list[ServedRequest], float]:
        """A round of all rows; the requests that ended, which leave the batch, and seconds."""
        ...


def serve(server: Server, requests: Sequence[ServedRequest]) -> float:
    """Serve requests, sorted by arrival, on a simulated clock that advances by computing time and skips idle time.

    Sets each request's times of the first and last token. Returns the mean number of rows per round.
    """
    now, waiting, active, rows, rounds = 0.0, list(requests), 0, 0, 0
    while waiting or active:
        if not active:
            now = max(now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= now and active < server.max_batch_size:
            request, active = waiting.pop(0), active + 1
            first, seconds = server.join(request)
            request.first, now = now + first, now + seconds
        rows, rounds = rows + active, rounds + 1
        ended, seconds = server.run_round()
        now, active = now + seconds, active - len(ended)
        for request in ended:
            request.finish = now
    return rows / rounds


Choice = Callable[[int], Accepted | None]  # number of running rows -> what is drafted; None: nothing


@dataclass
class SimulatedServer:
    """A server by its step times, of texts as they were decoded."""

    workload: Workload
    lengths: Sequence[int]  # new tokens of each prompt
    times: StepTimes
    choice: Choice
    max_batch_size: int
    active: list[ServedRequest] = field(default_factory=list)

    def join(self, request: ServedRequest) -> tuple[float, float]:
        """See `Server`."""
        self.active.append(request)
        context = self.workload.prompt_lengths[request.prompt]
        drafted = self.choice(1)
        milliseconds = self.times.at(None, batch_size=1, context=context).prefill_ms
        if drafted is not None:
            milliseconds += self.times.at(drafted.setting, batch_size=1, context=context).reading_ms
        return milliseconds / 1000, milliseconds / 1000

    def run_round(self) -> tuple[list[ServedRequest], float]:
        """Give each row the tokens that the same round of its decoded text gave; one token if nothing is drafted."""
        active, drafted = self.active, self.choice(len(self.active))
        context = sum(self.workload.prompt_lengths[request.prompt] + request.tokens for request in active) / len(active)
        setting = drafted.setting if drafted else None
        seconds = self.times.at(setting, batch_size=len(active), context=context).round_ms / 1000
        for request in active:
            gained = drafted.emitted[request.prompt] if drafted else []
            request.tokens += gained[request.rounds % len(gained)] if gained else 1
            request.tokens, request.rounds = min(request.tokens, self.lengths[request.prompt]), request.rounds + 1
        ended = [request for request in active if request.tokens >= self.lengths[request.prompt]]
        self.active = [request for request in active if request.tokens < self.lengths[request.prompt]]
        return ended, seconds


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """What users see when requests arrive at a rate. drafts: `none`, a setting or `schedule`."""

    served: str  # run or simulated
    requests_per_second: float
    share_of_capacity: float  # of what a full batch serves without drafts
    drafts: str
    tokens_per_second: float
    mean_batch_size: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    time_per_output_token_ms_p50: float
    time_per_output_token_ms_p90: float
    latency_ms_p50: float
    latency_ms_p90: float


def arrivals(rate: float, num_prompts: int, *, num_requests: int) -> list[ServedRequest]:
    """A Poisson process of `rate` requests per second (all at once at infinity), prompts in turn."""
    source, now, requests = random.Random(SEED), 0.0, []
    for number in range(num_requests):
        now += source.expovariate(1.0) / rate
        requests.append(ServedRequest(number % num_prompts, now))
    return requests


def load_point(
    requests: Sequence[ServedRequest], mean_rows: float, *, served: str, drafts: str, rate: float, share: float
) -> LoadPoint:
    """The figures of requests that were served: throughput of all, and quantiles over them."""
    start, end = min(request.arrival for request in requests), max(request.finish for request in requests)
    first = [1000 * (request.first - request.arrival) for request in requests]
    whole = [1000 * (request.finish - request.arrival) for request in requests]
    each = [1000 * (request.finish - request.first) / max(1, request.tokens - 1) for request in requests]
    # of each of the three, the median and the 90th percentile
    (ttft_p50, token_p50, latency_p50), (ttft_p90, token_p90, latency_p90) = (
        np.quantile([first, each, whole], [0.5, 0.9], axis=1).round(3).tolist()
    )
    return LoadPoint(
        served=served,
        requests_per_second=round(rate, 4),
        share_of_capacity=share,
        drafts=drafts,
        tokens_per_second=round(sum(request.tokens for request in requests) / (end - start), 2),
        mean_batch_size=round(mean_rows, 2),
        ttft_ms_p50=ttft_p50,
        ttft_ms_p90=ttft_p90,
        time_per_output_token_ms_p50=token_p50,
        time_per_output_token_ms_p90=token_p90,
        latency_ms_p50=latency_p50,
        latency_ms_p90=latency_p90,
    )


def simulated_servers(
    accepted: Sequence[Accepted],
    workload: Workload,
    times: StepTimes,
    *,
    fixed: DraftSetting,
    schedule: Sequence[ScheduleRange],
    max_batch_size: int,
) -> dict[str, Server]:
    """Servers without drafts, with one setting, and with K by the schedule."""
    always = next(each for each in accepted if each.setting == fixed)
    by_length = {each.setting.num_draft_tokens: each for each in accepted if each.setting.tree is None}

    def scheduled(rows: int) -> Accepted | None:
        length = next((part.num_draft_tokens for part in schedule if part.first <= rows <= part.last), 0)
        return by_length.get(length)

    choices: dict[str, Choice] = {"none": lambda rows: None, fixed.name: lambda rows: always}
    choices |= {"schedule": scheduled} if by_length else {}
    servers = (SimulatedServer(workload, always.tokens, times, choice, max_batch_size) for choice in choices.values())
    return dict(zip(choices, servers, strict=True))


def load_curve(servers: Mapping[str, Server], num_prompts: int, *, served: str, num_requests: int) -> list[LoadPoint]:
    """What each server gives at each of SHARES of what the one without drafts can serve.

    Args: servers: by what they draft, `none` among them. served: `run` or `simulated`.
    """
    at_once = arrivals(float("inf"), num_prompts, num_requests=num_requests)
    serve(servers["none"], at_once)
    capacity = len(at_once) / max(request.finish for request in at_once)  # requests per second
    points = []
    for share in SHARES:
        rate = share * capacity
        for name, server in servers.items():
            requests = arrivals(rate, num_prompts, num_requests=num_requests)
            mean_rows = serve(server, requests)
            points.append(load_point(requests, mean_rows, served=served, drafts=name, rate=rate, share=share))
    return points
