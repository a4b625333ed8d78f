"""The GPU's rungs: at toy size on a CPU, without what a bare machine lacks; what travels; parts that fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from headstart.benchmarks.gpu.rehearsal import rehearsed
from headstart.benchmarks.gpu.table import lines_of
from headstart.engines.heads import head_record
from headstart.scripts.cli import app
from headstart.scripts.unattended.running.clock import parse_budget
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


def test_rehearsed_a_device_waits_for_no_host_and_decodes_for_all_rows_until_the_queue_ends():
    """Its steps take longer than any work of the host: a wait would be for one that itself waits for the device."""
    device, figures = rehearsed(16, 64, step_seconds=1.0)
    assert figures["num_prompts"] == 64 and device.seconds["rounds"] > figures["num_rounds"] > 200
    assert device.seconds["waiting"] == 0 and figures["share_of_idle_rows_before"] == 0


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


def test_what_no_gpu_has_run_yet_fits_nine_minutes(tmp_path):
    python, log = recording_python(tmp_path)
    (tmp_path / "pack" / "target").mkdir(parents=True)
    done = bash("rung.sh", "--pack", tmp_path / "pack", "--work", tmp_path, "7", PYTHON=str(python), OUT=str(tmp_path))
    parts = re.findall(r"(\w+), for (\d+) s at most", done.stdout)
    names = ["answers", "engine", "load", "fsdp2", "zero2", "zero3", "hybrid", "plan", "auto"]
    assert [name for name, _ in parts] == names and sum(int(seconds) for _, seconds in parts) <= 540
    assert "auto" in log.read_text()


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
