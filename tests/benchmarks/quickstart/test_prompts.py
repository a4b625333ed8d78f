"""The quickstart's prompts: the same for the same seed, no order and no function on both sides of the split."""

import json
import random
import sys

import pytest
from headstart.benchmarks.quickstart import prompts
from headstart.benchmarks.quickstart.prompts import function, functions, is_held_out, orders


def test_orders_are_distinct_repeatable_and_split():
    train, held_out = orders(300, seed=0, held_out=False), orders(40, seed=0, held_out=True)
    assert train == orders(300, seed=0, held_out=False) != orders(300, seed=1, held_out=False)
    assert len({*train, *held_out}) == 340


def test_a_function_is_asked_for_on_one_side_only():
    train, held_out = functions(240, seed=0, held_out=False), functions(12, seed=1, held_out=True)
    assert train == functions(240, seed=0, held_out=False) and len({*train, *held_out}) == 252
    asked = dict(function(random.Random(seed)) for seed in range(3000))
    sides = [{asked[text] for text in texts if text in asked} for texts in (train, held_out)]
    assert not sides[0] & sides[1] and len(sides[0]) > 60 and all(map(is_held_out, sides[1]))


@pytest.mark.parametrize("domain", ["orders", "functions"])
def test_the_files_are_rows_that_the_commands_read(domain, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prompts", str(tmp_path), "--train", "20", "--domain", domain])
    prompts.main()
    counts = {}
    for path in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row["messages"][0]["role"] == "user" for row in rows)
        counts[path.stem] = len(rows)
    assert counts == {"prompts": 20, domain: 12, "contrast": 4}
