"""Benchmarks run at toy size, and the pages made of their results are current."""

import json
from pathlib import Path

import pytest
import torch
from drafted import untrained
from headstart.benchmarks import engine_bench
from headstart.benchmarks.bench_heads import Bench, run_bench
from headstart.benchmarks.bench_results import (
    END,
    START,
    read_results,
    table,
)
from headstart.benchmarks.bench_train import run
from headstart.benchmarks.engine_cells import (
    MAIN,
    OTHERS,
    SIZES,
    single_cells,
)
from headstart.benchmarks.pages.screens import PAGE, page, screens
from headstart.benchmarks.synthetic import SyntheticDrafter
from headstart.eval.decoding import generate
from headstart.eval.figures.environment import device_name
from headstart.eval.figures.metrics import acceptance
from rich.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(saved_target, tmp_path):
    """Two optimizer steps on the tiny target, and three prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w5 w9", "w7", "w30 w31 w32")))
    return Bench(
        target=str(saved_target),
        train=str(saved_target.with_name("rows.jsonl")),
        prompts=str(prompts),
        heads=["medusa", "eagle3"],
        steps=2,
        seeds=[1],
        limit=2,
        output=tmp_path / "results" / "heads.json",
        runs=tmp_path / "runs",
        max_new_tokens=8,
        num_repeats=1,
    )


@pytest.fixture
def quiet():
    return Console(quiet=True)


@pytest.mark.slow
def test_it_trains_and_measures(bench, quiet):
    entries = run_bench(bench, quiet)
    name = Path(bench.target).parent.name
    cpu = device_name(torch.device("cpu"))
    named = [(name, cpu, "medusa", 1), (name, cpu, "eagle3", 1)]
    assert [one.key for one in entries] == named, "named by its parent folder"
    assert read_results(bench.output) == sorted(entries, key=lambda one: one.head)
    for one in entries:
        assert one.optimizer_steps == 2 and one.train_tokens_per_second > 0 and one.draft_ms > 0
        assert one.lossless == {"checked": 2, "identical": 2, "proved": 0, "unexplained": 0}
        assert one.num_draft_tokens == (4 if one.head == "medusa" else 5) == len(one.acceptance_rate)
    assert str(bench.output.parent.parent) not in bench.output.read_text(), "no path of this machine"


def test_the_page_says_what_was_measured():
    """After a benchmark: `python -m headstart.benchmarks.bench_heads --table`."""
    text = (ROOT / "docs" / "results" / "heads.md").read_text()
    entries = read_results(ROOT / "docs" / "results" / "heads.json")
    assert f"{START}\n{table(entries)}\n{END}" in text


@pytest.mark.slow
def test_a_toy_run_writes_every_cell_and_where_the_time_goes(tmp_path):
    document, code = run(tmp_path / "training.json", size="toy", device="cpu")
    cells = document["cells"].values()
    assert code == 0 and not [cell for cell in cells if "failed" in cell]
    steps = [cell for cell in cells if cell["asked"]["what"] == "step"]
    assert all(0 < cell["mfu"] <= cell["hfu"] < 1 for cell in steps)
    assert all(cell["step_ms_min"] <= cell["step_ms"] <= cell["step_ms_max"] for cell in steps)
    profiles = [cell for cell in cells if cell["asked"]["what"] == "profile"]
    assert [cell["asked"]["is_compiled"] for cell in profiles] == [False, True]
    assert all("Self CPU %" in cell["table"][1] and len(cell["table"]) > 10 for cell in profiles)


@pytest.mark.slow
def test_a_toy_run_measures_every_cell(tmp_path, capsys):
    words = ["single", "--size", "toy", "--device", "cpu", "--output", str(tmp_path / "engine.json")]
    assert engine_bench.main(words) == 0
    written = json.loads((tmp_path / "engine.json").read_text())
    cells = single_cells(SIZES["toy"], "eager")
    assert list(written["cells"]) == [cell.name for cell in cells]
    assert not [one for one in written["cells"].values() if "failed" in one]
    figures = {one["of"]: one for one in written["figures"]}
    assert set(figures) == {"baseline", "verifying", MAIN, *OTHERS}
    for family in (MAIN, *OTHERS):
        timed = written["cells"][f"draft {family}"]
        parts = timed["draft_ms"] + timed["verify_ms"] + timed["overhead_ms"]
        assert timed["round_ms"] == pytest.approx(parts, abs=1e-3)
    decoded = written["cells"][f"synthetic {MAIN}"]
    assert decoded["identical_texts"] == decoded["num_prompts"]
    assert decoded["acceptance_length"] > 2 and figures[MAIN]["speedup"] == decoded["speedup"]
    assert written["cells"]["profile of baseline"]["table"]
    assert capsys.readouterr().out.count(" s)\n") == len(cells), "a line for each"


def test_the_recorded_screens_are_current_and_fit_a_terminal():
    """`python -m headstart.benchmarks.pages.screens` writes them again."""
    assert PAGE.read_text() == page()
    for title, _, lines in screens():
        assert len(lines) <= 25, title
        longest = max(map(len, lines))
        assert longest <= 80 or "A head for an engine" in title, "the commands of export are to be copied"


PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40], [1, 30], [1, 44, 3], [1, 13, 14], [1, 18]]


@pytest.mark.parametrize(("inner", "batch"), [("eagle3", 3), pytest.param("", 1, marks=pytest.mark.slow)])
def test_rates_come_out_and_text_stays(target, batch, inner):
    head = untrained(inner, target) if inner else None
    rates = [0.9, 0.6, 0.3]
    drafter = SyntheticDrafter(target, PROMPTS, rates, max_new_tokens=100, inner=head)
    rounds = []
    for i in range(0, len(PROMPTS), batch):
        rows = PROMPTS[i : i + batch]
        text = generate(target, drafter, rows, max_new_tokens=100, num_draft_tokens=3, eos_token_ids=[])
        plain = generate(target, None, rows, max_new_tokens=100, eos_token_ids=[])
        assert text.token_ids == plain.token_ids
        rounds += text.rounds
    counted = acceptance(rounds, num_draft_tokens=3)
    for rate, found, tried in zip(rates, counted.rate, counted.tried, strict=True):
        assert found is not None
        assert abs(found - rate) < 4 * (rate * (1 - rate) / tried) ** 0.5
