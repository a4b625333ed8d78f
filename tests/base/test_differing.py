"""Settings are the same however their paths are written, and the first that differs is named."""

import os

import pytest
from headstart.base.differing import first_difference
from headstart.base.files import from_anywhere

HERE, HOME = os.getcwd(), os.path.expanduser("~")


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({"target": "a/model", "seed": 0}, {"target": "a/model", "seed": 1}, "seed 0, now 1"),
        ({"target": "a/model"}, {"target": f"{HERE}/a/model"}, None),
        ({"target": "a/model"}, {"target": "./a//model/"}, None),
        ({"target": "~/model"}, {"target": f"{HOME}/model"}, None),
        ({"heads": ["a/final"]}, {"heads": [f"{HERE}/a/final"]}, None),
        ({"heads": ["a"]}, {"heads": ["a", "b"]}, "heads ['a'], now ['a', 'b']"),
        ({"head": {"path": "a"}}, {"head": {"path": "b"}}, "head.path a, now b"),
        ({"head": ""}, {"head": "."}, "head , now ."),
        ({"stop": "\0"}, {"stop": "\0\0"}, "stop \0, now \0\0"),
    ],
)
def test_the_first_difference_is_named_and_another_way_to_write_a_path_is_none(before, now, difference):
    assert first_difference(before, now) == difference


def test_a_path_is_recorded_as_it_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert from_anywhere("model") == str(tmp_path / "model") == from_anywhere(str(tmp_path / "model"))
    assert from_anywhere("owner/name") == "owner/name"
