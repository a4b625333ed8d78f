"""Lines, or a bar, that say what a command is doing; without rich until a bar is drawn."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import printable

SILENCE = 10.0  # seconds without a line, at most, where stderr is no terminal


class Doing:
    """A phase of a command; call it as parts are done. total: parts; 0: not known."""

    def __init__(self, what: str, total: int, on_parts: Callable[[int], object] = lambda _: None):
        self.what, self.total, self.on_parts = what, total, on_parts
        self.done, self.began = 0, time.monotonic()
        self.first: tuple[int, float] | None = None  # the parts that were done first, and when
        self.last = self.began  # when a part was done last

    def __call__(self, parts: int = 1) -> None:
        self.done += parts
        self.last = time.monotonic()
        self.first = self.first or (parts, self.last)
        self.on_parts(parts)

    def line(self) -> str:
        """How far it is, and how long the rest takes if it goes on as since its first part, before which it began."""
        now, (first, at) = time.monotonic(), self.first or (0, self.last)
        parts = f"{self.done:,} of {self.total:,}, " if self.total else ""
        rest = (self.last - at) / (self.done - first) * (self.total - self.done) if self.done > first else 0
        left = rest - (now - self.last)
        return f"{self.what}: {parts}{now - self.began:.0f} s" + (f", about {left:.0f} s left" if left >= 1 else "")


@contextmanager
def doing(what: str, total: int = 0, *, is_announced: bool = False) -> Iterator[Doing]:
    """Says on stderr what begins and how far it is: parts as a bar in a terminal; elsewhere in a line at least every
    SILENCE seconds. Args: is_announced: what begins was said already."""
    what, is_terminal = printable(what), sys.stderr.isatty()
    if is_terminal and total:
        from rich.markup import escape
        from rich.progress import Progress

        from .terminal import PlainConsole

        with Progress(console=PlainConsole(stderr=True)) as bar:
            task = bar.add_task(escape(what), total=total)
            yield Doing(what, total, lambda parts: bar.advance(task, parts))
        return
    phase, ended = Doing(what, total), threading.Event()
    if not is_announced:
        print(what, file=sys.stderr, flush=True)

    def tell() -> None:
        while not ended.wait(SILENCE):
            print(phase.line(), file=sys.stderr, flush=True)

    if not is_terminal:
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield phase
    finally:
        ended.set()
