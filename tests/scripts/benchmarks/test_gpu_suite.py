"""The GPU suite at toy size, on a CPU: every stage runs, leaves its figures, and is not run twice."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from headstart.eval.measurement.lossless import LosslessReport
from headstart.scripts.benchmarks.gpu import product as gpu_product
from headstart.scripts.benchmarks.gpu.product import BARS, FAMILIES, SIZES, Work, bar_figures, step_seconds
from headstart.scripts.benchmarks.store import judge

ROOT = Path(__file__).parents[3]
STAGES = ["answers", "heads", "evaluate", "sampled", "conditions", "plan", "engine", "training"]


def suite(*words):
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["bash", ROOT / "scripts/benchmarks/gpu/suite.sh", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_stage_runs_at_toy_size(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = suite("--size", "toy", "--output", tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 180, "of processor time: three minutes on a machine with nothing else to do"
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in STAGES}
    tests = ElementTree.parse(tmp_path / "tests.xml").getroot()[0].attrib
    assert tests["failures"] == tests["errors"] == "0" and int(tests["skipped"]) > 40, "there is no GPU here"

    for shape in ("llama", "qwen3"):
        target = json.loads((tmp_path / shape / "pretrain.json").read_text())
        assert target["loss_curve"][0][1] > target["loss"] + 0.2 and target["samples"]
    assert found["answers"]["counts"]["failed"] == 0 and found["answers"]["features"]["num_tokens"] > 100
    for family in FAMILIES:
        learned = found["heads"][family]
        assert learned["max_steps"] >= 3 and learned["tokens_per_second"] > 0 and learned["loss"] > 0
        assert (tmp_path / "heads" / family / "final" / "config.json").is_file()

    results = found["evaluate"]["results"]
    assert {one["drafter"] for one in results} == set(FAMILIES)
    assert {(one["suite"], one["tree"]) for one in results if one["drafter"] == "medusa"} == {
        (name, tree) for name in ("code", "reasoning") for tree in ("chain", "static", "dynamic")
    }
    assert all(one["lossless"]["identical"] == one["lossless"]["checked"] == one["num_prompts"] for one in results)
    assert found["evaluate"]["holds"] is None, "bars are for a GPU"
    conditions = found["conditions"]
    assert conditions["figures"] == {"texts_unexplained": 0} and conditions["holds"]
    assert all(one["sampling_check"]["p_value"] is not None for one in found["sampled"]["results"])
    assert found["sampled"]["figures"] == {"results_that_deviate": 0}
    assert {one["batch_size"] for one in conditions["batches"]} == set(SIZES["toy"].batch_sizes)
    assert found["plan"]["recommendation"] and (tmp_path / "eval" / "report.html").is_file()

    again = suite("--size", "toy", "--output", tmp_path, *STAGES[:6])
    assert again.returncode == 0 and again.stdout.count("is there already") == 6


def test_the_suite_refuses_an_unknown_stage():
    done = suite("engin")
    stages = "tests pretrain answers heads evaluate sampled conditions plan engine training"
    assert (done.returncode, done.stderr) == (2, f"gpu_suite: unknown stage engin: expected {stages}\n")


def test_a_stage_without_a_target_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_product", "heads", "--target", str(tmp_path), "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        gpu_product.main()
    assert caught.value.code == 2 and not (tmp_path / "heads.json").exists()
    assert capsys.readouterr().err == (
        f"gpu_product: --target {tmp_path}: no pretrained target; the stage pretrain makes one\n"
    )


def test_a_steps_time_is_that_of_packed_rows(tmp_path):
    rates = [10.0, 20.0, 30.0, 100.0, 400.0, 200.0]  # the first three warm up
    rows = [{"step": i + 1, "tokens_per_second": rate} for i, rate in enumerate(rates)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = Work(**{**vars(SIZES["toy"]), "rows": 4, "max_length": 1000})
    assert step_seconds(tmp_path, work) == 4 * 1000 / 200.0


def test_bars_are_about_the_worst_domain_and_its_best_tree(made_result):
    def result(drafter, suite, tree, length, speedup, unexplained=0):
        lossless = LosslessReport(unexplained=unexplained)
        figures = {"acceptance_length": length, "speedup": speedup, "lossless": lossless}
        return made_result(drafter=drafter, suite=suite, tree=tree, **figures)

    results = [
        result("eagle3", "code", "chain", 3.2, 2.1),
        result("eagle3", "reasoning", "chain", 4.0, 1.9),
        result("eagle3", "code", "dynamic", 9.0, 9.0),
        result("medusa", "code", "chain", 2.0, 1.9),
        result("medusa", "code", "static", 2.2, 1.4),
        result("medusa", "code", "dynamic", 2.2, 1.6),
        result("medusa", "reasoning", "static", 2.2, 1.7, unexplained=1),
    ]
    found = bar_figures(results)
    assert found == {
        "eagle3_chain_acceptance_length": 3.2,
        "eagle3_chain_speedup": 1.9,
        "medusa_tree_speedup": 1.6,
        "texts_unexplained": 1,
    }
    holds = judge(found, BARS)
    assert [name for name, held in holds.items() if not held] == ["eagle3_chain_speedup", "texts_unexplained"]
    assert not any(judge(dict.fromkeys(found), BARS).values()), "what was not measured holds nothing"
