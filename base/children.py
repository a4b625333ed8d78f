"""Child processes: that end with the process that started them, and servers that one waits for."""

import ctypes
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable

from .errors import BadInput


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Called in the child process: makes Linux send it a signal when its parent ends, in whatever way.

    On other systems a child may outlive its parent; the lock of its output folder then keeps a second one out.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent had ended before
            os._exit(1)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers_in_time(url: str, *, seconds: float, pause: float, why_gone: Callable[[], str | None]) -> bool:
    """Wait until a server's /health answers; False: not within that time.

    Args: pause: seconds between two attempts. why_gone: why it will never answer; None: it may.
    Raises: BadInput if it will never answer.
    """
    until, direct = time.monotonic() + seconds, urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < until:
        if (why := why_gone()) is not None:
            raise BadInput(why)
        try:
            with direct.open(f"{url}/health", timeout=10):
                return True
        except OSError:
            time.sleep(pause)
    return False
