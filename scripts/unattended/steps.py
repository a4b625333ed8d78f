"""One step of a run: an ordinary command in its own process, shown, logged, and stopped when its time is over."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...configs.errors import BadInput
from ...train.stopping import Stopping
from .clock import Clock

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a command has to end after SIGTERM
LAST_LINES = 2000  # characters of a log in which its last line is looked for


@dataclass(frozen=True)
class StepRecord:
    """A command as auto.json has it. seconds: of this budget. stopped: its time was over before it had ended."""

    name: str
    command: str
    log: str
    seconds: float
    exit_code: int
    stopped: bool


@dataclass(frozen=True)
class Runner:
    """Runs commands of ours. logs: folder of their output. launcher: starts Python for training, in words."""

    logs: Path
    clock: Clock
    stopping: Stopping
    launcher: Sequence[str] = ()

    def run(self, name: str, words: Sequence[str], *, until: float | None = None) -> StepRecord:
        """Run `headstart WORDS`.

        Args: name: of its log. until: the used time of the clock after which it is asked to stop.
        Raises: BadInput if it refused its input; SystemExit where this process was told to stop.
        """
        log, began, stopped = self.logs / f"{name}.log", self.clock.used, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.arguments(words),
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                preexec_fn=partial(_end_with, os.getpid()),
            )
            while process.poll() is None:
                is_late = until is not None and self.clock.used > until
                if (is_late or self.stopping.received) and not stopped:
                    process.terminate()
                    stopped = time.monotonic()
                elif stopped and time.monotonic() - stopped > PATIENCE:
                    process.kill()
                self.clock.note()
                time.sleep(POLL)
        if self.stopping.received:
            raise SystemExit(self.stopping.exit_code)
        if process.returncode == 2 and not stopped:
            raise BadInput(f"{name}: {last_line(log)}")
        seconds = round(self.clock.used - began, 1)
        return StepRecord(name, self.shown(words), str(log), seconds, process.returncode, bool(stopped))

    def arguments(self, words: Sequence[str]) -> list[str]:
        if words[0] == "train" and self.launcher:
            return [*self.launcher, "-m", "headstart.train", *words[1:]]
        return [sys.executable, "-m", "headstart.scripts.cli", *words]

    def shown(self, words: Sequence[str]) -> str:
        """The command as a person types it."""
        if words[0] == "train" and self.launcher:
            return shlex.join([*self.launcher, "-m", "headstart.train", *words[1:]])
        return shlex.join(["headstart", *words])


def last_line(log: Path) -> str:
    """The last line that a command wrote, without the program's name."""
    text = log.read_bytes()[-LAST_LINES:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("headstart: ") if lines else "it wrote nothing"


def start_seconds() -> float:
    """How long a command takes here before it does anything."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import headstart.train.trainer"], check=True, capture_output=True)
    return time.monotonic() - began


def _end_with(parent: int) -> None:
    """In the child: the system kills it when its parent ends, however that ends. Where no system does, the lock of the
    child's own folder keeps a second one out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it had ended before
            os._exit(1)
