"""What was made once is used again for the same content, wherever that lies, and never for other content there."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.masks.chat import ENCODING
from headstart.data_pipelines.storage import features as features_module
from headstart.data_pipelines.storage.features import check_features
from headstart.data_pipelines.storage.shards import Shards
from headstart.engines.heads import build_head
from headstart.scripts.data.extract import extract
from headstart.scripts.unattended.running.session import files_digest
from headstart.targets.target import Target
from headstart.train.inputs.config import load_inputs

# the golden samples that each version of the encoding gives; another file needs another version, if what it holds of
# rows that were in it has changed
GOLDEN = {3: "ff0132a613549c90"}


def with_run(folder: Path) -> Path:
    """The folder with run.yaml, a run on its target and its rows."""
    data = {"train": str(folder / "A.jsonl"), "max_length": 256}
    run = {"target": {"path": str(folder / "target")}, "head": {"type": "eagle3"}, "data": data}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder


@pytest.fixture(scope="module")
def made(saved_target, tmp_path_factory) -> Path:
    """A folder with a target, rows A.jsonl, a run on them, and its features in out."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(saved_target, folder / "target")
    shutil.copy(saved_target.with_name("rows.jsonl"), folder / "A.jsonl")
    extract(str(with_run(folder) / "run.yaml"), folder / "out", device="cpu")
    return folder


@pytest.fixture
def world(made, tmp_path) -> Path:
    """Such a folder of the test's own."""
    return with_run(shutil.copytree(made, tmp_path / "world"))


def edited(path: Path, edit: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def other_rows(world: Path, _: Any) -> None:
    """As many bytes, at the same path."""
    lines = (world / "A.jsonl").read_text().splitlines(keepends=True)
    (world / "A.jsonl").write_text("".join(reversed(lines)))


def other_template(world: Path, _: Any) -> None:
    (world / "target/chat_template.jinja").write_text("{{ messages }}")


def other_tokenizer(world: Path, _: Any) -> None:
    def swapped(data: Any) -> None:
        words = data["model"]["vocab"]
        words["w5"], words["w6"] = words["w6"], words["w5"]

    edited(world / "target/tokenizer.json", swapped)


def other_config(world: Path, _: Any) -> None:
    edited(world / "target/config.json", lambda data: data.update(rms_norm_eps=1e-3))


def other_encoding(_: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(features_module, "ENCODING", ENCODING + 1)


CHANGES = {
    "rows": other_rows,
    "template_hash": other_template,
    "tokenizer_hash": other_tokenizer,
    "target_config_hash": other_config,
    "encoding": other_encoding,
}


def check_for_training(world: Path, *overrides: str) -> None:
    """As the start of a training run on the features."""
    run = load_inputs(str(world / "run.yaml"), overrides)
    target = Target.load(run.target.path)
    check_features(Shards(world / "out"), build_head(run.head, target), target, data=run.data)


@pytest.mark.parametrize("key", CHANGES)
def test_features_of_other_content_are_refused_in_one_line_that_says_which(key, world, monkeypatch):
    CHANGES[key](world, monkeypatch)
    with pytest.raises(BadInput, match=rf"out: holds samples with {key} .*; choose another folder$") as caught:
        extract(str(world / "run.yaml"), world / "out", device="cpu")
    assert len(str(caught.value)) < 300
    with pytest.raises(BadInput, match=key if key != "target_config_hash" else "another config.json"):
        check_for_training(world)


def test_features_of_the_same_content_are_accepted_by_any_path(world, capsys):
    shutil.move(world / "A.jsonl", world / "B.jsonl")
    moved = [f"data.train={world / 'B.jsonl'}"]  # and the target is a copy of that which gave them
    extract(str(world / "run.yaml"), world / "out", moved, device="cpu")
    assert capsys.readouterr().out.endswith("finished already\n")
    check_for_training(world, *moved)


def test_another_encoding_has_another_version():
    golden = Path(__file__).parents[1] / "masks/golden_masks.json"
    assert hashlib.sha256(golden.read_bytes()).hexdigest()[:16] == GOLDEN[ENCODING]


def test_an_unattended_run_knows_its_targets_files(world):
    place, before = str(world / "target"), files_digest([str(world / "target")])
    assert files_digest([place]) == before == files_digest([str(shutil.copytree(place, world / "copy"))])
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        path = world / "target" / name
        kept = path.read_bytes()
        path.write_bytes(kept[:-9] + bytes(9))
        assert files_digest([place]) != before, name
        path.write_bytes(kept)
