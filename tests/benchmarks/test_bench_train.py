"""The training bench: what it measures, that it goes on where it stopped, and its bars."""

import json

import pytest
import torch
from headstart.benchmarks import bench_train, store
from headstart.benchmarks.bench_train import SIZES, cell_of, cells_of, run, shape_of, summarize

KEYS = ("tokens_per_second", "step_ms", "mfu", "hfu", "peak_bytes")


def test_the_8b_size_measures_what_is_asked():
    cells = list(cells_of(SIZES["8b"]))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    timed = [cell for cell in cells if cell.what == "step"]
    asked = {(c.shape.head, c.shape.context, c.shape.draft_vocabulary, c.is_compiled) for c in timed}
    for head, cuts in (("eagle3", (None, 32000)), ("block", (None,)), ("medusa", (None,)), ("mtp", (None,))):
        wanted = {(head, t, cut, compiled) for t in (2048, 8192) for cut in cuts for compiled in (False, True)}
        assert wanted <= asked
    assert cell_of(shape_of(SIZES["8b"], "eagle3")).name in names[:2], "the bars' cell comes first"
    assert [cell.is_compiled for cell in cells if cell.what == "profile"] == [False, True]
    assert {(c.shape.head, c.shape.depths) for c in cells} == {("eagle3", 7), ("block", 7), ("mtp", 3), ("medusa", 4)}
    assert all(c.shape.dtype == "bf16" and c.shape.hidden == 4096 and c.shape.vocabulary == 152064 for c in cells)


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_family_is_measured_and_the_memory_at_8b_shape_estimated(size):
    cells = list(cells_of(SIZES[size]))
    assert {cell.shape.head for cell in cells} == set(bench_train.HEADS)
    estimated = [cell.shape for cell in cells if cell.what == "estimate"]
    assert [(shape.context, shape.draft_vocabulary) for shape in estimated] == [(4096, 32000), (4096, None)]


def test_what_is_there_is_not_measured_again_and_the_rest_is(tmp_path, monkeypatch):
    path, measured = tmp_path / "training.json", []

    def measure(cell, device):
        measured.append(cell.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return dict.fromkeys(KEYS, 1.0)

    monkeypatch.setattr(bench_train, "measure", measure)
    monkeypatch.setattr(store, "release_memory", lambda: None)  # a full collection takes a while in a test run
    with pytest.raises(KeyboardInterrupt):
        run(path, size="toy", device="cpu")
    assert len(json.loads(path.read_text())["cells"]) == 2
    document, code = run(path, size="toy", device="cpu")
    assert code == 0 and document == json.loads(path.read_text())
    assert len(measured) == 1 + len(list(cells_of(SIZES["toy"])))
    run(path, size="toy", device="cpu")
    assert len(measured) == 1 + len(document["cells"])


def test_a_file_of_another_size_or_device_is_refused(tmp_path, capsys):
    path = tmp_path / "training.json"
    other = {"size": "8b", "device": "a GPU", "torch": torch.__version__, "cells": {}}
    for content, problem in ((other, "measured with size 8b, now toy"), ([], "not a file of this benchmark")):
        path.write_text(json.dumps(content))
        assert bench_train.main(["--size", "toy", "--device", "cpu", "--output", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"headstart: {path}: {problem}") and err.count("\n") == 1


def test_bars_are_judged_at_8b_size_only():
    def bars(size, plain, compiled):
        shape = shape_of(SIZES[size], "eagle3")
        cells = {cell_of(shape).name: plain, cell_of(shape, is_compiled=True).name: compiled}
        return summarize({"size": size, "cells": cells})["bars"]

    plain = {"mfu": 0.44, "peak_bytes": 19_000_000_000}
    found = bars("8b", plain, {"failed": "no Triton"})
    assert found["mfu"]["holds"] is False and found["peak_bytes"]["holds"] is True
    found = bars("8b", plain, {"mfu": 0.46, "peak_bytes": 25_000_000_000})
    assert (found["mfu"]["plain"], found["mfu"]["compiled"], found["mfu"]["holds"]) == (0.44, 0.46, True)
    assert found["peak_bytes"]["holds"] is True
    assert {one["holds"] for one in bars("8b", {}, {}).values()} == {None}
    toy = bars("toy", plain, {})
    assert [(one["plain"], one["holds"]) for one in toy.values()] == [(0.44, None), (19_000_000_000, None)]


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
