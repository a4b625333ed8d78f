"""The quickstart's prompts: the same for the same seed, no order on both sides of the split."""

import json
import sys

from headstart.scripts.quickstart import prompts
from headstart.scripts.quickstart.prompts import orders


def test_orders_are_distinct_repeatable_and_split():
    train, held_out = orders(300, seed=0, held_out=False), orders(40, seed=0, held_out=True)
    assert train == orders(300, seed=0, held_out=False) != orders(300, seed=1, held_out=False)
    assert len({*train, *held_out}) == 340


def test_the_files_are_rows_that_the_commands_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prompts", str(tmp_path), "--train", "20"])
    prompts.main()
    counts = {}
    for path in tmp_path.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row["messages"][0]["role"] == "user" for row in rows)
        counts[path.stem] = len(rows)
    assert counts == {"prompts": 20, "orders": 12, "contrast": 4}
