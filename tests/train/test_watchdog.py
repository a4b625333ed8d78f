"""A run that makes no progress ends, each rank saying where it stood; ranks that wait for the main process say it."""

import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from headstart.base.errors import BadInput
from headstart.train.inputs import main_process
from torch._C._distributed_c10d import HashStore

AT_STEP_4 = "step 4: the counts of all ranks"
STUCK = """
import sys, time
from headstart.train.watching import stopping

def waits_for_a_rank_that_never_comes():
    time.sleep(float(sys.argv[2]))

stopping.GRACE = 0.1
with stopping.Watchdog(minutes=float(sys.argv[1]), rank=1, num_ranks=2) as watch:
    for step in range(9):
        watch.at(f"step {step}: forward")
        time.sleep(0.1)
    watch.at("step 9: update")
    waits_for_a_rank_that_never_comes()
"""


def outcome(*, minutes, stuck):
    line = [sys.executable, "-c", STUCK, str(minutes), str(stuck)]
    return subprocess.run(line, capture_output=True, text=True, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "stuck"), [(0.01, 0.1), (0, 0.9)], ids=["watched", "off"])
def test_a_process_with_progress_or_without_a_watchdog_ends_by_itself(minutes, stuck):
    done = outcome(minutes=minutes, stuck=stuck)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("backend", ["ddp", "zero3"])
def test_where_one_rank_is_stuck_all_end_and_say_where_they_stand(backend, launching, shared_memory_op, tmp_path):
    log = tmp_path / "run.log"
    log.with_name("run.log.stuck").touch()
    processes = launching.start(backend, tmp_path / "run", "train.watchdog_minutes=0.3", "train.validate_every=0")
    codes = launching.wait(processes)
    assert codes[1] == 124 and codes[0] in (124, 1), log.read_text()[-3000:]  # 1: its connection ended first
    told = {line.partition(": no progress")[0]: line for line in log.read_text().splitlines() if "no progress" in line}
    if codes[0] == 124:
        assert told["headstart: rank 0 of 2"].endswith("for 0.3 minutes (train.watchdog_minutes), at " + AT_STEP_4)
    assert told["headstart: rank 1 of 2"].endswith("for 0.3 minutes (train.watchdog_minutes), at step 3: its figures")
    assert "in step\n" in log.read_text()  # the stacks


@pytest.fixture
def rank(monkeypatch):
    """rank(i): an accelerator of two processes that share a store; broadcasts of these tests go through the store."""
    store, broadcast = HashStore(), {"since": 0.0}
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(main_process, "turns", Counter())

    def joined(problem: list) -> None:
        if threading.current_thread() is threading.main_thread():  # the rank that waits
            broadcast.update(since=time.perf_counter())

    monkeypatch.setattr(main_process, "broadcast_object_list", joined)

    def make(index: int) -> Any:
        return SimpleNamespace(is_main_process=index == 0, process_index=index, num_processes=2, broadcast=broadcast)

    return make


def test_ranks_wait_outside_of_collectives_until_the_main_process_is_done(rank):
    """A collective gives up after ten minutes; tokenising takes longer than that. Each turn is waited for."""
    waiting = rank(1)
    for _ in range(2):
        ended = []

        def prepare(ended: list[float] = ended) -> None:
            time.sleep(0.15)
            ended.append(time.perf_counter())

        main = threading.Thread(target=main_process.on_main, args=(rank(0), prepare))
        main.start()
        main_process.on_main(waiting, lambda: pytest.fail("the main process alone works"))
        main.join()
        assert waiting.broadcast["since"] >= ended[0], "no collective was begun before"


def test_a_main_process_that_fails_keeps_nobody_waiting(rank):
    def fail() -> None:
        raise BadInput("data.train: no such file")

    with pytest.raises(BadInput, match="no such file"):
        main_process.on_main(rank(0), fail)
    began = time.perf_counter()
    main_process.on_main(rank(1), lambda: None)
    assert time.perf_counter() - began < 5


def test_nobody_waits_for_ever(rank, monkeypatch):
    monkeypatch.setattr(main_process, "LONGEST_WAIT_SECONDS", 0.2)
    with pytest.raises(BadInput, match="the main process has not been done"):
        main_process.on_main(rank(1), lambda: None)
