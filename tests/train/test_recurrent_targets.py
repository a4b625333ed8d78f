"""Training on targets with recurrent layers: a run that is killed ends as one that was not, to the same bits."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from headstart.configs.jsonl import read_appended
from run_files import metrics
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    **dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=16, max_position_embeddings=256),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {f"linear_{key}": 8 for key in ("key_head_dim", "value_head_dim")}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "bamba": {f"mamba_{key}": 8 for key in ("n_heads", "d_head", "d_state", "chunk_size")}
    | {"mamba_n_groups": 1, "attn_layer_indices": [1, 3]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
NUM_KILLS = 10


@pytest.fixture(params=HYBRIDS)
def run_of(request, world, tmp_path):
    """run_of(name): the config of a run into tmp_path/name: 120 steps, a checkpoint every fifth, validations."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, **HYBRIDS[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    for path in world.glob("target/tokenizer*"):
        (tmp_path / "target" / path.name).write_bytes(path.read_bytes())
    rows = str(world / "rows.jsonl")
    train = {"max_steps": 120, "batch_size": 2, "warmup_steps": 2, "learning_rate": 3e-3, "device": "cpu"}
    train |= {"validate_every": 40, "decode_tokens": 8, "checkpoint_every": 5}

    def written(name: str) -> Path:
        run = {"target": {"path": str(tmp_path / "target")}, "head": {"type": "eagle3", "num_depths": 3}}
        run |= {"data": {"train": rows, "validation": rows}, "train": {**train, "output_dir": str(tmp_path / name)}}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(run))
        return path

    return written


def outcome(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The metrics but for how long they took, and every tensor: of the head, its checkpoints and their optimizer."""
    tensors = {
        f"{path.relative_to(folder)} {name}": value.numpy().tobytes()
        for path in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }
    return metrics(folder), tensors


@pytest.mark.soak
def test_ten_kills_at_random_moments_leave_every_bit_as_it_would_be(run_of, launching, tmp_path):
    def start(name: str) -> int:
        return launching.ask("start", dict(os.environ), [str(run_of(name))], str(tmp_path / f"{name}.log"))

    assert launching.wait([start("whole")]) == [0], (tmp_path / "whole.log").read_text()[-2000:]
    source, seen = random.Random(7), [0]
    for kill in range(NUM_KILLS):
        process = start("killed")
        if kill % 4 != 3:  # else while it starts, most likely
            launching.wait_for_rows(tmp_path / "killed", seen[-1] + source.randint(1, 9))
        time.sleep(source.uniform(0, 0.5 if kill % 4 == 3 else 0.05))
        os.kill(process, signal.SIGKILL)
        assert launching.wait([process]) == [-signal.SIGKILL], "the run was over before"
        seen.append(len(read_appended(tmp_path / "killed" / "metrics.jsonl")))
    assert len(set(seen)) > NUM_KILLS // 2, seen
    assert launching.wait([start("killed")]) == [0], (tmp_path / "killed.log").read_text()[-2000:]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
