"""A head's folder is read as it was written, also behind a kill; what is damaged is told in one line."""

import json

import pytest
from headstart.base import files
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head, load_head, save_head


def test_what_a_kill_between_two_renames_left_is_read(target, tmp_path):
    """Where folders cannot be exchanged. tests/base/test_files.py kills at every call."""
    folder = save_head(build_head(HEADS["medusa"].config_class(type="medusa", num_depths=1), target), tmp_path / "head")
    folder.rename(files._replaced(folder))
    load_head(folder, target)


DAMAGED = [
    lambda part: part.pop("target"),
    lambda part: part.update(target="name"),
    lambda part: part.update(target={"name": None, "fingerprint": None}),
    lambda part: part.update(head=None),
    lambda part: part.update(head=[1]),
    lambda part: part["head"].pop("type"),
    lambda part: part["head"].update(type=7),
    lambda part: part["head"].update(num_depths="three"),
    lambda part: part["head"].update(feature_layers=5),
    lambda part: part.update(training=[]),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_of_a_head_is_one_line(target, tmp_path, damage):
    folder = save_head(build_head(HEADS["medusa"].config_class(type="medusa"), target), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    damage(config["headstart"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput):
        load_head(folder, target)
