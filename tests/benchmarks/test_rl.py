"""The benchmark of a head that follows, on a toy: a point before the policy's first step, and one behind it."""

import json

import pytest
from headstart.benchmarks import rl
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.targets.target import Target


def test_points_before_and_behind_a_step(saved_target, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "EVERY", 1)
    head = save_head(
        build_head(HEADS["medusa"].config_class(type="medusa"), Target.load(saved_target)), tmp_path / "head"
    )
    rows = [{"prompt": f"w{i} w9", "answer": "w7"} for i in range(3, 13)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [*map(str, (saved_target, head, tmp_path / "prompts.jsonl", tmp_path / "out"))]
    words += ["--steps", "1", "--held-out", "4", "--max-new-tokens", "12", "--samples", "4", "--rate", "1e-2"]
    rl.main([*words, "--prompts-per-step", "2", "--share", "1"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    first, second = results["points"]
    assert first["kl"] == pytest.approx(0, abs=1e-5) and second["kl"] > 0.001, "the policy moves"
    assert first["frozen"] == first["followed"] and second["frozen"][0] >= 1
    assert results["following"]["head_steps"] == 2 and 0 < results["following"]["share"] < 1
