"""A server of our own: a process that is started, answers after a while, and ends with us, whatever ends us."""

import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from ...base.children import answers_in_time, end_with_parent, free_port
from ...base.ending import finishing
from ...base.errors import BadInput

START_SECONDS = 7200.0  # for reading the weights of large targets
END_SECONDS = 30.0
LAST_BYTES = 200_000  # of a log, in which an error is looked for
QUOTED = re.compile(
    r"(?:^|\] )(?:\w+\.)*(?P<error>\w*(?:Error|Exception): (?!\d+ validation error).+)"
    r"|^Value error, (?P<refused>.+?)(?: \[type=.*)?$"  # pydantic's, of settings, behind how many they are
)


class ServerProcess:
    """A server that runs during a `with` block. url: its address."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        option: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        while_starting: Callable[[], object] = lambda: None,
    ):
        """Args: command: without its address. name: of the engine, for messages. option: that named the program.
        log: the file for what it prints; None: a temporary one. environment: variables that it has beside ours.
        while_starting: called again and again until it is ready; what this raises ends it."""
        self.port, self.name, self.option = free_port(), name, option
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self.environment = dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        self._log, self._while_starting, self._kept = log, while_starting, ""

    @property
    def line(self) -> str:
        """The command as one would type it."""
        return shlex.join([*(f"{key}={value}" for key, value in self.environment.items()), *self.command])

    def __enter__(self) -> Self:
        """Start the server and wait for it. Raises BadInput, with what its log says, if it does not become ready."""
        # killed at once, it would leave its workers behind
        ended = partial(end_with_parent, os.getpid(), signal.SIGTERM)
        self.log = tempfile.TemporaryFile() if self._log is None else self._log.open("w+b")
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env={**os.environ, **self.environment},
                start_new_session=True,  # the terminal's Ctrl-C is for us, who end it
                preexec_fn=ended,
            )
        except OSError as error:
            raise BadInput(f"{self.option} {self.command[0]}: {error.strerror}") from error
        try:
            if not answers_in_time(self.url, seconds=START_SECONDS, pause=0.05, why_gone=self._why_never_ready):
                raise BadInput(f"{self.name}: not ready after {START_SECONDS:g} s: {self.last_words()}{self._see()}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server with its workers."""
        if self.process is None:
            return
        with finishing("a server and its workers"):
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_SECONDS)
            with suppress(ProcessLookupError):  # its session, which it leads
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def _why_never_ready(self) -> str | None:
        self._while_starting()
        return self.is_gone()

    def is_gone(self) -> str | None:
        """Why it ended; None: it runs."""
        code = None if self.process is None else self.process.poll()
        return None if code is None else f"{self.name} ended with code {code}: {self.last_words()}{self._see()}"

    def _see(self) -> str:
        """Where all of its log is, if that was a temporary file: in a copy, which stays."""
        size = os.fstat(self.log.fileno()).st_size
        if self._log is None and size and not self._kept:
            with tempfile.NamedTemporaryFile(prefix="headstart-server-", suffix=".log", delete=False) as copy:
                copy.write(os.pread(self.log.fileno(), size, 0))
            self._kept = f"; its log: {copy.name}"
        return self._kept

    def last_words(self) -> str:
        """The first error that its log quotes, which causes the later ones; else the last line that speaks of an error,
        else the last line."""
        at_most = max(0, os.fstat(self.log.fileno()).st_size - LAST_BYTES)
        text = os.pread(self.log.fileno(), LAST_BYTES, at_most).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["its log is empty"]
        quoted = (match["error"] or match["refused"] for line in lines if (match := QUOTED.search(line)))
        speaking = (line for line in reversed(lines) if "error" in line.lower())
        return next(quoted, next(speaking, lines[-1]))[:400]
