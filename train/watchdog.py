"""Ending a process that makes no progress, since all ranks wait forever for one that is stuck."""

import faulthandler
import os
import threading
import time
from types import TracebackType

EXIT_CODE = 124  # as of timeout(1)
GRACE = 3.0  # seconds for other ranks to report too, before a launcher that sees one process end stops them
STDERR = 2  # the file descriptor, as a progress bar may have replaced sys.stderr


class Watchdog:
    """A thread that ends the process when `at` has not been called for too long.

    It prints the rank and its current phase, and the stacks of all threads. Time in which the process was suspended
    does not count.
    """

    def __init__(self, *, minutes: float, rank: int, num_ranks: int):
        """Args: minutes: without progress; 0: for ever."""
        self.minutes, self.whose = minutes, f"rank {rank} of {num_ranks}"
        self.phase, self.count = "start", 0
        self.ended = threading.Event()

    def at(self, phase: str) -> None:
        """Report progress: this process now enters a phase."""
        self.phase, self.count = phase, self.count + 1

    def __enter__(self) -> "Watchdog":
        if self.minutes:
            self.ended = threading.Event()
            threading.Thread(target=self._watch, args=[self.ended], name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()

    def _watch(self, ended: threading.Event) -> None:
        limit, tick = 60 * self.minutes, min(1.0, 15 * self.minutes)
        seen, waited, before = self.count, 0.0, time.monotonic()
        while not ended.wait(tick):
            now = time.monotonic()
            waited = waited + min(now - before, 2 * tick) if seen == self.count else 0.0
            seen, before = self.count, now
            if waited >= limit:
                self._end()

    def _end(self) -> None:
        stuck = f"no progress for {self.minutes:g} minutes (train.watchdog_minutes)"
        os.write(STDERR, f"headstart: {self.whose}: {stuck}, at {self.phase}\n".encode())
        faulthandler.dump_traceback(file=STDERR)
        time.sleep(GRACE)
        os._exit(EXIT_CODE)
