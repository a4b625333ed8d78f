"""However a run is launched it trains the same head, resumes exactly, and goes on under another launch.

Two processes on CPUs, over gloo.
"""

import json
import math
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_appended
from headstart.train import loop, trainer
from headstart.train.checkpoint import Best, Progress, checkpoints
from headstart.train.inputs.config import TrainConfig
from headstart.train.watching.trend import Trend
from run_files import final, losses, metrics

pytestmark = pytest.mark.timeout(600, func_only=True)  # not counting the compilation for DeepSpeed
BACKENDS = ("ddp", "zero2", "zero3", "fsdp2")


# The same run under every backend


def same_training(folder, single):
    one, other = metrics(folder), metrics(single)
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


@pytest.mark.slow
def test_two_launched_processes_train_as_one(launching, by_one, tmp_path):
    path = launching.write(tmp_path / "two", batch_size=1)
    line, env = launching.command("ddp", "-m", "headstart.train", str(path))
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    same_training(tmp_path / "two", by_one())


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_trains_as_one_process_and_resumes_exactly(
    backend, launching, shared_memory_op, by_one, tmp_path
):
    whole = launching.finish(backend, tmp_path / "whole")
    same_training(whole, by_one())
    count = sum(value.numel() for value in final(by_one()).values())
    assert f"eagle3: {count:,} parameters" in (tmp_path / "whole.log").read_text()
    launching.finish(backend, tmp_path / "half", "train.stop_at_step=9")
    half = launching.finish(backend, tmp_path / "half")
    assert metrics(half) == metrics(whole)
    for name, value in final(whole).items():
        assert torch.equal(final(half)[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero3", "fsdp2"])
def test_adapters_of_a_sharded_head_train_as_in_one_process(backend, launching, shared_memory_op, by_one, tmp_path):
    how = (f"train.start_from={by_one() / 'final'}", "train.lora_rank=2")
    same_training(launching.finish(backend, tmp_path / "adapted", *how), by_one(*how))


@pytest.mark.slow
def test_one_process_speaks_for_all(launching, tmp_path):
    launching.finish("ddp", tmp_path / "two", "head.draft_vocab_size=20", "data.max_length=6", "train.max_steps=3")
    said = " ".join((tmp_path / "two.log").read_text().split())
    for line in ("draft vocabulary: 20 of", "data.train: kept 4", "data.validation: kept 4", "head written to"):
        assert said.count(line) == 1, said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero2", "fsdp2"])
def test_batches_of_a_step_accumulate(backend, launching, by_one, shared_memory_op, tmp_path):
    two = launching.finish(backend, tmp_path / "two", "train.accumulation=2", "train.max_steps=5")
    one = by_one("train.batch_size=4", "train.max_steps=5")
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero3"])
def test_bf16_casts_alike(backend, launching, by_one, shared_memory_op, tmp_path):
    how = ("train.precision=bf16", "train.max_steps=5")
    two, one = launching.finish(backend, tmp_path / "two", *how), by_one(*how)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    assert all(value.dtype == torch.float32 for value in final(two).values() if value.is_floating_point())


@pytest.mark.slow
def test_a_run_goes_from_backend_to_backend_and_to_one_process(launching, shared_memory_op, by_one, tmp_path):
    for step, backend in enumerate(["zero2", "fsdp2", "zero3", "ddp"], start=1):
        launching.finish(backend, tmp_path / "travels", f"train.stop_at_step={4 * step}")
    same_training(launching.alone(tmp_path / "travels"), by_one())


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


def test_a_step_of_other_rows_is_refused(refused, of_two):
    folder = of_two("data.layout=bucketed")
    counted = "(processes x batch_size x accumulation) rows a step"
    told = f"{folder} was trained with 2 x 1 x 1 {counted}, this would be 1 x 1 x 1: the products must agree"
    how = ("data.layout=bucketed", "train.batch_size=1")
    assert refused("eagle3", "half", *how) == told
    assert "bucketed, processes x batch_size must stay" in refused("eagle3", "half", *how, "train.accumulation=2")


# Randomness, signals, kills


def test_what_a_head_draws_is_a_function_of_seed_step_and_rank(run):
    noisy = ("head.noise=0.5",)
    whole = run("eagle", "whole", *noisy)
    run("eagle", "half", *noisy, "train.stop_at_step=3")
    torch.rand(7)
    assert metrics(run("eagle", "half", *noisy)) == metrics(whole)
    assert losses(run("eagle", "seeded", *noisy, "train.seed=1")) != losses(whole)
    assert len({loop.step_seed(*key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]}) == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(number, code, run, monkeypatch, tmp_path, capsys):
    if number == signal.SIGINT:  # which shells ignore in what they start in the background
        signal.signal(number, signal.default_int_handler)
    whole = run("medusa", "whole")

    def stepped(self, step, batches, real=trainer.Loop.step):
        if step == 2:
            signal.raise_signal(number)
        return real(self, step, batches)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(trainer.Loop, "step", stepped)
        run("medusa", "half")
    assert caught.value.code == code
    told = " ".join(capsys.readouterr().err.split())
    assert f"{signal.Signals(number).name}: stopped at step 3 of 6; the same command goes on from there" in told
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert metrics(run("medusa", "half")) == metrics(whole)


def test_a_signal_that_ends_one_ranks_wait_for_batches_stops_all():
    """Two ranks in threads: to one of them a signal came, and no batch; to the other a batch."""
    meeting, flags, stopped = threading.Barrier(2), {}, {}

    def no_batch():
        raise BadInput("server x: SIGTERM")
        yield

    def train(rank, received, batches):
        def total(values):
            flags[rank] = values
            meeting.wait()
            return flags[0] + flags[1]

        parts = {"config": TrainConfig(output_dir="unused", max_steps=2), "head": None, "total": total}
        backend: Any = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")), **parts)
        others: dict[str, Any] = {"place": None, "progress": Progress(0, 2, Best(), Trend())}
        others |= {"stopping": SimpleNamespace(received=received), "watchdog": SimpleNamespace(at=lambda _: None)}
        one = loop.Loop(backend, **others, deadline=math.inf, may_lack_batches=True)
        with suppress(loop.NoBatch):
            one.step(0, batches)
        stopped[rank] = one.should_stop

    threads = [
        threading.Thread(target=train, args=(0, signal.SIGTERM, no_batch())),
        threading.Thread(target=train, args=(1, None, iter(["a batch"]))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert stopped == {0: True, 1: True}


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_once_for_all_ranks(launching, tmp_path):
    half, whole = tmp_path / "half", tmp_path / "whole"
    path = launching.write(half, batch_size=1)
    line, env = launching.command("ddp", "-m", "headstart.train", str(path), "train.max_steps=60")
    process = subprocess.Popen(line, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    launching.wait_for_rows(half, 5)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=240)
    assert process.returncode != 0 and "SIGTERM: stopped at step" in said
    (saved,) = checkpoints(half / "checkpoints")
    assert json.loads((saved / "trainer.json").read_text())["step"] == len(losses(half))
    for folder in (half, whole):
        launching.finish("ddp", folder, "train.max_steps=60")
    assert metrics(half) == metrics(whole)


@pytest.mark.soak
def test_twenty_random_kills_leave_the_curve_of_an_uninterrupted_run(launching, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    how = ("train.max_steps=240", "train.checkpoint_every=4")
    source, steps = random.Random(5), []
    for kill in range(20):
        seen = len(read_appended(killed / "metrics.jsonl"))
        processes = launching.start("ddp", killed, *how)
        if kill % 4 == 3:  # while it starts, most likely
            time.sleep(source.uniform(0, 2))
        else:
            launching.wait_for_rows(killed, seen + source.randint(1, 9))
            time.sleep(source.uniform(0, 0.03))
        for process in processes:
            os.kill(process, signal.SIGKILL)
        assert set(launching.wait(processes)) == {-signal.SIGKILL}
        steps.append(len(losses(killed)))
    assert steps[-1] < 240 and len(set(steps)) > 10, steps
    for folder in (killed, whole):
        launching.finish("ddp", folder, *how)
    assert metrics(killed) == metrics(whole)
    assert not list((killed / "checkpoints").glob(".*"))
