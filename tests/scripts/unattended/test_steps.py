"""A step is a command in a process of its own: stopped in time, quoted where it refuses, ended with its parent."""

import subprocess
import sys
import time

import pytest
import torch
from headstart import __version__
from headstart.base.errors import BadInput
from headstart.scripts.unattended.running.clock import Clock
from headstart.scripts.unattended.running.journal import Evaluation, Machine, Rung
from headstart.scripts.unattended.running.session import AutoRun, AutoSettings
from headstart.scripts.unattended.running.steps import CommandRunner
from headstart.train.watching.stopping import Stopping


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """Runs its words as a shell's."""
    monkeypatch.setattr(CommandRunner, "process_arguments", lambda self, words: ["sh", "-c", *words])
    return CommandRunner(tmp_path / "logs", Clock(tmp_path / "clock.json", 100), Stopping())


def test_what_a_command_says_goes_into_its_log(runner):
    record = runner.run("says", ["echo one; echo two >&2; exit 1"])
    assert (record.exit_code, record.stopped) == (1, False)
    assert (runner.logs / "says.log").read_text() == "one\ntwo\n"


def test_a_command_is_stopped_when_its_time_is_over(runner):
    began = time.monotonic()
    record = runner.run("waits", ["exec sleep 60"], until=0.0)
    assert record.stopped and record.exit_code and time.monotonic() - began < 30


def test_what_a_command_refuses_is_told_in_its_words(runner):
    with pytest.raises(BadInput, match="^trains: the file is not there$"):
        runner.run("trains", ["echo noise; echo 'headstart: the file is not there'; exit 2"])


def test_training_is_started_by_the_launcher_alone(tmp_path):
    clock = Clock(tmp_path / "clock.json", 100)
    runner = CommandRunner(tmp_path, clock, Stopping(), ["accelerate", "launch"])
    assert runner.command_line(["train", "a.yaml"]) == "accelerate launch -m headstart.train a.yaml"
    assert runner.command_line(["eval", "--head", "a b"]) == "headstart eval --head 'a b'"
    assert runner.process_arguments(["eval"])[-2:] == ["headstart.scripts.cli", "eval"]


KILLED = """
import os, signal, sys
from pathlib import Path
from headstart.scripts.unattended.running.clock import Clock
from headstart.scripts.unattended.running.steps import CommandRunner
from headstart.train.watching.stopping import Stopping

folder = Path(sys.argv[1])
CommandRunner.process_arguments = lambda self, words: ["sh", "-c", *words]
runner = CommandRunner(folder, Clock(folder / "clock.json", 100), Stopping())
killed = lambda: not (folder / "waits.log").read_text() or os.kill(os.getpid(), signal.SIGKILL)
runner.run("waits", ["echo $$; exec sleep 60"], meanwhile=killed)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells children of their parent's end on Linux alone")
def test_a_command_ends_with_the_process_that_started_it(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    pid = int((tmp_path / "waits.log").read_text())
    for _ in range(100):
        if not is_alive(pid):
            break
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid):
    """Whether a process is there, and no zombie that nobody has asked about."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("is_timed", "is_learning", "ending"),
    [(True, False, "what was timed is timed again"), (True, True, "what was timed stays"), (False, False, __version__)],
)
def test_on_another_machine_times_are_taken_again_until_candidates_learn_by_them(
    is_timed, is_learning, ending, tmp_path, monkeypatch, capsys
):
    settings = AutoSettings(
        target="t", budget=60.0, dtype="float32", device="cpu", launcher="", seed=0, prompts="p", batch_size=1,
        max_new_tokens=8, draft_window="", traffic="0f",
    )  # fmt: skip
    for number, threads in enumerate((1, 1, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with AutoRun.open(tmp_path / "out", settings) as run:
            told = capsys.readouterr().err
            if number < 2:
                assert not told
                if is_timed:
                    run.journal.machine = Machine(10.0, "float32", 1.0, 10, [])
                    run.journal.least_budget, run.journal.answers_until, run.journal.learning_until = 30.0, 15.0, 45.0
                    run.journal.evaluation = Evaluation(8, 3)
                run.journal.rungs = [Rung({"medusa": 10})] * is_learning
                run.write()
            else:
                journal = run.journal
                times = [journal.machine, journal.least_budget, journal.answers_until, journal.learning_until]
                planned = [*times, journal.evaluation]
                assert [bool(part) for part in planned] == [is_learning] * 5 and ", 1 threads, headstart " in told
                assert told.strip().endswith(ending)
