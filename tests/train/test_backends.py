"""However a run is launched it trains the same head, resumes exactly, and goes on under another launch; or it says why
not. Two processes on CPUs, over gloo."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType
from headstart.configs.errors import BadInput
from headstart.configs.loader import PACKAGE_CONFIGS, shipped
from headstart.heads.registry import build_head, head_class
from headstart.train import trainer
from headstart.train.backend import Backend
from headstart.train.checkpoint import checkpoints
from headstart.train.config import TrainConfig, load_run
from headstart.train.launch import Launch, asked_for, start_accelerator
from headstart.train.optim import build_optimizer
from headstart.train.speed import MEASURED
from headstart.train.tracking import read_rows
from safetensors.torch import load_file

SHARDED = ("zero2", "zero3", "fsdp2")
DEEPSPEED = json.loads((PACKAGE_CONFIGS / "deepspeed" / "zero3.json").read_text())
LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def losses(folder):
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def curve(folder):
    """What training and validation gave, but for how long it took."""
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in read_rows(folder / "metrics.jsonl")]


def final(folder):
    return load_file(folder / "final" / "model.safetensors")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def write_run(world, tmp_path):
    """write_run(name, batch_size): the config of a run into tmp_path/name."""

    def write(name, batch_size):
        train = {"max_steps": 20, "warmup_steps": 2, "learning_rate": 3e-3, "device": "cpu", "validate_every": 8}
        config = {
            "target": {"path": str(world / "target")},
            "head": {"type": "eagle3", "num_depths": 3},
            "data": {"train": str(world / "rows.jsonl"), "validation": str(world / "rows.jsonl")},
            "train": {**train, "output_dir": str(tmp_path / name), "batch_size": batch_size},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def command(write_run, tmp_path):
    """command(backend, name, "key=value", ...): the command line and environment of a run by two processes."""
    # parameters this small would otherwise all be kept whole
    zero3 = {"zero_optimization": {**DEEPSPEED["zero_optimization"], "stage3_param_persistence_threshold": 0}}
    (tmp_path / "zero3.json").write_text(json.dumps(zero3))

    def build(backend, name, *overrides, flags=()):
        how = ["--config_file", str(PACKAGE_CONFIGS / "accelerate" / f"{backend}.yaml"), "--num_processes", "2"]
        how += ["--deepspeed_config_file", str(tmp_path / "zero3.json")] * (backend == "zero3")
        how += ["--main_process_port", str(free_port()), *flags, "-m", "headstart.train"]
        inherited = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
        env = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # ninja is there
        path = write_run(name, batch_size=1)
        return [sys.executable, "-m", "accelerate.commands.launch", *how, str(path), *overrides], env

    return build


@pytest.fixture
def launch(command, tmp_path):
    """launch(backend, name, "key=value", ..., ok=True): runs it to its end; returns the run folder, or what it said."""

    def start(backend, name, *overrides, ok=True, env=None, flags=()):
        line, variables = command(backend, name, *overrides, flags=flags)
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env={**variables, **(env or {})})
        assert (done.returncode == 0) == ok, done.stderr[-3000:]
        return tmp_path / name if ok else done.stderr

    return start


@pytest.fixture
def alone(write_run, tmp_path):
    """alone(name, "key=value", ...): the same run by this process, with two rows a batch."""

    def start(name, *overrides):
        trainer.train(load_run(write_run(name, batch_size=2), overrides))
        return tmp_path / name

    return start


# The same run under every backend


def same_training(folder, single):
    one, other = curve(folder), curve(single)
    assert len(one) == len(other) == 20 + 3
    for a, b in zip(one, other, strict=True):
        if "validation" in a:
            assert a["validation"]["num_rounds"] == b["validation"]["num_rounds"]
            continue
        for key in ("loss", "depth_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], abs=1e-4), (key, a["step"])
        assert a["num_supervised"] == b["num_supervised"] and a["depth_accuracy"] == b["depth_accuracy"]
    for name, value in final(single).items():
        torch.testing.assert_close(final(folder)[name], value, rtol=1e-3, atol=1e-5)


def test_two_processes_train_as_one(launch, alone):
    same_training(launch("ddp", "two"), alone("one"))


@pytest.mark.backends
@pytest.mark.parametrize("backend", ["ddp", *SHARDED])
def test_every_backend_trains_as_one_process_and_resumes_exactly(backend, launch, alone):
    whole = launch(backend, "whole")
    same_training(whole, alone("one"))
    launch(backend, "half", "train.stop_at_step=9")
    half = launch(backend, "half")
    assert curve(half) == curve(whole)
    for name, value in final(whole).items():
        assert torch.equal(final(half)[name], value), name


@pytest.mark.backends
@pytest.mark.parametrize("backend", ["ddp", *SHARDED])
def test_batches_of_a_step_accumulate(backend, launch, alone):
    two = launch(backend, "two", "train.accumulation=2", "train.max_steps=5")
    one = alone("one", "train.batch_size=4", "train.max_steps=5")
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)


@pytest.mark.backends
@pytest.mark.parametrize("backend", ["ddp", *SHARDED])
def test_bf16_casts_alike(backend, launch, alone):
    how = ("train.precision=bf16", "train.max_steps=5")
    two, one = launch(backend, "two", *how), alone("one", *how)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    assert all(value.dtype == torch.float32 for value in final(two).values() if value.is_floating_point())


@pytest.mark.backends
def test_a_run_goes_from_backend_to_backend_and_to_one_process(launch, alone):
    for step, backend in enumerate(["zero2", "fsdp2", "zero3", "ddp"], start=1):
        launch(backend, "travels", f"train.stop_at_step={4 * step}")
    travelled = alone("travels")
    same_training(travelled, alone("one"))


# Another number of processes


@pytest.fixture
def of_two(run):
    """A run that stopped after 3 steps, as if two processes had trained it with batches of 1 row."""

    def start(*overrides):
        folder = run("eagle3", "half", *overrides, "train.batch_size=2", "train.stop_at_step=3")
        path = folder / "checkpoints" / "step_00000003" / "trainer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_processes": 2}))
        written = yaml.safe_load((folder / "config.yaml").read_text())
        written["train"]["batch_size"] = 1
        (folder / "config.yaml").write_text(yaml.safe_dump(written))
        return folder

    return start


def test_one_process_goes_on_where_two_stopped(run, of_two):
    folder = of_two()
    assert losses(run("eagle3", "half", "train.batch_size=2")) == losses(run("eagle3", "whole", "train.batch_size=2"))
    assert len(losses(folder)) == 6


def test_a_step_of_other_rows_is_refused(run, of_two):
    folder = of_two("data.layout=bucketed")
    with pytest.raises(BadInput) as caught:
        run("eagle3", "half", "data.layout=bucketed", "train.batch_size=1")
    counted = "(processes x batch_size x accumulation) rows a step"
    told = f"{folder} was trained with 2 x 1 x 1 {counted}, this would be 1 x 1 x 1: the products must agree"
    assert str(caught.value) == told
    with pytest.raises(BadInput, match="bucketed, processes x batch_size must stay"):
        run("eagle3", "half", "data.layout=bucketed", "train.batch_size=1", "train.accumulation=2")


# What was launched is what runs


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch("single", 1)),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, Launch("ddp", 2)),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true"}, Launch("deepspeed", 1)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Launch("fsdp2", 1)),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1: set fsdp_version: 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "would leave models empty in all processes but the first",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK or LOCAL_RANK is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "each process would train alone; start them with accelerate launch"),
        ({"SLURM_STEP_NUM_TASKS": "16"}, "SLURM_STEP_NUM_TASKS is 16 but WORLD_SIZE is not set"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "asked for several processes and started"),
    ],
)
def test_what_was_asked_for_is_read_from_the_launchers_environment(environ, launch):
    if isinstance(launch, Launch):
        assert asked_for(environ) == launch
    else:
        with pytest.raises(BadInput, match=launch):
            asked_for(environ)


@pytest.mark.parametrize(
    ("environ", "settings", "problem"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "asks for mixed_precision bf16, the run for train.precision fp32"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "deepspeed was asked for but LOCAL_RANK is not set"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {}, "fsdp2 was asked for but LOCAL_RANK is not set"),
        ({}, {"device": "cuda"}, "train.device cuda: no CUDA device here"),
    ],
)
def test_a_launch_that_contradicts_the_run_is_refused(environ, settings, problem, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key in LAUNCHERS:
        monkeypatch.delenv(key, raising=False)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(BadInput, match=problem):
        start_accelerator(TrainConfig(output_dir="unused", max_steps=1, **settings))


def test_a_backend_that_came_up_as_another_is_caught(monkeypatch):
    """Accelerate leaves out DeepSpeed and FSDP where it is told to use the CPU."""
    monkeypatch.setattr("headstart.train.launch.asked_for", lambda _: Launch("ddp", 2))
    with pytest.raises(BadInput) as caught:
        start_accelerator(TrainConfig(output_dir="unused", max_steps=1, device="cpu"))
    told = "launched as ddp on 2 processes, but single on 1 process came up: each process would train alone"
    assert str(caught.value) == told


@pytest.mark.backends
@pytest.mark.parametrize(
    ("backend", "how", "problem"),
    [
        ("cpu", {"flags": ["--cpu"]}, "was asked for several processes and started one"),
        (
            "zero2",
            {"env": {"ACCELERATE_USE_CPU": "true"}},
            "ACCELERATE_USE_CPU, or use_cpu in the launch config",
        ),
        (
            "fsdp2",
            {"env": {"ACCELERATE_USE_CPU": "true"}},
            "ACCELERATE_USE_CPU, or use_cpu in the launch config",
        ),
        ("fsdp2", {"flags": ["--fsdp_version", "1"]}, "asks for FSDP 1: set fsdp_version: 2"),
        ("ddp", {"flags": ["--mixed_precision", "bf16"]}, "asks for mixed_precision bf16"),
    ],
)
def test_a_planted_wrong_launch_stops_with_its_reason(backend, how, problem, launch):
    said = launch(backend, "wrong", ok=False, **how)
    assert any(line.startswith("headstart: ") and problem in line for line in said.splitlines()), said


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_what_cannot_be_trained_in_parts_is_refused(kind, target):
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    accelerator = SimpleNamespace(distributed_type=kind, is_fsdp2=True, num_processes=2, state=plugin)
    config = TrainConfig(output_dir="unused", max_steps=1, optimizer="muon")
    head = build_head(head_class("medusa").config_class(type="medusa"), target)
    with pytest.raises(BadInput, match="train.optimizer muon under .*: it needs whole matrices"):
        Backend(accelerator, head, build_optimizer(head, config), config)  # pyright: ignore[reportArgumentType]
    head.adapts_target = True
    config = TrainConfig(output_dir="unused", max_steps=1)
    with pytest.raises(BadInput, match="would shard the adapters that the target runs through"):
        Backend(accelerator, head, build_optimizer(head, config), config)  # pyright: ignore[reportArgumentType]


def test_every_shipped_launch_config_says_its_command():
    configs = shipped("accelerate/*.yaml")
    assert {path.stem for path in configs} >= {"cpu", "gpu", "ddp", *SHARDED, "multinode"}
    for path in configs:
        assert f"--config_file configs/accelerate/{path.name}" in path.read_text(), path
    for path in PACKAGE_CONFIGS.glob("deepspeed/*.json"):
        assert set(json.loads(path.read_text())) == {"zero_optimization"}, "the run decides the rest"


# Randomness, signals, kills


def test_what_a_head_draws_is_a_function_of_seed_step_and_rank(run):
    noisy = ("head.noise=0.5",)
    whole = run("eagle", "whole", *noisy)
    run("eagle", "half", *noisy, "train.stop_at_step=3")
    torch.rand(7)
    assert curve(run("eagle", "half", *noisy)) == curve(whole)
    assert losses(run("eagle", "seeded", *noisy, "train.seed=1")) != losses(whole)
    assert len({trainer.seed_of(*key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]}) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(number, code, run, monkeypatch, tmp_path, capsys):
    whole = run("medusa", "whole")

    def stepped(self, step, batches, real=trainer.Loop.step):
        if step == 2:
            signal.raise_signal(number)
        return real(self, step, batches)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Loop, "step", stepped)
        with pytest.raises(SystemExit) as caught:
            run("medusa", "half")
    assert caught.value.code == code
    told = " ".join(capsys.readouterr().err.split())
    assert f"{signal.Signals(number).name}: stopped at step 3 of 6; the same command goes on from there" in told
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert curve(run("medusa", "half")) == curve(whole)


def wait_for_rows(folder, count, process, *, seconds=120):
    end = time.monotonic() + seconds
    while len(read_rows(folder / "metrics.jsonl")) < count:
        assert process.poll() is None, "ended by itself"
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.backends
def test_sigterm_to_the_launcher_saves_once_for_all_ranks(command, launch, tmp_path):
    line, env = command("ddp", "half", "train.max_steps=60")
    process = subprocess.Popen(line, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_rows(tmp_path / "half", 5, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and "SIGTERM: stopped at step" in said
    (saved,) = checkpoints(tmp_path / "half" / "checkpoints")
    assert json.loads((saved / "trainer.json").read_text())["step"] == len(losses(tmp_path / "half"))
    half, whole = (launch("ddp", name, "train.max_steps=60") for name in ("half", "whole"))
    assert curve(half) == curve(whole)


@pytest.mark.backends
@pytest.mark.timeout(2400)
def test_twenty_random_kills_leave_the_curve_of_an_uninterrupted_run(command, launch, tmp_path):
    how = ("train.max_steps=400", "train.checkpoint_every=4")
    source, steps = random.Random(5), []
    for _ in range(20):
        line, env = command("ddp", "killed", *how)
        process = subprocess.Popen(line, env=env, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL)
        before = len(losses(tmp_path / "killed")) // 4 * 4  # what is behind the last checkpoint is trained again
        wait_for_rows(tmp_path / "killed", before + 1, process)
        time.sleep(source.uniform(0, 0.6))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        steps.append(len(losses(tmp_path / "killed")))
    assert steps == sorted(steps) and steps[-1] < 400, steps
    killed, whole = launch("ddp", "killed", *how), launch("ddp", "whole", *how)
    assert curve(killed) == curve(whole)
    assert not list((killed / "checkpoints").glob(".*"))


# What is kept


def test_what_a_kill_left_of_a_checkpoint_is_cleared_away(run):
    folder = run("medusa", "half", "train.stop_at_step=3")
    partial = folder / "checkpoints" / ".step_00000099.partial"
    shutil.copytree(folder / "checkpoints" / "step_00000003", partial)
    run("medusa", "half")
    assert not partial.exists()
