"""A run says at its start whether backward computes activations again, which depends on its longest batch alone."""

import numpy as np
import torch
from headstart.data_pipelines.loader import BatchPlan
from headstart.data_pipelines.packing import RowSequence
from headstart.heads.block_network import BlockConfig
from headstart.heads.nn import kept
from headstart.heads.registry import build_head
from headstart.train.config import TrainConfig
from headstart.train.trainer import recomputation

CPU = torch.device("cpu")


def test_a_run_says_that_it_computes_activations_again(target, monkeypatch):
    head, config = build_head(BlockConfig(num_depths=3, num_blocks=8), target), TrainConfig(output_dir="", max_steps=1)
    plan = BatchPlan(RowSequence(np.array([5, 9, 100]), layout="padded", seed=0), batch_size=2)
    needed = head.kept_bytes(16, itemsize=4, num_depths=3)  # 8 blocks of each row
    before = torch.get_rng_state()
    monkeypatch.setattr(kept, "most_kept", lambda device: needed)
    assert recomputation(head, plan, config, CPU) is None
    monkeypatch.setattr(kept, "most_kept", lambda device: needed - 1)
    line = recomputation(head, plan, config, CPU)
    assert line is not None and line.startswith("batches of up to 2 x 100 tokens: backward computes ")
    assert torch.equal(torch.get_rng_state(), before)
