"""Ending a process early: on a signal, after its step; or at once if it makes no progress, as all ranks wait for it."""

import faulthandler
import os
import signal
import threading
import time
from types import FrameType, TracebackType

from ...base.ending import SIGNALS

FORWARDED = 5.0  # seconds in which another signal may be the first one again, passed on by the process that started us
TWICE = 0.3  # seconds in which one press of Ctrl-C may come twice

STUCK = 124  # exit code, as of timeout(1)
GRACE = 3.0  # seconds for other ranks to report too, before a launcher that sees one process end stops them
STDERR = 2  # the file descriptor, as a progress bar may have replaced sys.stderr


class Stopping:
    """Records a signal instead of ending the process; a second one ends it at once.

    What comes within TWICE is the same press of Ctrl-C. Within FORWARDED so is a signal of another kind, as
    `headstart auto` ends its commands with SIGTERM when it got SIGINT, and any signal under a launcher, which passes on
    what the terminal has sent to all of its processes already.

    Does nothing in a thread other than the main one, which gets no signals.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at = 0.0
        self.before = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.at = signal.Signals(number), time.monotonic()
            return
        may_be_forwarded = number != self.received or "WORLD_SIZE" in os.environ
        if time.monotonic() - self.at > (FORWARDED if may_be_forwarded else TWICE):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + (self.received or signal.SIGTERM)


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
        os._exit(STUCK)
