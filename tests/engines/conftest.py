"""A target on disk, and heads of it that look trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, head_class, save_head
from headstart.heads.base import DraftHead
from headstart.targets.target import Target
from perturbing import perturb
from words import word_tokenizer


@pytest.fixture(scope="module")
def on_disk(saved_target: Path) -> Target:
    """The target as `headstart train` loads it, so that heads name its folder."""
    return Target.load(saved_target)


def head_on(target: Target, family: str, **options: Any) -> DraftHead:
    """A head whose every weight is away from its start."""
    config = head_class(family).config_class(**options)
    ids = torch.arange(3, 51, 2) if config.draft_vocab_size else None
    return perturb(build_head(config, target, draft_token_ids=ids, seed=2), 0.05, seed=4)


@pytest.fixture
def trained(on_disk: Target, tmp_path: Path) -> Callable[..., Path]:
    """trained("eagle3", **options): the run folder of such a head."""

    def make(family: str, **options: Any) -> Path:
        save_head(head_on(on_disk, family, **options), tmp_path / "run" / "final")
        return tmp_path / "run"

    return make


@pytest.fixture(scope="module")
def sound(on_disk: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """sound("eagle3", "vllm", **options): the folder of such a head's export, made once; of no engine: its own."""
    made: dict[str, Path] = {}

    def make(family: str, to: str, *, dtype: str | None = None, **options: Any) -> Path:
        what = json.dumps([family, to, dtype, options])
        if what not in made:
            folder = tmp_path_factory.mktemp("made")
            save_head(head_on(on_disk, family, **options), folder / "run")
            if to:
                export_head(folder / "run", folder / "out", to=to, dtype=dtype)
            made[what] = folder / ("out" if to else "run")
        return made[what]

    return make


@pytest.fixture
def copied(sound: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """copied("eagle3", "vllm", **options): a copy of such a folder."""
    return lambda family, to, **options: Path(shutil.copytree(sound(family, to, **options), tmp_path / "out"))


@pytest.fixture
def target_for(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[[str], Target]:
    """target_for("eagle3"): a target on disk with which engines load a head of that family."""

    def make(family: str) -> Target:
        tiny_model("qwen2" if family == "mtp" else "llama").save_pretrained(tmp_path / "target")
        word_tokenizer(61).save_pretrained(tmp_path / "target")
        return Target.load(tmp_path / "target")

    return make
