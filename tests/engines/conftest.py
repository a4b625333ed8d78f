"""A target on disk, and heads of it that look trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.engines.heads import build_head, head_class, save_head
from headstart.targets.target import Target
from perturbing import perturb
from words import word_tokenizer


@pytest.fixture(scope="module")
def on_disk(saved_target: Path) -> Target:
    """The target as `headstart train` loads it, so that heads name its folder."""
    return Target.load(saved_target)


@pytest.fixture
def trained(on_disk: Target, tmp_path: Path) -> Callable[..., Path]:
    """trained("eagle3", **options): the run folder of a head whose every weight is away from its start."""

    def make(family: str, **options: Any) -> Path:
        config = head_class(family).config_class(**options)
        ids = torch.arange(3, 51, 2) if config.draft_vocab_size else None
        head = build_head(config, on_disk, draft_token_ids=ids, seed=2)
        save_head(perturb(head, 0.05, seed=4), tmp_path / "run" / "final")
        return tmp_path / "run"

    return make


@pytest.fixture
def target_for(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[[str], Target]:
    """target_for("eagle3"): a target on disk with which engines load a head of that family."""

    def make(family: str) -> Target:
        tiny_model("qwen2" if family == "mtp" else "llama").save_pretrained(tmp_path / "target")
        word_tokenizer(61).save_pretrained(tmp_path / "target")
        return Target.load(tmp_path / "target")

    return make
