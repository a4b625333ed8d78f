"""Training with a target whose layers are sharded over two processes, over gloo: the same losses in less memory."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from headstart.base.children import free_port
from run_files import losses, validations
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = pytest.mark.timeout(600, func_only=True)  # not counting the compilation for DeepSpeed

SHARDED = "train.shard_target=true"
HEADS = {"medusa": {}, "eagle3": {"start": "fitted"}}


def figures(folder):
    """The losses, and the rounds of each validation."""
    validated = [figures for _, figures in validations(folder)]
    assert not any("decoded" in one for one in validated)
    return losses(folder), [(one["num_rounds"], one["acceptance_length"]) for one in validated]


def few_rows(source, path, num):
    path.write_text("".join(source.read_text().splitlines(keepends=True)[:num]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_sharded_training_has_the_losses_of_whole_targets(name, launching, world, tmp_path):
    validation = few_rows(world / "rows.jsonl", tmp_path / "validation.jsonl", 5)  # 3 for one rank, 2 for the other
    head = {"type": name, "num_depths": 3, **HEADS[name]}
    how = (f"head={json.dumps(head)}", f"data.validation={validation}")
    whole = launching.finish("ddp", tmp_path / "whole", *how, "train.decode_prompts=0")
    launching.finish("ddp", tmp_path / "sharded", *how, SHARDED, "train.stop_at_step=9")
    sharded = launching.finish("ddp", tmp_path / "sharded", *how, SHARDED)
    assert figures(sharded) == figures(whole), "the same arithmetic"
    one = launching.alone(
        tmp_path / "one", *how, "train.decode_prompts=0", "train.batch_size=1", "train.accumulation=2"
    )
    (alone, validated), (ours, ours_validated) = figures(one), figures(sharded)
    assert len(alone) == 20 and ours == pytest.approx(alone, abs=1e-4)
    assert [rounds for rounds, _ in ours_validated] == [rounds for rounds, _ in validated]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero2", "zero3", "fsdp2"])
def test_the_head_may_be_sharded_too(backend, launching, by_one, shared_memory_op, tmp_path):
    how = ("train.max_steps=5", "train.decode_prompts=0")
    two = launching.finish(backend, tmp_path / "two", *how[:1], SHARDED)
    assert figures(two)[0] == pytest.approx(figures(by_one(*how))[0], abs=1e-4)


WATCH = """
import sys, torch, torch.distributed as dist
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from headstart.targets.sharded import ShardedTarget

def bytes_of(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return 1024 * int(line.split()[1])

path, kind = sys.argv[1:]
dist.init_process_group("gloo")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = bytes_of("VmRSS")
if kind == "sharded":
    target = ShardedTarget.read(TargetConfig(path=path), torch.device("cpu"), num_processes=2)
else:
    target = Target.load(path)
with torch.no_grad():
    print("read", float(target.read_texts(torch.arange(64)[None]).post_norm.double().sum()))
print("grew", bytes_of("VmHWM") - before)
"""


@pytest.mark.slow
def test_no_process_ever_holds_the_whole_target(tmp_path):
    sizes: dict[str, Any] = dict(vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=40)
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    grew, read = {}, set[float]()
    for kind in ("whole", "sharded"):
        env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env["MALLOC_MMAP_THRESHOLD_"] = "131072"  # or glibc keeps what is freed for itself
        line = [sys.executable, "-c", WATCH, str(tmp_path), kind]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen(line, env={**env, "RANK": str(rank)}, **how) for rank in range(2)]
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), said
        grew[kind] = max(float(text.split("grew ")[1].split()[0]) / whole for text in said)
        read |= {float(text.split("read ")[1].split()[0]) for text in said}
    assert len(read) == 1, "both read the same"
    assert grew["whole"] > 0.95 and grew["sharded"] < 0.7, f"{grew} of {whole / 2**20:.0f} MB"


@pytest.fixture
def two(monkeypatch):
    """Runs take themselves for one of two processes until their target is loaded."""

    class Two:
        num_processes, process_index, is_main_process, device = 2, 0, True, torch.device("cpu")

    monkeypatch.setattr("headstart.train.start.start_accelerator", lambda _: Two())


def test_one_process_is_told_to_launch_several(refused):
    told = "train.shard_target: one process would hold all of it: launch several"
    assert refused("eagle3", "a", SHARDED) == told


@pytest.mark.parametrize(
    ("head_type", "override", "problem"),
    [
        ("eagle3", "target.device_map=auto", "with target.device_map one process has all GPUs: leave one of both out"),
        ("eagle3", "data.features=here", "training from data.features needs no layers: leave it out"),
        ("draft_lm", "train.seed=0", "head draft_lm reads the layers' weights itself"),
        ("medusa", "head.target_lora_rank=4", "head medusa reads the layers' weights itself"),
        ("eagle3", "train.decode_prompts=4", "sharded layers cannot decode: leave train.decode_prompts out"),
    ],
)
def test_what_cannot_be_sharded_is_one_line(head_type, override, problem, refused, two, monkeypatch):
    monkeypatch.setattr("headstart.train.start.actual_launch", lambda _: None)
    assert refused(head_type, "a", SHARDED, override) == f"train.shard_target: {problem}"
