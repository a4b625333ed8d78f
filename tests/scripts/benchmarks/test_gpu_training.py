"""The suite's training bench: cells are kept and not repeated, another run's file is refused, bars are judged."""

import json
import sys

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.scripts.benchmarks.gpu import training as gpu_training
from headstart.scripts.benchmarks.gpu.training import SIZES, Cell, attempt, begin, cells_of, firsts_of, judge, run
from rich.console import Console


def test_the_8b_size_measures_what_is_asked():
    cells = list(cells_of(SIZES["8b"]))
    names = [json.dumps(cell.name) for cell in cells]
    assert len(set(names)) == len(names)
    asked = {(c.shape.head, c.shape.context, c.shape.vocabulary, c.shape.draft_vocabulary) for c in cells}
    for head, cuts in (("eagle3", (None, 32000)), ("mtp", (None,)), ("medusa", (None,))):
        assert {(head, t, v, cut) for t in (2048, 4096, 8192) for v in (128256, 152064) for cut in cuts} <= asked
    assert {c.shape.head for c in cells if c.is_compiled} == {"eagle3", "mtp", "medusa"}
    assert {(c.shape.head, c.shape.depths) for c in cells} == {("eagle3", 7), ("mtp", 3), ("medusa", 4)}
    assert all(c.shape.dtype == "bf16" and c.shape.hidden == 4096 for c in cells)


def test_what_is_there_is_not_measured_again_and_the_rest_is(tmp_path, monkeypatch):
    path, seen = tmp_path / "training.json", []

    def measured(cell, device, steps):
        seen.append(str(cell))
        if len(seen) == 3:
            raise KeyboardInterrupt
        keys = ("tokens_per_second", "step_ms", "step_ms_min", "step_ms_max", "mfu", "hfu", "peak_bytes")
        return dict.fromkeys(keys, 1.0)

    monkeypatch.setattr(gpu_training, "measured", measured)
    monkeypatch.setattr(gpu_training, "release_memory", lambda: None)  # a full collection takes a while in a test run
    monkeypatch.setattr(
        gpu_training, "profiled", lambda *_: {"rows": [], "total_ms": 0, "rest_ms": 0, "num_kernels": 2}
    )
    how = {"size": "toy", "device": "cpu", "console": Console(quiet=True)}
    with pytest.raises(KeyboardInterrupt):
        run(path, **how)
    assert len(json.loads(path.read_text())["cells"]) == 2
    document = run(path, **how)
    assert len(seen) == 1 + len(list(cells_of(SIZES["toy"]))) and document == json.loads(path.read_text())
    run(path, **how)
    assert len(seen) == 1 + len(document["cells"])


def test_a_file_of_another_size_or_device_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "training.json"
    path.write_text(json.dumps({"size": "8b", "device": "a GPU", "cells": [], "profiles": []}))
    with pytest.raises(BadInput) as caught:
        begin(path, size="toy", device="cpu")
    assert str(caught.value).startswith(f"{path}: of size 8b on a GPU, this is size toy on ")
    monkeypatch.setattr(sys, "argv", ["gpu_training", "--device", "cpu", "--output", str(path)])
    with pytest.raises(SystemExit) as left:
        gpu_training.main()
    assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    path.write_text("[]")
    with pytest.raises(BadInput, match="not a file of this bench"):
        begin(path, size="toy", device="cpu")


def test_no_memory_is_a_result_and_so_is_a_compiler_that_fails():
    plain, compiled = (Cell(shape=SIZES["toy"].shape, is_compiled=on) for on in (False, True))

    def fail(cell, error):
        raise error

    assert attempt(fail, plain, torch.OutOfMemoryError("of 80 GiB")) == {"status": "out of memory"}
    found = attempt(fail, compiled, RuntimeError("no\nTriton"))
    assert found == {"status": "failed", "reason": "RuntimeError: no"}
    with pytest.raises(RuntimeError):
        attempt(fail, plain, RuntimeError("a fault"))


def test_bars_are_judged_at_8b_size_only():
    shape = firsts_of(SIZES["8b"])[0]
    plain = {**Cell(shape=shape).name, "mfu": 0.39, "peak_bytes": 19_000_000_000}
    compiled = {**Cell(shape=shape, is_compiled=True).name, "status": "failed"}
    bars = judge("8b", [plain, compiled])
    assert bars["mfu"]["holds"] is False and bars["peak_bytes"]["holds"] is True
    bars = judge("8b", [plain, {**compiled, "mfu": 0.41, "peak_bytes": 21_000_000_000}])
    assert (bars["mfu"]["plain"], bars["mfu"]["compiled"], bars["mfu"]["holds"]) == (0.39, 0.41, True)
    assert bars["peak_bytes"]["holds"] is True
    assert {one["holds"] for one in judge("8b", []).values()} == {None}
    toy = {**plain, **Cell(shape=firsts_of(SIZES["toy"])[0]).name}
    assert [(one["plain"], one["holds"]) for one in judge("toy", [toy]).values()] == [
        (0.39, None),
        (19_000_000_000, None),
    ]


@pytest.mark.slow
def test_a_toy_run_writes_every_cell_and_where_the_time_goes(tmp_path):
    document = run(tmp_path / "training.json", size="toy", device="cpu", console=Console(quiet=True))
    assert all(one["status"] == "measured" for one in (*document["cells"], *document["profiles"]))
    assert all(0 < one["mfu"] <= one["hfu"] < 1 for one in document["cells"])
    assert all(one["step_ms_min"] <= one["step_ms"] <= one["step_ms_max"] for one in document["cells"])
    assert [one["head"] for one in document["profiles"]] == ["eagle3", "mtp", "medusa", "medusa"]
    for one in document["profiles"]:
        assert 1 <= len(one["rows"]) <= 15 and sum(row["share"] for row in one["rows"]) <= 1
        assert one["rows"] == sorted(one["rows"], key=lambda row: -row["ms"])
