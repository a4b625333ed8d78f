"""Targets in folders, a run config for each, and the stand-in for vLLM; modules of this folder are imported by name."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.targets.target import Target
from words import word_tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from served_targets import KINDS  # noqa: E402


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> Callable[[str], Path]:
    """folder_of(kind): a target's folder, with a tokenizer, whose norms have a gain."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("served") / kind
            model = tiny_model(kind, **KINDS[kind])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.uniform_(0.5, 1.5)
            model.save_pretrained(made[kind])
            word_tokenizer(61).save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def target_of(folder_of: Callable[[str], Path]) -> Callable[[str], Target]:
    """target_of(kind): loaded once, for stand-ins of servers."""
    return cache(lambda kind: Target.load(folder_of(kind), dtype="float32"))


@pytest.fixture
def run_of(tmp_path: Path, folder_of: Callable[[str], Path]) -> Callable[..., str]:
    """run_of(kind, head, num_rows): a run config's path."""

    def make(kind: str = "llama", head: dict[str, Any] | None = None, *, num_rows: int = 12) -> str:
        source = torch.Generator().manual_seed(1)
        rows = []
        for i in range(num_rows):
            length = int(torch.randint(7, 60, (), generator=source))
            ids = torch.randint(3, 61, (length,), generator=source).tolist()
            rows.append({"input_ids": [1, *ids], "prompt_length": 1 + i % 7})
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / f"{kind}.yaml"
        config = {"target": {"path": str(folder_of(kind)), "dtype": "float32"}}
        config |= {"head": head or {"type": "eagle3"}, "data": {"train": str(tmp_path / "rows.jsonl")}}
        path.write_text(json.dumps(config))
        return str(path)

    return make
