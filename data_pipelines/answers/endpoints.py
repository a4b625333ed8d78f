"""Which server is asked next: the least busy one, and none that has just failed before its time is over."""

import time
from dataclasses import dataclass
from threading import Condition

from ...configs.errors import BadInput

FAILURES_IN_A_ROW = 3  # after which a server is set aside; fewer may be one bad request's fault
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds that a failing server is left alone


class Trouble(Exception):
    """An attempt that failed and may be made again.

    has_reached: whether a server took the request; one that cannot be reached is no fault of the request. pause:
    seconds that the server asked to be left alone for.
    """

    def __init__(self, problem: str, *, has_reached: bool = True, pause: float | None = None):
        super().__init__(problem)
        self.has_reached, self.pause = has_reached, pause


@dataclass
class Endpoint:
    """A server. num_failures: in a row. free_at: the time (monotonic, seconds) before which it is left alone."""

    url: str
    num_busy: int = 0
    num_failures: int = 0
    free_at: float = 0.0
    problem: str = ""

    @property
    def is_doubtful(self) -> bool:
        return self.num_failures >= FAILURES_IN_A_ROW


class Endpoints:
    """Servers shared by threads: each takes a place at one, asks, and gives it back with what became of it."""

    def __init__(self, urls: list[str], *, concurrency: int, patience: float):
        """Args: concurrency: places per server. patience: seconds without success before `acquire` gives up."""
        self.concurrency, self.patience = concurrency, patience
        self._endpoints = [Endpoint(url) for url in urls]
        self._changed = Condition()
        self._last_success = time.monotonic()

    def acquire(self) -> Endpoint:
        """A place at the least busy server that is not set aside; waits for one.

        A server that was set aside is tried with one request until it answers. Raises BadInput where all have failed
        for longer than `patience`.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                open_ones = [one for one in self._endpoints if self._has_room(one) and one.free_at <= now]
                if open_ones:
                    chosen = min(open_ones, key=lambda one: one.num_busy)
                    chosen.num_busy += 1
                    return chosen
                if now - self._last_success > self.patience and all(one.num_failures for one in self._endpoints):
                    problems = "; ".join(one.problem for one in self._endpoints)
                    raise BadInput(f"no server has answered for {self.patience:g} s: {problems}")
                until_free = min(one.free_at for one in self._endpoints) - now
                self._changed.wait(min(max(until_free, 0.01), 1.0))

    def release(self, endpoint: Endpoint, trouble: Trouble | None = None) -> None:
        """Give a place back. trouble: what went wrong; None: the server did its part."""
        with self._changed:
            endpoint.num_busy -= 1
            if trouble is None:
                endpoint.num_failures = 0
                self._last_success = time.monotonic()
            else:
                endpoint.problem = str(trouble)
                self._set_aside(endpoint, trouble)
            self._changed.notify_all()

    def _has_room(self, endpoint: Endpoint) -> bool:
        return endpoint.num_busy < (1 if endpoint.is_doubtful else self.concurrency)

    def _set_aside(self, endpoint: Endpoint, trouble: Trouble) -> None:
        now = time.monotonic()
        if endpoint.free_at <= now:  # else it fails what it had been asked before it was set aside
            endpoint.num_failures += 1
        if not trouble.has_reached:
            endpoint.num_failures = max(endpoint.num_failures, FAILURES_IN_A_ROW)
        pause = 0.0
        if trouble.pause is not None:
            pause = min(trouble.pause, self.patience)
        elif endpoint.is_doubtful:
            pause = min(FIRST_PAUSE * 2 ** min(endpoint.num_failures - FAILURES_IN_A_ROW, 10), LONGEST_PAUSE)
        endpoint.free_at = max(endpoint.free_at, now + pause)
