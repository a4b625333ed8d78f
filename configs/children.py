"""Child processes that end with the process that started them."""

import ctypes
import os
import signal
import sys


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Called in the child process: makes Linux send it a signal when its parent ends, in whatever way.

    On other systems a child may outlive its parent; the lock of its output folder then keeps a second one out.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent had ended before
            os._exit(1)
