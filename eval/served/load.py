"""A block of questions under a load: so many in flight at a time (closed loop), or arriving at a rate."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import BadInput
from ...engines.servers.address import OF_A_KEY, STOPPING, Address, may_pass
from ...engines.servers.asking import Arrived, RequestError, ask
from .questions import Question

NUM_ATTEMPTS = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds before a question is repeated
BEAT = 0.02  # seconds between two looks at how late our own event loop is
ARRIVING = 16  # questions at once for which a server of ours has room where they arrive at a rate, if it has to be told
ROUNDS_OF_ALL = 4  # questions of a block at least, per place in flight: the last ones run beside fewer others


@dataclass(frozen=True)
class Load:
    """concurrency: questions in flight, always. rate: arrivals per second instead (Poisson); None: closed loop."""

    concurrency: int = 1
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"

    @property
    def is_single(self) -> bool:
        return self.rate is None and self.concurrency == 1

    def numbers(self, num_questions: int) -> list[int]:
        """The questions of a block: all of them, as often as the load needs."""
        passes = 1 if self.rate is not None else -(-ROUNDS_OF_ALL * self.concurrency // num_questions)
        return list(range(num_questions)) * (1 if self.is_single else max(1, passes))


@dataclass
class Asked:
    """One question of a block and its answer. sent: seconds from the block's start. late: by how much behind its time,
    which is our own delay. failure: why there is no answer."""

    number: int
    sent: float
    late: float = 0.0
    answer: Arrived | None = None
    num_attempts: int = 1
    failure: str = ""


@dataclass
class AskedBlock:
    """full: seconds from the start until fewer questions were in flight than the load says. lags: of our event loop, in
    seconds; cpu: the share of a core that this client took."""

    asked: list[Asked] = field(default_factory=list)
    full: float = 0.0
    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0


@dataclass
class Asker:
    """Puts questions to one server. settings: of every question. optional: keys that a server may refuse, left out from
    then on. is_gone: why the server ended; None: it has not, or is not ours. warm: numbers of the loads for which it
    is warmed up."""

    address: Address
    settings: Mapping[str, Any]
    optional: dict[str, Any] = field(default_factory=dict)
    salted: bool = False
    patience: float = 600.0
    is_gone: Callable[[], str | None] = lambda: None
    refused: set[tuple[str, str]] = field(default_factory=set)  # (path, key)
    warm: set[int] = field(default_factory=set)

    def body(self, question: Question, salt: str) -> dict[str, Any]:
        optional = self.optional | ({"cache_salt": salt} if self.salted else {})
        optional = {key: value for key, value in optional.items() if (question.path, key) not in self.refused}
        return {"model": self.address.model, **self.settings, **optional, **question.body}

    async def answer(self, question: Question, asked: Asked, salt: str, *, most: int | None = None) -> None:
        """Ask until there is an answer or a failure; an answer's times count from the first attempt. Raises BadInput
        where no question can succeed."""
        began = time.perf_counter()
        while True:
            waited = time.perf_counter() - began
            body = self.body(question, salt) | ({} if most is None else {"max_tokens": most})
            try:
                asked.answer = await ask(self.address, question.path, body, patience=self.patience)
                if asked.num_attempts > 1:
                    asked.answer.seconds = [waited + seconds for seconds in asked.answer.seconds]
                return
            except RequestError as error:
                if (gone := self.is_gone()) is not None:
                    raise BadInput(gone) from error
                if error.status in STOPPING:
                    raise BadInput(str(error)) from error
                keys = [key for key in (*self.optional, "cache_salt") if key in body and key in str(error)]
                if error.status in OF_A_KEY and keys:
                    self.refused |= {(question.path, key) for key in keys}
                    continue
                if asked.num_attempts == NUM_ATTEMPTS or not may_pass(error.status):
                    asked.failure = str(error)
                    if "cannot be reached" in asked.failure:
                        raise BadInput(f"{asked.failure}; it answered before") from error
                    return
                pause = FIRST_PAUSE * 2 ** (asked.num_attempts - 1) if error.rest is None else error.rest
                asked.num_attempts += 1
                await asyncio.sleep(min(pause, LONGEST_PAUSE))


def warm_up(asker: Asker, questions: Sequence[Question], load: Load) -> None:
    """Some short answers, as many at a time as the load has. Raises BadInput if none succeeds."""

    async def all_of() -> list[Asked]:
        asked = [Asked(i % len(questions), 0.0) for i in range(load.concurrency)]
        await together(*(asker.answer(questions[one.number], one, f"warm-{i}", most=4) for i, one in enumerate(asked)))
        return asked

    asked = asyncio.run(all_of())
    if not any(one.answer for one in asked):
        raise BadInput(asked[0].failure)


async def together(*work: Any) -> None:
    """All of it, until one raises."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_block(asker: Asker, questions: Sequence[Question], load: Load, *, seed: int, salt: str) -> AskedBlock:
    """Ask all questions of a block. Args: seed: of the arrivals. Raises BadInput."""
    block, numbers = AskedBlock(), load.numbers(len(questions))
    watching = asyncio.ensure_future(watch(block.lags))
    start, used = time.perf_counter(), time.process_time()

    async def one(index: int, *, due: float) -> None:
        sent = time.perf_counter() - start
        asked = Asked(numbers[index], sent, max(0.0, sent - due))
        block.asked.append(asked)
        await asker.answer(questions[asked.number], asked, f"{salt}-{index}")

    async def always(waiting: "itertools.count[int]") -> None:
        due = 0.0
        while (index := next(waiting)) < len(numbers):
            await one(index, due=due)
            due = time.perf_counter() - start
        block.full = block.full or due

    async def arriving() -> None:
        source, at, running = random.Random(seed), 0.0, list[Any]()
        source.shuffle(numbers)  # so that the last arrivals differ from the first by the server's state alone
        for index in range(len(numbers)):
            at += source.expovariate(load.rate or 1.0)
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
            running.append(asyncio.ensure_future(one(index, due=at)))
        await together(*running)
        block.full = time.perf_counter() - start

    try:
        if load.rate is None:
            waiting = itertools.count()
            await together(*(always(waiting) for _ in range(min(load.concurrency, len(numbers)))))
        else:
            await arriving()
    finally:
        watching.cancel()
    block.cpu = (time.process_time() - used) / (time.perf_counter() - start)
    block.asked.sort(key=lambda asked: asked.sent)
    return block


async def watch(lags: list[float]) -> None:
    """Notes how much later than asked our own event loop goes on."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(BEAT)
        lags.append(time.perf_counter() - before - BEAT)
