"""Ctrl-C ends a command within two seconds, whatever it computes: the interpreter may only notice it much later."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.5  # seconds to end by itself; after that it is as killed, which no command is damaged by
TICK = 0.1  # seconds

_meant: list[str] = []  # what is being done that a signal lets finish


@contextmanager
def finishing(what: str) -> Iterator[None]:
    """Inside, a signal lets the process go on, as whoever enters it minds signals itself: a training step and its
    checkpoint, say, or the end of a child that writes one or has workers."""
    _meant.append(what)
    try:
        yield
    finally:
        _meant.pop()


@contextmanager
def ending_in_time(seconds: float = GRACE) -> Iterator[None]:
    """Inside, the process ends at most so long after a signal.

    Python handles a signal between two of its own instructions, so a long product, a build or a thread that is waited
    for delays it. But the system's handler writes the signal's number to a pipe at once, and a thread reads that. The
    interpreter's own end is left out, as it frees the memory of a large target for ten seconds. Does nothing in a
    thread other than the main one, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    seen = threading.Event()
    threading.Thread(target=_watch, args=(reads, seconds, seen), name="ending", daemon=True).start()
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = end.code if isinstance(end, SystemExit) else 128 + signal.SIGINT
        if code in [128 + number for number in SIGNALS] and seen.wait(TICK):
            sys.stdout.flush()
            sys.stderr.flush()
            _end(int(code))
        raise
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)


def _watch(reads: int, seconds: float, seen: threading.Event) -> None:
    while number := os.read(reads, 1):
        if number[0] in SIGNALS and not _meant:
            seen.set()
            time.sleep(seconds)
            while _meant:  # begun since
                time.sleep(TICK)
            _end(128 + number[0])
    os.close(reads)


def _end(code: int) -> NoReturn:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # the cursor, which a progress bar hides
    os._exit(code)


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not its parent's
