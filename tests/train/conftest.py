"""A tiny run: a saved target, text that it wrote, and training on it from a config."""

from pathlib import Path

import pytest
import yaml
from headstart.train import trainer
from headstart.train.config import load_run


@pytest.fixture
def world(saved_target) -> Path:
    """The folder with `target` and `rows.jsonl`."""
    return saved_target.parent


@pytest.fixture
def run(world, tmp_path):
    """run(head_type, name, "key=value", ...): trains into tmp_path/name and returns that folder."""

    def start(head_type, name, *overrides):
        config = {
            "target": {"path": str(world / "target")},
            "head": {"type": head_type, "num_depths": 3},
            "data": {"train": str(world / "rows.jsonl")},
            "train": {"max_steps": 6, "batch_size": 2, "warmup_steps": 2, "learning_rate": 3e-3, "device": "cpu"},
        }
        config["train"]["output_dir"] = str(tmp_path / name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        trainer.train(load_run(path, overrides))
        return tmp_path / name

    return start
