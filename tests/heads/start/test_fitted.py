"""Heads that start in closed form begin nearer to the target than fresh ones, or say that there are too few rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.block_network import BlockConfig
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.registry import build_head

BLOCK: dict[str, Any] = {"num_layers": 1, "loss": {"soft_ce": 1.0}, "feature_layers": [1, 2], "num_depths": 3}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (Eagle3Config, {"feature_layers": [1, 2], "num_depths": 2}),
    (BlockConfig, {**BLOCK, "markov_rank": 8}),
    (BlockConfig, {**BLOCK, "markov_rank": 8, "output": "own", "sample_from_anchor": False}),
    (BlockConfig, {**BLOCK, "markov_rank": 0, "num_layers": 2, "has_head_norms": False}),
    (BlockConfig, {**BLOCK, "markov_rank": 64, "num_blocks": 4, "narrow_share": 0.5}),
]


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize(("config", "options"), CASES)
def test_a_fitted_head_begins_at_every_depth_below_even_guessing_and_a_fresh_one(config, options, target, batches):
    fresh, fitted = (build_head(config(start=start, **options), target) for start in ("random", "fitted"))
    fitted.begin_training(iter(batches[:-1]))
    losses = [head(batches[-1]).depth_loss / head(batches[-1]).depth_count for head in (fresh, fitted)]
    assert (losses[1] < losses[0]).all()
    assert (losses[1] <= torch.tensor(float(target.vocab_size)).log() + 0.1).all()


@pytest.mark.parametrize(("config", "options"), CASES[:2])
def test_too_few_rows_are_refused(config, options, target, batches):
    few = replace(batches[0], loss_mask=batches[0].loss_mask & (torch.arange(40) < 10))
    with pytest.raises(BadInput, match="head.start fitted: .* supervised tokens, needs 64; else random"):
        build_head(config(start="fitted", **options), target).begin_training(iter([few]))
