"""Runs the steps of an unattended run: ordinary `headstart` commands in processes of their own, with a time limit."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....base.children import end_with_parent
from ....base.ending import finishing
from ....base.errors import BadInput
from ....train.watching.stopping import Stopping
from .clock import Clock

POLL, SHORTLY = 0.2, 0.05  # seconds
PATIENCE = 60.0  # seconds between SIGTERM and SIGKILL
LAST_LINES = 2000  # bytes at the end of a log in which its last line is looked for


@dataclass(frozen=True)
class StepRecord:
    """A command that was run, as auto.json and refit.json record it."""

    name: str  # of its log, without suffix
    command: str  # the command line
    log: str  # path of its output
    seconds: float
    exit_code: int  # negative: ended by that signal
    stopped: bool  # whether it was stopped, as its time was up or what it needed had ended

    @property
    def last_line(self) -> str:
        """The last line of its output that is not blank, without the prefix `headstart: `."""
        text = Path(self.log).read_bytes()[-LAST_LINES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1].removeprefix("headstart: ") if lines else "it wrote nothing"


@dataclass(frozen=True)
class CommandRunner:
    """Runs `headstart` commands."""

    logs: Path  # folder
    clock: Clock
    stopping: Stopping
    launcher: Sequence[str] = ()  # words of the command that starts Python for training; empty: none

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        until: float | None = None,
        meanwhile: Callable[[], bool] = lambda: True,
    ) -> StepRecord:
        """Run `headstart ARGUMENTS` and wait for its end.

        Args:
            name: of the log, to which output is appended.
            until: second of the clock's budget at which the command gets SIGTERM; None: no limit.
            meanwhile: called again and again; where it returns False, the command gets SIGTERM too.

        Raises: BadInput with the command's last line if it ends with exit code 2 (bad input); SystemExit if this
        process got a signal to stop.
        """
        log, began, stopped = self.logs / f"{name}.log", self.clock.used, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        with finishing("the command"), log.open("ab") as file:
            process = subprocess.Popen(
                self.process_arguments(arguments),
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
            while process.poll() is None:
                is_late = (until is not None and self.clock.used > until) or not meanwhile()
                if (is_late or self.stopping.received) and not stopped:
                    process.terminate()
                    stopped = time.monotonic()
                elif stopped and time.monotonic() - stopped > PATIENCE:
                    process.kill()
                self.clock.save()
                time.sleep(POLL)
        if self.stopping.received:
            raise SystemExit(self.stopping.exit_code)
        seconds = round(self.clock.used - began, 1)
        record = StepRecord(name, self.command_line(arguments), str(log), seconds, process.returncode, bool(stopped))
        if record.exit_code == 2 and not record.stopped:
            raise BadInput(f"{name}: {record.last_line}")
        return record

    def process_arguments(self, arguments: Sequence[str]) -> list[str]:
        """What is executed: this Python interpreter, or the launcher for training."""
        if arguments[0] == "train" and self.launcher:
            return [*self.launcher, "-m", "headstart.train", *arguments[1:]]
        return [sys.executable, "-m", "headstart.scripts.cli", *arguments]

    def command_line(self, arguments: Sequence[str]) -> str:
        """The same command as one would type it."""
        if arguments[0] == "train" and self.launcher:
            return shlex.join(self.process_arguments(arguments))
        return shlex.join(["headstart", *arguments])


def start_seconds(check_stop: Callable[[], None]) -> float:
    """Seconds that a command needs to start on this machine: to start Python and import what training needs.

    Args: check_stop: called meanwhile; it may raise SystemExit."""
    began, line = time.monotonic(), [sys.executable, "-c", "import headstart.train.trainer"]
    ends = partial(end_with_parent, os.getpid())
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ends)
    while process.poll() is None:
        check_stop()
        time.sleep(SHORTLY)
    check_stop()  # which may have ended the other process too
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)
    return time.monotonic() - began
