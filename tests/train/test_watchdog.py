"""A run that makes no progress ends, and every rank says where it stood."""

import subprocess
import sys

import pytest

STUCK = """
import sys, time
from headstart.train import watchdog

def waits_for_a_rank_that_never_comes():
    time.sleep(float(sys.argv[2]))

watchdog.GRACE = 0.1
with watchdog.Watchdog(minutes=float(sys.argv[1]), rank=1, num_ranks=2) as watch:
    for step in range(9):
        watch.at(f"step {step}: forward")
        time.sleep(0.1)
    watch.at("step 9: update")
    waits_for_a_rank_that_never_comes()
"""


def outcome(*, minutes, stuck):
    line = [sys.executable, "-c", STUCK, str(minutes), str(stuck)]
    return subprocess.run(line, capture_output=True, text=True, timeout=30)


def test_a_process_without_progress_ends_and_says_where_it_stood():
    done = outcome(minutes=0.01, stuck=30)
    assert done.returncode == 124
    first, *stacks = done.stderr.splitlines()
    told = "no progress for 0.01 minutes (train.watchdog_minutes), at step 9: update"
    assert first == f"headstart: rank 1 of 2: {told}"
    assert any("waits_for_a_rank_that_never_comes" in line for line in stacks)


@pytest.mark.parametrize(("minutes", "stuck"), [(0.01, 0.1), (0, 0.9)], ids=["watched", "off"])
def test_a_process_with_progress_or_without_a_watchdog_ends_by_itself(minutes, stuck):
    done = outcome(minutes=minutes, stuck=stuck)
    assert (done.returncode, done.stderr) == (0, "")
