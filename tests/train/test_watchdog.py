"""A run that makes no progress ends, and every rank says where it stood."""

import subprocess
import sys

import pytest

AT_STEP_4 = "step 4: the counts of all ranks"
STUCK = """
import sys, time
from headstart.train import stopping

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
def test_a_process_without_progress_ends_and_says_where_it_stood():
    done = outcome(minutes=0.01, stuck=30)
    assert done.returncode == 124
    first, *stacks = done.stderr.splitlines()
    told = "no progress for 0.01 minutes (train.watchdog_minutes), at step 9: update"
    assert first == f"headstart: rank 1 of 2: {told}"
    assert any("waits_for_a_rank_that_never_comes" in line for line in stacks)


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
    processes = launching.start(backend, tmp_path / "run", "train.watchdog_minutes=0.15", "train.validate_every=0")
    codes = launching.wait(processes)
    assert codes[1] == 124 and codes[0] in (124, 1), log.read_text()[-3000:]  # 1: its connection ended first
    told = {line.partition(": no progress")[0]: line for line in log.read_text().splitlines() if "no progress" in line}
    if codes[0] == 124:
        assert told["headstart: rank 0 of 2"].endswith("for 0.15 minutes (train.watchdog_minutes), at " + AT_STEP_4)
    assert told["headstart: rank 1 of 2"].endswith("for 0.15 minutes (train.watchdog_minutes), at step 3: its figures")
    assert "in step\n" in log.read_text()  # the stacks
