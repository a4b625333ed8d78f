"""SIGTERM and SIGINT let a run finish its step and save; it leaves with the signal's exit code, as unfinished."""

import signal
import threading
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED = 5.0  # seconds: a launcher passes on to its processes what the terminal has already sent them


class Stopping:
    """Takes down signals instead of obeying them. A second one, later than any launcher's echo, ends at once.

    In a thread other than the main one there are no signals, and this does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at = 0.0
        self.before = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self.before = {one: signal.signal(one, self._take) for one in SIGNALS}
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and time.monotonic() - self.at > REPEATED:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.received is None:
            self.received, self.at = signal.Signals(number), time.monotonic()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for one, handler in self.before.items():
            signal.signal(one, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + (self.received or signal.SIGTERM)
