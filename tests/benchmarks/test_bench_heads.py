"""`make bench-heads` trains heads of one size, goes on where it stopped, and the tables of its page are its results."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from headstart.benchmarks import bench_heads
from headstart.benchmarks.bench_heads import Bench, count_parameters, run_bench
from headstart.benchmarks.bench_results import (
    END,
    START,
    Entry,
    bench_names,
    read_bench,
    read_results,
    render_page,
    table,
)
from headstart.configs.errors import BadInput
from headstart.eval.measurement.environment import device_name
from rich.console import Console
from transformers import LlamaConfig

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


def entry(head, *, seed=1, target="small", **changes):
    """A made-up entry."""
    figures = {"parameters": 98816, "optimizer_steps": 600, "acceptance_length": 2.0, "speedup": 1.5, "draft_ms": 1.0}
    figures |= {"baseline_ms": 4.0, "train_tokens_per_second": 1000.0, "loss": {"soft_ce": 1.0}, "num_prompts": 24}
    figures |= {"acceptance_rate": [0.5], "num_draft_tokens": 1, "speedup_ci95": [1.0, 2.0], "temperature": 0.0}
    where = {"max_new_tokens": 96, "device": "cpu", "num_threads": 2, "date": "2026-01-31", "settings": "0"}
    lossless = {"checked": 24, "identical": 24, "proved": 0, "unexplained": 0}
    return Entry(target=target, head=head, seed=seed, **{**figures, **where, "lossless": lossless, **changes})


@pytest.mark.slow
def test_it_trains_measures_and_goes_on_where_it_stopped(bench, quiet, monkeypatch):
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

    trained = []
    real = bench_heads.train
    monkeypatch.setattr(bench_heads, "train", lambda run, **how: trained.append(run.head.type) or real(run, **how))
    assert run_bench(bench, quiet) == read_results(bench.output)
    assert trained == [], "nothing is done twice"
    bench.output.write_text(json.dumps([asdict(one) for one in entries if one.head == "medusa"]))
    shutil.rmtree(bench.runs / name)
    run_bench(bench, quiet)
    assert trained == ["eagle3"], "what is missing is done"
    bench.limit = 1
    run_bench(bench, quiet)
    assert trained == ["eagle3", "medusa", "eagle3"], "other settings, other figures"
    assert {(one.head, one.num_prompts) for one in read_results(bench.output)} == {("medusa", 1), ("eagle3", 1)}


@pytest.mark.slow
def test_an_interruption_keeps_what_was_finished(bench, quiet, monkeypatch):
    real = bench_heads.measured

    def measured(bench, name, *others):
        if name == "eagle3":
            raise KeyboardInterrupt
        return real(bench, name, *others)

    monkeypatch.setattr(bench_heads, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        run_bench(bench, quiet)
    assert [one.head for one in read_results(bench.output)] == ["medusa"]
    monkeypatch.setattr(bench_heads, "measured", real)
    kept = read_results(bench.output)
    assert run_bench(bench, quiet)[0] == kept[0]
    assert [one.head for one in read_results(bench.output)] == ["eagle3", "medusa"]


@pytest.mark.parametrize("tied", [True, False])
def test_all_heads_have_one_size(tied, tmp_path):
    """On the shape of stories260K; those that cannot be brought to it say so."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        tie_word_embeddings=tied,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    in_budget = [name for name in bench_names() if read_bench(name).in_budget]
    families = {"medusa", "hydra", "hydra_pp", "eagle", "hass", "eagle3", "mtp", "draft_lm", "dspark", "dflash"}
    assert families | {"eagle3_parallel", "draft_lm_parallel"} <= set(in_budget)
    counts = count_parameters(Bench(target=str(tmp_path), train="", prompts="", heads=in_budget, budget=98_816))
    assert counts["eagle3"] == 98_816
    assert set(bench_names()) - set(in_budget) == {"mtp_recursive"}
    with pytest.raises(BadInput, match=r"mtp_recursive.yaml: 53,824 parameters on .*: expected 98,816 within 25%"):
        heads = ["mtp_recursive"]
        count_parameters(Bench(target=str(tmp_path), train="", prompts="", heads=heads, budget=98_816))


def test_the_loss_variants_differ_from_eagle3_in_the_loss_alone():
    base = read_bench("eagle3").config
    for name in ("eagle3_lk_lambda", "eagle3_tv", "eagle3_greedy_gce"):
        config = read_bench(name).config
        assert config.loss != base.loss
        config.loss = base.loss
        assert config == base
    assert read_bench("eagle3_tv").config.loss == {"soft_ce": 0.5, "tv": 0.5}


def test_the_table_has_means_over_seeds_and_the_best_first():
    entries = [
        entry("medusa", acceptance_length=1.2, train_tokens_per_second=5000.0, loss={"hard_ce": 1.0}),
        entry("eagle3", acceptance_length=2.0),
        entry("eagle3", seed=2, acceptance_length=2.2, speedup=1.7),
        entry("eagle3_tv", acceptance_length=2.1, loss={"soft_ce": 0.5, "tv": 0.5}, target="other"),
        entry("medusa", acceptance_length=1.2, device="faster"),
    ]
    lines = table(entries).splitlines()
    assert lines[0].startswith("Target `other`") and lines[6].startswith(
        "Target `small`: 600 optimizer steps, seeds 1, 2"
    )
    assert (
        lines[4].startswith("| EAGLE-3, TV | ")
        and "| 0.5 soft_ce + 0.5 tv |" in lines[4]
        and lines[4].endswith("| - |")
    )
    assert lines[10].endswith("| soft_ce | 98,816 | 2.10 ± 0.14 | 0.25 | 1.60 | 1.00 |")
    assert lines[11].startswith("| Medusa-1 |") and lines[11].endswith("| 1.20 | 0.25 | 1.50 | 5.00 |")
    assert lines[13].startswith("Target `small`") and "faster, 2 threads" in lines[13]
    assert lines[17].endswith("| 1.50 | - |"), "no training speed beside another machine's"
    assert len(lines) == 18


def test_a_page_gets_the_table_between_its_marks(tmp_path):
    page = tmp_path / "heads.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    render_page(page, [entry("eagle3")])
    once = page.read_text()
    assert (
        once.startswith(f"before\n{START}\nTarget `small`")
        and once.endswith(f"|\n{END}\nafter\n")
        and "old" not in once
    )
    render_page(page, [entry("eagle3")])
    assert page.read_text() == once
    page.write_text("no marks")
    with pytest.raises(BadInput, match="heads.md: expected one line <!-- bench-heads: start -->"):
        render_page(page, [])


def test_the_page_says_what_was_measured():
    """After a benchmark: `python -m headstart.benchmarks.bench_heads --table`."""
    text = (ROOT / "docs" / "results" / "heads.md").read_text()
    entries = read_results(ROOT / "docs" / "results" / "heads.json")
    assert f"{START}\n{table(entries)}\n{END}" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "runs/smoke/target: not there: run make smoke first"),
        (["--target", "a"], "give all of --target, --train and --prompts, or none"),
        (
            ["--target", "./gone", "--train", "{x}", "--prompts", "{x}", "--heads", "eagel"],
            "--heads eagel: expected some",
        ),
        (["--target", "./gone", "--train", "{x}", "--prompts", "{x}"], "target gone: no such folder"),
        (["--target", "./gone", "--train", "y", "--prompts", "{x}"], "--train y: no such file"),
        (["--target", "./gone", "--train", "{x}", "--prompts", "y"], "--prompts y: no such file"),
        (["--table"], "heads.md: expected one line"),
    ],
)
def test_bad_input_is_one_line(arguments, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench_heads.main([part.format(x=__file__) for part in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("headstart: ") and problem in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
