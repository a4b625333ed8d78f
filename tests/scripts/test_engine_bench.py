"""The engine's benchmark runs at toy size, judges what it found, and its suite refuses what it does not know."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from headstart.scripts import engine_bench

ROOT = Path(__file__).parents[2]


def test_a_toy_run_writes_its_figures_and_what_they_hold(tmp_path, monkeypatch, capsys):
    arguments = ["engine_bench", "--size", "toy", "--device", "cpu", "--heads", "medusa", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", str(tmp_path / "engine.json")])
    engine_bench.main()
    written = json.loads((tmp_path / "engine.json").read_text())
    [found] = written["figures"]
    assert found == json.loads(capsys.readouterr().out)[0]
    assert (found["head"], found["steps"]) == ("medusa", "eager")
    verify = (found["verify_ms"] + found["overhead_ms"]) / found["baseline_ms"]
    assert found["verify_in_baseline_steps"] == pytest.approx(verify, abs=1e-3)
    assert found["speedup_over_formula_error"] < 0.5 and found["baseline_tokens_per_second"] > 0
    assert set(written["bars"]) < set(found) and set(written["bars"]) < set(written["holds"][0])


def test_a_bar_is_held_or_not():
    good = {
        "baseline_tokens_per_second": 190.0,
        "share_of_copy_bandwidth": 0.6,
        "verify_in_baseline_steps": 1.25,
        "speedup_over_formula_error": 0.1,
    }
    assert all(engine_bench.judge(good).values())
    for name, worse in (("share_of_copy_bandwidth", 0.59), ("verify_in_baseline_steps", 1.26)):
        assert [key for key, holds in engine_bench.judge({**good, name: worse}).items() if not holds] == [name]
    assert not engine_bench.judge({**good, "share_of_copy_bandwidth": None})["share_of_copy_bandwidth"]


def test_the_suite_refuses_an_unknown_stage():
    done = subprocess.run(["bash", ROOT / "scripts/gpu_suite.sh", "engin"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "gpu_suite: unknown stage engin: expected tests, pretrain or engine\n"
