"""`headstart compare` names what differs between runs and what came of it."""

import json

import pytest
import yaml
from headstart.base.errors import BadInput
from headstart.scripts.compare import compare, overrides, short_names


@pytest.fixture
def make_run(tmp_path):
    def make(name, *, seed=0, loss=("soft_ce", 1.0), lengths=(), steps=3, finished=True):
        folder = tmp_path / name
        folder.mkdir()
        config = {"head": {"type": "eagle3", "loss": {loss[0]: loss[1]}}, "train": {"seed": seed, "output_dir": name}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [{"step": step, "loss": 3.0 / step, "tokens_per_second": 100.0 * step} for step in range(1, steps + 1)]
        of_each = [(step, {"acceptance_length": length, "num_rounds": 99}) for step, length in lengths]
        rows += [{"step": step, "validation": validation} for step, validation in of_each]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if finished:
            (folder / "final").mkdir()
        return folder

    return make


def test_what_differs_and_the_best_validation_are_named(make_run, capsys):
    runs = [
        make_run("a", lengths=[(1, 1.5), (2, 1.9), (3, 1.8)]),
        make_run("b", seed=2, loss=("l1", 0.5), lengths=[(3, 2.0)], finished=False),
    ]
    compare(runs, as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert first["differs"] == {"head.loss.soft_ce": 1.0, "head.loss.l1": None, "train.seed": 0}
    assert second["differs"] == {"head.loss.soft_ce": None, "head.loss.l1": 0.5, "train.seed": 2}
    assert (first["best_acceptance_length"], first["best_step"], first["last_acceptance_length"]) == (1.9, 2, 1.8)
    assert (first["loss"], first["tokens_per_second"], first["steps"]) == (1.0, 200.0, 3)
    assert first["finished"] and not second["finished"]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["x1/m", "x2/m"], ["x1", "x2"]),
        (["x1/m", "x2/m", "y/k"], ["x1/m", "x2/m", "k"]),
        (["a/kl-1/eval", "a/kl-2/eval"], ["kl-1", "kl-2"]),
        (["a/b/c", "d/e/f"], ["c", "f"]),
    ],
)
def test_names_are_the_shortest_that_differ(folders, names, make_run, tmp_path, capsys):
    assert short_names([tmp_path / folder for folder in folders]) == names
    with pytest.raises(BadInput, match="the same folder is given twice"):
        short_names([tmp_path / "a" / ".." / "x", tmp_path / "x"])


def test_the_table_has_a_line_per_run(make_run, capsys):
    compare([make_run("a", lengths=[(2, 1.9)]), make_run("b", seed=7, loss=("l1", 0.5), finished=False)])
    said = capsys.readouterr().out
    assert said.startswith("a validated best: 1.90 tokens per forward at step 2.\n") and "Not finished: b." in said
    assert "- a: head.loss.soft_ce=1.0 train.seed=0\n" in said and "- b: head.loss.l1=0.5 train.seed=7\n" in said
    assert len(said.splitlines()) <= 25 and max(map(len, said.splitlines())) <= 80
    assert overrides({f"key{i}": i for i in range(9)}) == "key0=0 key1=1 key2=2 and 6 more", "no wall of keys"


def test_what_is_no_run_is_refused(make_run, tmp_path):
    run = make_run("a")
    for runs, problem in (
        ([run], "give at least two runs or evaluations"),
        ([run, tmp_path], "no run folder: it has no config.yaml"),
        ([run, make_run("empty", steps=0)], "empty: no step was logged yet"),
    ):
        with pytest.raises(BadInput, match=problem):
            compare(runs)
