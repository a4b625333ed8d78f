"""The engine's benchmark runs at toy size, goes on where it was, and judges what it found."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.generate import generate
from headstart.eval.report.document import build_report, write_report
from headstart.heads.registry import HEADS
from headstart.scripts.benchmarks import engine_bench, store
from headstart.scripts.benchmarks.engine_bench import (
    BARS,
    over_captured_graphs,
    predictions,
    read_acceptance,
    verify_costs,
)
from headstart.scripts.benchmarks.engine_cells import SIZES, Cell, Workbench, cells_of, random_target
from headstart.scripts.benchmarks.store import judge

CPU = torch.device("cpu")
GOOD = {
    "baseline_tokens_per_second": 190.0,
    "share_of_copy_bandwidth": 0.6,
    "verify_in_baseline_steps": 1.25,
    "round_overhead": 0.05,
    "speedup_over_formula_error": 0.1,
}
RATES = dict.fromkeys(HEADS, (0.5,))


@dataclass
class FixedEnvironment:
    copy_gigabytes_per_second: float = 10.0

    @classmethod
    def of(cls, device):
        return cls()


@pytest.fixture(scope="module")
def toy():
    return random_target(SIZES["toy"], CPU)


@pytest.fixture
def few_cells(monkeypatch):
    """Two cells, and no head; what is measured stands in a list."""
    done: list[str] = []
    usual = {"steps": "eager", "batch_size": 1, "context": 16, "num_passes": 1}
    cells = [Cell(name="baseline", **usual), Cell(name="verify 2", num_draft_tokens=1, **usual)]
    monkeypatch.setattr(engine_bench, "cells_of", lambda *arguments: cells)
    monkeypatch.setattr(store, "release_memory", lambda: None)  # a full collection takes a while in a test run
    monkeypatch.setattr(engine_bench, "Environment", FixedEnvironment)
    measure = Workbench.measure
    monkeypatch.setattr(Workbench, "measure", lambda bench, cell: done.append(cell.name) or measure(bench, cell))
    return done


def run(path, *more):
    return engine_bench.main(["--size", "toy", "--device", "cpu", "--output", str(path), *more])


@pytest.mark.slow
def test_a_toy_run_measures_every_cell(tmp_path, capsys):
    assert run(tmp_path / "engine.json") == 0
    written = json.loads((tmp_path / "engine.json").read_text())
    cells = cells_of(SIZES["toy"], "eager", RATES)
    assert list(written["cells"]) == [cell.name for cell in cells]
    assert not [one for one in written["cells"].values() if "failed" in one]
    figures = {one["of"]: one for one in written["figures"]}
    assert set(figures) == {"baseline", *HEADS} == set(written["holds"])
    assert all(set(written["holds"][family]) == set(list(GOOD)[2:]) for family in HEADS)
    for family in HEADS:
        decoded, timed = written["cells"][f"synthetic {family}"], written["cells"][f"draft {family}"]
        assert decoded["identical_texts"] == decoded["num_prompts"]
        assert decoded["acceptance_length"] > 2 and figures[family]["speedup"] == decoded["speedup"]
        parts = timed["draft_ms"] + timed["verify_ms"] + timed["overhead_ms"]
        assert timed["round_ms"] == pytest.approx(parts, abs=1e-3)
    assert written["acceptance"]["synthetic"] and "fixed" in written["acceptance"]["mtp"]["source"]
    assert capsys.readouterr().out.count(" s)\n") == len(cells), "a line for each"


def test_all_that_is_asked_of_the_engine_has_a_cell():
    cells = cells_of(SIZES["8b"], "graph", RATES)
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith("verify")] == [f"verify {n}" for n in SIZES["8b"].verified[1:]]
    assert all({f"draft {family}", f"synthetic {family}"} < set(names) for family in HEADS)
    places = {(cell.batch_size, cell.context) for cell in cells if cell.name.startswith("batch")}
    assert places == {(2**i, 512) for i in range(7)} | {(b, 2**i) for b in (1, 8) for i in range(11, 15)}
    assert [cell.head for cell in cells if cell.steps == "eager"] == ["eagle3"]
    cut = [(cell.name, cell.head, cell.draft_vocabulary) for cell in cells if cell.draft_vocabulary]
    assert cut == [("draft eagle3, 32000 tokens", "eagle3", 32000)], "as published heads have it, beside the whole one"


def test_a_cut_draft_vocabulary_is_timed_with_an_output_layer_of_that_size():
    size = SIZES["toy"]
    [cell] = [cell for cell in cells_of(size, "eager", RATES) if cell.draft_vocabulary]
    bench = Workbench(random_target(size, torch.device("cpu")), size)
    head: Any = bench.drafted(cell)[0]
    assert head.lm_head.out_features == size.draft_vocabulary < bench.target.vocab_size
    assert bench.time(replace(cell, num_passes=1))["draft_in_baseline_steps"]["median"] > 0


def test_a_killed_run_goes_on_where_it_was(tmp_path, few_cells):
    path = tmp_path / "engine.json"
    assert run(path) == 0 and few_cells == ["baseline", "verify 2"]
    first = json.loads(path.read_text())
    del first["cells"]["verify 2"]
    path.write_text(json.dumps(first))
    assert run(path) == 0 and few_cells[2:] == ["verify 2"]
    second = json.loads(path.read_text())
    assert second["cells"]["baseline"] == first["cells"]["baseline"] and set(second["cells"]) == set(few_cells)
    second["cells"]["baseline"]["asked"]["num_passes"] = 7
    second["cells"]["verify 2"] = {"asked": second["cells"]["verify 2"]["asked"], "failed": "RuntimeError: once"}
    path.write_text(json.dumps(second))
    assert run(path) == 0 and few_cells[3:] == ["baseline", "verify 2"], "asked otherwise, and failed"


def test_a_file_of_another_run_is_refused(tmp_path, few_cells, capsys):
    path = tmp_path / "engine.json"
    run(path)
    written = json.loads(path.read_text())
    changes = ({"size": "8b"}, {"torch": "0.1"}, {"device": "another"})
    for change in changes:
        path.write_text(json.dumps({**written, **change}))
        assert run(path) == 2
        [key] = change
        assert f"{path}: measured with {key} " in capsys.readouterr().err
    path.write_text("{")
    assert run(path) == 2 and "not a file of this benchmark" in capsys.readouterr().err
    assert len(few_cells) == 2


def test_a_cell_that_raises_is_named_and_the_others_stand(tmp_path, few_cells, monkeypatch):
    time = Workbench.time

    def failing(bench, cell):
        if cell.name == "baseline":
            raise RuntimeError(reason)
        return time(bench, cell)

    monkeypatch.setattr(Workbench, "time", failing)
    for reason, code in (("CUDA out of memory. Tried to allocate", 0), ("an illegal instruction", 1)):
        path = tmp_path / f"{code}.json"
        assert run(path) == code
        cells = json.loads(path.read_text())["cells"]
        assert cells["baseline"]["failed"] == f"RuntimeError: {reason}" and "round_ms" in cells["verify 2"]


def test_predictions_follow_from_step_times():
    timed = {"baseline_ms": {"median": 5.0}, "round_ms": 8.0, "reading_ms": 10.0}
    decoded = {"given_acceptance_length": 3.2, "speedup": 1.6, "num_prompts": 2, "num_tokens": 102, "num_rounds": 40}
    found = predictions(timed, decoded)
    assert (found["predicted_speedup"], found["prediction_error"]) == (3.2 * 5 / 8, 0.25)
    formula = 100 * 5 / (40 * 8 + 2 * 10)
    assert found["formula_speedup"] == pytest.approx(formula, abs=1e-4)
    assert found["speedup_over_formula_error"] == pytest.approx(1.6 / formula - 1, abs=1e-4)
    assert predictions(timed, {"failed": "out of memory"})["speedup_over_formula_error"] is None


def test_a_bar_is_held_or_not():
    assert judge(GOOD, BARS) == dict.fromkeys(GOOD, True)
    for name, worse in (
        ("share_of_copy_bandwidth", 0.59),
        ("verify_in_baseline_steps", 1.26),
        ("round_overhead", 0.06),
    ):
        assert [key for key, holds in judge({**GOOD, name: worse}, BARS).items() if not holds] == [name]
    assert judge({"of": "eagle3", "speedup_over_formula_error": None}, BARS) == {"speedup_over_formula_error": False}


def test_eager_and_compiled_steps_are_told_in_captured_ones():
    def cell(base, whole):
        return {"baseline_ms": {"median": base}, "round_ms": whole}

    cells = {"draft eagle3": cell(5.0, 8.0), "eager eagle3": cell(20.0, 16.0), "compile eagle3": cell(4.0, 6.0)}
    wanted = {"eager": {"baseline": 4.0, "round": 2.0}, "compile": {"baseline": 0.8, "round": 0.75}}
    assert over_captured_graphs(cells) == wanted
    assert over_captured_graphs({**cells, "eager eagle3": {"failed": ""}}) == {"compile": wanted["compile"]}
    assert over_captured_graphs({}) == {}


def test_verifying_one_token_is_a_baseline_step():
    cells = {"verify 8": {"round_ms": 1.0, "verify_in_baseline_steps": {"median": 1.1}}, "verify 64": {"failed": ""}}
    assert verify_costs(cells) == {"1": 1.0, "8": 1.1}


def test_acceptance_comes_from_a_report_where_it_has_the_family(tmp_path, toy, made_result):
    results = [
        made_result(drafter="eagle3", temperature=1.0, acceptance_rate=[0.1]),
        made_result(drafter="eagle3:run/a", acceptance_rate=[0.9, 0.8, None]),
        made_result(drafter="eagle3:run/b", acceptance_rate=[0.2]),
        made_result(drafter="medusa", tree="static", acceptance_rate=[0.3]),
    ]
    path = write_report(tmp_path, build_report(toy, results), [])
    found = read_acceptance(path)
    assert found["eagle3"] == {"rates": [0.9, 0.8], "source": "measured: eagle3:run/a on code, batch 1"}
    assert found["medusa"] == read_acceptance(None)["eagle3"]
    with pytest.raises(BadInput, match="no report of headstart eval"):
        read_acceptance(tmp_path)


def test_the_random_target_counts(toy):
    size = SIZES["toy"]
    for prompt in size.prompts(2, length=5):
        new = generate(toy, None, prompt, max_new_tokens=20).token_ids[0]
        assert new == [(prompt[-1] + 1 + i) % size.llama["vocab_size"] for i in range(20)]
