"""A head's folder is replaced whole: a kill while it is saved over another leaves the old head or the new one."""

import json
import os

import pytest
import torch
from headstart.base import files
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head, load_head, save_head


@pytest.mark.slow
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_leaves_the_old_head_or_the_new_one(at_every_call, target, tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    config = HEADS["medusa"].config_class(type="medusa", num_depths=1)
    old, new = (build_head(config, target, seed=seed) for seed in (1, 2))
    weights = {step: {name: p.clone() for name, p in head.named_parameters()} for step, head in ((1, old), (2, new))}
    folder = tmp_path / "best"

    def check():
        head = load_head(folder, target)
        step = json.loads((folder / "config.json").read_text())["headstart"]["training"]["steps"]
        assert all(torch.equal(p, weights[step][name]) for name, p in head.named_parameters())

    def save(head, step):
        return lambda: save_head(head, folder, training={"steps": step})

    at_every_call(save(old, 1), save(new, 2), check)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["best"], "what kills left is gone"


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
