"""Training in which two processes read the same rows and learn the chains in them between them, over gloo."""

import json

import pytest
from run_files import losses

pytestmark = pytest.mark.timeout(600, func_only=True)  # not counting the compilation for DeepSpeed

SHARED = "train.context_parallel=2"
HEADS = {
    "eagle3": {"start": "random", "sliding_window": 9},
    "block": {"blocks_per_row": 12, "markov_rank": 8},  # chains drawn, the same in both
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, backend", [("eagle3", "ddp"), ("block", "ddp"), ("eagle3", "zero3"), ("eagle3", "fsdp2")]
)
def test_rows_shared_by_two_processes_have_the_losses_of_one(name, backend, launching, shared_memory_op, tmp_path):
    how = (f"head={json.dumps({'type': name, 'num_depths': 3, **HEADS[name]})}", "train.decode_prompts=0")
    two = launching.finish(backend, tmp_path / "two", *how, SHARED)
    one = launching.alone(tmp_path / "one", *how, "train.batch_size=1")
    assert len(losses(one)) == 20 and losses(two) == pytest.approx(losses(one), abs=1e-4)


def test_processes_that_cannot_share_rows_evenly_are_refused(refused):
    assert refused("eagle3", "run", SHARED) == "train.context_parallel 2: 1 processes are no multiple of it"
