"""Graceful stopping: on SIGTERM or SIGINT a run finishes its step, saves, and exits with the signal's exit code."""

import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED = 5.0  # seconds in which a repeated signal is ignored: a launcher forwards what the terminal has sent already


class Stopping:
    """Records a signal instead of ending the process; a second one, later than REPEATED, ends it at once.

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
        if self.received is not None and time.monotonic() - self.at > REPEATED:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.received is None:
            self.received, self.at = signal.Signals(number), time.monotonic()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + (self.received or signal.SIGTERM)
