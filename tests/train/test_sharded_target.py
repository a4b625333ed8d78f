"""Training with a target whose layers are sharded over two processes, over gloo: the same losses in less memory."""

import json
import resource
import sys
from functools import cache
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.loading import TargetConfig
from headstart.heads.target import Target
from headstart.heads.targets.sharded import ShardedTarget
from headstart.train.tracking import read_rows
from transformers import AutoConfig, AutoModelForCausalLM

SHARDED = "train.shard_target=true"
HEADS = {"medusa": {}, "eagle3": {"start": "random"}, "eagle3, fitted": {"start": "fitted"}}


@pytest.fixture(scope="module")
def by_one(launching, tmp_path_factory):
    """by_one(override, ...): the run by one process with the whole target; made once."""
    return cache(lambda *how: launching.alone(tmp_path_factory.mktemp("alone") / "one", *how))


def figures(folder):
    """The losses, and the rounds of each validation."""
    rows = read_rows(folder / "metrics.jsonl")
    assert not any("decoded" in row.get("validation", {}) for row in rows)
    return [row["loss"] for row in rows if "loss" in row], [
        (row["validation"]["num_rounds"], row["validation"]["acceptance_length"]) for row in rows if "validation" in row
    ]


def few_rows(source, path, num):
    path.write_text("".join(source.read_text().splitlines(keepends=True)[:num]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_sharded_training_has_the_losses_of_whole_targets(name, launching, world, tmp_path):
    validation = few_rows(world / "rows.jsonl", tmp_path / "validation.jsonl", 5)  # 3 for one rank, 2 for the other
    head = {"type": name.split(",")[0], "num_depths": 3, **HEADS[name]}
    how = (f"head={json.dumps(head)}", f"data.validation={validation}")
    whole = launching.finish("ddp", tmp_path / "whole", *how, "train.decode_prompts=0")
    launching.finish("ddp", tmp_path / "sharded", *how, SHARDED, "train.stop_at_step=9")
    sharded = launching.finish("ddp", tmp_path / "sharded", *how, SHARDED)
    assert figures(sharded) == figures(whole), "the same arithmetic"
    one = launching.alone(tmp_path / "one", *how, "train.decode_prompts=0", "train.batch_size=1", "train.accumulation=2")
    (losses, validated), (ours, ours_validated) = figures(one), figures(sharded)
    assert len(losses) == 20 and ours == pytest.approx(losses, abs=1e-4)
    assert [rounds for rounds, _ in ours_validated] == [rounds for rounds, _ in validated]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp2"])
def test_the_head_may_be_sharded_too(backend, launching, by_one, shared_memory_op, tmp_path):
    how = ("train.max_steps=5", "train.decode_prompts=0")
    two = launching.finish(backend, tmp_path / "two", *how[:1], SHARDED)
    assert figures(two)[0] == pytest.approx(figures(by_one(*how))[0], abs=1e-4)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([], "one process would hold all of it: launch several"),
    ],
)
def test_what_cannot_be_sharded_is_refused(overrides, problem, run, tmp_path):
    with pytest.raises(BadInput) as caught:
        run("eagle3", "refused", SHARDED, *overrides)
    assert str(caught.value) == f"train.shard_target: {problem}"
    assert not (tmp_path / "refused").exists()
