"""The engine's benchmark runs at toy size, goes on where it was, and judges what it found."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from headstart.benchmarks import engine_bench, store
from headstart.benchmarks.engine_bench import BARS, over_captured_graphs, predictions, verify_costs
from headstart.benchmarks.engine_cells import (
    MAIN,
    OTHERS,
    SIZES,
    EngineWorkbench,
    RoundsCell,
    left_out,
    load_cells,
    random_target,
    single_cells,
)
from headstart.benchmarks.store import judge
from headstart.eval.decoding import generate
from headstart.eval.measurement import step_times
from headstart.heads.decoders.split_attention import reads_in_parts

CPU = torch.device("cpu")
GOOD = {
    "share_of_copy_bandwidth": 0.8,
    "verify_8": 1.1,
    "verify_16": 1.2,
    "round_overhead": 0.05,
    "predicted_speedup": 2.3,
    "speedup_over_formula_error": 0.1,
}


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
    cells = [RoundsCell(name="baseline", **usual), RoundsCell(name="verify 2", num_draft_tokens=1, **usual)]
    monkeypatch.setitem(engine_bench.CELLS, "single", lambda *arguments: cells)
    monkeypatch.setattr(store, "release_memory", lambda: None)  # a full collection takes a while in a test run
    monkeypatch.setattr(engine_bench, "Environment", FixedEnvironment)
    measure = EngineWorkbench.measure
    monkeypatch.setattr(EngineWorkbench, "measure", lambda bench, cell: done.append(cell.name) or measure(bench, cell))
    return done


def run(path, *more):
    return engine_bench.main(["single", "--size", "toy", "--device", "cpu", "--output", str(path), *more])


@pytest.mark.slow
def test_a_toy_run_measures_every_cell(tmp_path, capsys):
    assert run(tmp_path / "engine.json") == 0
    written = json.loads((tmp_path / "engine.json").read_text())
    cells = single_cells(SIZES["toy"], "eager")
    assert list(written["cells"]) == [cell.name for cell in cells]
    assert not [one for one in written["cells"].values() if "failed" in one]
    figures = {one["of"]: one for one in written["figures"]}
    assert set(figures) == {"baseline", MAIN, *OTHERS} == set(written["holds"])
    for family in (MAIN, *OTHERS):
        timed = written["cells"][f"draft {family}"]
        parts = timed["draft_ms"] + timed["verify_ms"] + timed["overhead_ms"]
        assert timed["round_ms"] == pytest.approx(parts, abs=1e-3)
    decoded = written["cells"][f"synthetic {MAIN}"]
    assert decoded["identical_texts"] == decoded["num_prompts"]
    assert decoded["acceptance_length"] > 2 and figures[MAIN]["speedup"] == decoded["speedup"]
    assert set(written["holds"][MAIN]) == set(list(GOOD)[3:])
    assert written["cells"]["profile of baseline"]["table"]
    assert capsys.readouterr().out.count(" s)\n") == len(cells), "a line for each"


def test_all_that_is_asked_of_the_engine_has_a_cell():
    size = SIZES["8b"]
    single, load = single_cells(size, "graph"), load_cells(size, "graph")
    names = [cell.name for cell in single]
    assert len(set(names)) == len(names) and len({cell.name for cell in load}) == len(load)
    assert names[:3] == ["baseline", "baseline without parts", "baseline without compiler"]
    assert {name for name in names if name.startswith("verify")} == {f"verify {n}" for n in (2, 4, 8, 16, 32, 64)}
    assert {f"draft {family}" for family in (MAIN, *OTHERS)} | {f"synthetic {MAIN}"} < set(names)
    cuts = {cell.name: cell.draft_vocabulary for cell in single if cell.name.startswith("draft")}
    assert cuts[f"draft {MAIN}"] == 32000 and cuts[f"draft {MAIN}, whole vocabulary"] is None
    places = {(cell.batch_size, cell.context) for cell in load}
    assert places == {(b, 512) for b in (1, 8, 32, 64)} | {(b, c) for b in (1, 8, 32) for c in (4096, 16384)}
    assert [cell.head for cell in single if cell.steps == "eager"] == [MAIN]


def test_cells_read_equally_many_slots_whatever_they_draft(toy, monkeypatch):
    """So that a layer is compiled once for each number of tokens."""
    built, build = [], step_times.build_engine
    monkeypatch.setattr(step_times, "build_engine", lambda *args, **how: built.append(build(*args, **how)) or built[-1])
    base = RoundsCell(name="", steps="eager", batch_size=1, context=16, num_passes=1)
    bench = EngineWorkbench(toy, SIZES["toy"])
    for cell in (base, *(replace(base, num_draft_tokens=length) for length in (1, 5, 7))):
        bench.time(cell)
    assert len(built) == 7 and len({engine.num_slots for engine in built}) == 1


@pytest.mark.parametrize("part", ["parts", "compiler"])
def test_what_is_left_out_is_so_for_a_cell_only(part):
    decoder = SimpleNamespace(compiles=True, compiled={"a layer": 1})
    target: Any = SimpleNamespace(decoder=decoder)
    query, key = torch.empty(1, 8, 4, 2), torch.empty(1, 8, 2048, 2)
    with left_out(part, target):
        assert decoder.compiled == {} and decoder.compiles == (part != "compiler")
        assert reads_in_parts(query, key) == (part != "parts")
    assert decoder == SimpleNamespace(compiles=True, compiled={"a layer": 1})
    assert reads_in_parts(query, key)


def test_a_cut_draft_vocabulary_is_timed_with_an_output_layer_of_that_size():
    size = SIZES["toy"]
    [cell] = [cell for cell in single_cells(size, "eager") if cell.name == f"draft {MAIN}"]
    bench = EngineWorkbench(random_target(size, torch.device("cpu")), size)
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
    time = EngineWorkbench.time

    def failing(bench, cell):
        if cell.name == "baseline":
            raise RuntimeError(reason)
        return time(bench, cell)

    monkeypatch.setattr(EngineWorkbench, "time", failing)
    for reason, code in (("CUDA out of memory. Tried to allocate", 0), ("an illegal instruction\nmore", 1)):
        path = tmp_path / f"{code}.json"
        assert run(path) == code
        cells = json.loads(path.read_text())["cells"]
        assert (
            cells["baseline"]["failed"] == f"RuntimeError: {reason.splitlines()[0]}" and "round_ms" in cells["verify 2"]
        )


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
        ("share_of_copy_bandwidth", 0.79),
        ("verify_8", 1.11),
        ("round_overhead", 0.06),
        ("predicted_speedup", 2.2),
    ):
        assert [key for key, holds in judge({**GOOD, name: worse}, BARS).items() if not holds] == [name]
    assert judge({"of": "eagle3", "speedup_over_formula_error": None}, BARS) == {"speedup_over_formula_error": False}


def test_eager_steps_are_told_in_captured_ones():
    def cell(base, whole):
        return {"baseline_ms": {"median": base}, "round_ms": whole}

    cells = {"draft eagle3": cell(5.0, 8.0), "eager eagle3": cell(20.0, 16.0)}
    assert over_captured_graphs(cells) == {"baseline": 4.0, "round": 2.0}
    assert over_captured_graphs({**cells, "eager eagle3": {"failed": ""}}) == {}


def test_verifying_one_token_is_a_baseline_step():
    cells = {"verify 8": {"round_ms": 1.0, "verify_in_baseline_steps": {"median": 1.1}}, "verify 64": {"failed": ""}}
    assert verify_costs(cells) == {"1": 1.0, "8": 1.1}


def test_the_random_target_counts(toy):
    size = SIZES["toy"]
    for prompt in size.prompts(2, length=5):
        new = generate(toy, None, prompt, max_new_tokens=20).token_ids[0]
        assert new == [(prompt[-1] + 1 + i) % size.llama["vocab_size"] for i in range(20)]
