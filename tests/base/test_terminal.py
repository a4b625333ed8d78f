"""The terminal shows names as they are, an error is one line that names its file, and Ctrl-C ends a process in time."""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.doing import doing
from headstart.base.ending import GRACE
from headstart.base.errors import BadInput, printable, writing_into
from headstart.base.terminal import PlainConsole
from rich.table import Table

ACTING = "\x1b]0;title\x07 \x1b[2J \r \x9b31m \u202e \ud800"


def test_an_error_is_one_line_whatever_names_it_quotes():
    said = str(BadInput(f"rows\n{ACTING}.jsonl: no such file"))
    assert said == r"rows\n\x1b]0;title\x07 \x1b[2J \r \x9b31m \u202e \ud800.jsonl: no such file"


def test_texts_stay_what_they_are():
    for text in ("naïve 日本語 🙂 a\u200db", "[bold]x[/bold]", "\\n"):
        assert printable(text) == text
    assert printable("a\n\tb\r", shown="\n\t") == "a\n\tb\\r"


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_printed_as_they_are(terminal):
    file = io.StringIO()
    console = PlainConsole(file=file, width=100, force_terminal=terminal, highlight=False, color_system=None)
    table = Table("[name]", box=None)
    table.add_row("runs/[red]x[/red]\x1b[2J")
    console.print("runs/[bold]x:smile:\x1b[2J", table)
    assert r"runs/[bold]x:smile:\x1b[2J" in file.getvalue() and r"runs/[red]x[/red]\x1b[2J" in file.getvalue()
    assert "[name]" in file.getvalue() and "\x1b[2J" not in file.getvalue()


def test_a_long_phase_says_what_goes_on_from_the_start_and_again(monkeypatch, capsys):
    """Where stderr is no terminal; nothing more once the phase has ended, also by an error."""
    monkeypatch.setattr("headstart.base.doing.SILENCE", 0.05)
    with pytest.raises(KeyError), doing("measuring EAGLE-3 on orders\x1b[2J", 4) as part:
        assert capsys.readouterr().err == "measuring EAGLE-3 on orders\\x1b[2J\n"
        part()
        time.sleep(0.2)
        raise KeyError
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4 and all("on orders\\x1b[2J: 1 of 4, 0 s" in line for line in lines)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "runs/a: cannot be written: No space left on device"),
        (OSError(errno.EROFS, "", "runs/a/b.json"), "runs/a/b.json: cannot be written: Read-only file system"),
        (RuntimeError("I/O error: disk (os error 28)"), "runs/a: cannot be written: No space left on device"),
    ],
)
def test_a_full_disk_is_named(error, line):
    with pytest.raises(BadInput) as caught, writing_into("runs/a"):
        raise error
    assert str(caught.value) == line


def test_full_temporary_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if path == str(tmp_path) else 2**40))
    line = f"TMPDIR {tmp_path}: cannot be written: No space left on device"
    with pytest.raises(BadInput, match=line), writing_into("output"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(BadInput, match="^runs/a: "), writing_into("output"):
        raise OSError(errno.ENOSPC, "", "runs/a")
    with pytest.raises(BadInput, match="^TMPDIR: "), writing_into("output"):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")


def test_a_file_or_folder_without_rights_is_named():
    with pytest.raises(BadInput) as caught, writing_into("runs/a"):
        raise PermissionError(errno.EACCES, "Permission denied", "/root/.cache")
    assert str(caught.value) == "/root/.cache: Permission denied", "whether it was read or written"


@pytest.mark.parametrize("error", [BadInput("x"), KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "x")])
def test_other_faults_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, writing_into("runs/a"):
        raise error
    assert caught.value is error


BUSY = {  # as a forward, a build, a pool of threads or a library that catches everything
    "a long call": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "threads that a block waits for": "with ThreadPoolExecutor(2) as pool: pool.submit(time.sleep, 30).result()",
    "memory that the interpreter frees": "global slow; slow = Slow(); time.sleep(60)",
    "code that goes on": "while True:\n    with suppress(KeyboardInterrupt): time.sleep(60)",
}
PROGRAM = """
import hashlib, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from headstart.base.ending import ending_in_time, finishing
from headstart.train.watching.stopping import Stopping
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(30)
def main():
    print("ready", flush=True)
{body}
with ending_in_time(0.3):
    main()
"""
STOPPING = "with finishing('a step'), Stopping() as stopping: time.sleep({}); sys.exit(7 if stopping.received else 0)"
FEW = 5.0  # seconds: the 0.3 of it, and what a busy machine adds


def started(body: str, **env: str) -> subprocess.Popen[Any]:
    """A process that has begun to do this."""
    text = PROGRAM.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    return process


def ended(process: subprocess.Popen[Any], *, within: float) -> int:
    """The exit code of a process that ends within so many seconds."""
    try:
        return process.wait(timeout=within)
    finally:
        process.kill()
        process.wait()


def test_a_signal_ends_a_process_whatever_it_does(environ):
    processes = [started(body, **environ) for body in BUSY.values()]
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert [ended(process, within=FEW) for process in processes] == [130] * len(BUSY)
    assert GRACE < 2


def test_a_second_press_ends_even_that_at_once(environ):
    process = started(STOPPING.format(60), **environ)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    assert ended(process, within=FEW) == -signal.SIGINT


@pytest.mark.parametrize(
    ("second", "environment"), [(None, {}), (signal.SIGTERM, {}), (signal.SIGINT, {"WORLD_SIZE": "2"})]
)
def test_what_is_to_be_finished_is_finished(second, environment, environ):
    """Also where the process that started this one passes on what the terminal has sent to both already."""
    process = started(STOPPING.format(1.5), **environ, **environment)
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    if second is not None:
        process.send_signal(second)
    assert ended(process, within=1.5 + FEW) == 7


@pytest.fixture
def environ() -> dict[str, str]:
    """This process's environment, without a launcher's variables."""
    return {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
