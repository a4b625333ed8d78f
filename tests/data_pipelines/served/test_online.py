"""Training from states that a server gives meanwhile: the losses of extracted states, whatever happens to either."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from headstart.base.children import answers_in_time, free_port
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_appended
from headstart.base.terminal import PlainConsole
from headstart.configs.loader import PACKAGE_CONFIGS
from headstart.data_pipelines.served import state_server
from headstart.data_pipelines.served.reading import NUM_PROBES, label_of
from headstart.data_pipelines.served.vllm_process import serving_flags
from headstart.data_pipelines.storage.shards import Shards
from headstart.engines.servers.process import ServerProcess
from headstart.scripts.data.extract import extract
from headstart.targets.target import Target
from headstart.train import trainer
from headstart.train.__main__ import main
from headstart.train.inputs import data as train_data
from headstart.train.inputs.config import load_run
from headstart.train.inputs.target import open_server
from headstart.train.watching.speed import limit_of
from run_files import losses, validations
from test_served import WRONG


@pytest.fixture
def fake(target_of, tmp_path):
    """fake(folder, **told): of the states."""

    def make(folder="states", **told):
        server = FakeServer(target_of("llama"), [1, 2, 3, 4], tmp_path / folder)
        server.told = told
        return server

    return make


@pytest.fixture
def keys(tmp_path):
    """keys(name, "key=value", ...): of a short run into a folder of that name."""

    def make(name, *more):
        how = ["train.device=cpu", "train.max_steps=8", "train.batch_size=4", "train.warmup_steps=2"]
        return [*how, f"train.output_dir={tmp_path / name}", *more]

    return make


@pytest.fixture
def quick(monkeypatch):
    """No long waits for a server that is away."""
    monkeypatch.setattr(state_server, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(state_server, "PATIENCE", 0.3)


def at(url):
    """Keys of a run whose states come from the server there."""
    return ["engine.name=vllm", f"engine.server={url}"]


def extracted(run, output, url, *overrides):
    extract(run, output, [*overrides, *at(url)], device="cpu", storage_dtype="float32")
    return output


def trained(run, keys):
    return losses(trainer.train_head(load_run(run, keys)).parent)


@pytest.mark.fast_only(head=["eagle"])
@pytest.mark.parametrize(("head", "key"), [("eagle3", "data.layout=padded"), ("eagle", "data.layout=bucketed")])
def test_losses_are_those_of_extracted_states_bit_for_bit(head, key, fake, run_of, keys, tmp_path):
    """In whatever order answers come; and the target's layers are never loaded."""
    run, server, source = run_of("llama", {"type": head}), fake(), random.Random(0)
    server.delay = lambda number: source.uniform(0, 0.01)
    with server.listening() as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "load", lambda *_, **__: pytest.fail("loads the layers"))
        out = extracted(run, tmp_path / "out", url)
        num_rows, num_asked = len(Shards(out)), len(server.rows)
        online = trained(run, keys("online", key, *at(url)))
        assert online == trained(run, keys("offline", key, f"data.features={out}")) and len(online) == 8
    assert num_asked == num_rows + NUM_PROBES
    assert not list((tmp_path / "states").iterdir()), "what was taken is removed"


@pytest.mark.slow
def test_validation_rows_are_asked_for_once(fake, run_of, keys, tmp_path):
    run, server = run_of(), fake()
    text, stored = f"data.validation={tmp_path / 'held_out.jsonl'}", tmp_path / "held_out"
    (tmp_path / "held_out.jsonl").write_text("\n".join((tmp_path / "rows.jsonl").read_text().splitlines()[3:8]))
    with server.listening() as url:
        extracted(run, stored, url, f"data.train={tmp_path / 'held_out.jsonl'}")
        extracted(run, tmp_path / "out", url)
        found = []
        more = ["train.validate_every=2", "train.checkpoint_every=2"]
        for name, *how in (
            ("online", text, *at(url)),
            ("offline", f"data.validation={stored}", f"data.features={tmp_path / 'out'}"),
        ):
            trainer.train_head(load_run(run, keys(name, *more, *how, "train.stop_at_step=4")))
            server.rows.clear()
            folder = trainer.train_head(load_run(run, keys(name, *more, *how))).parent
            found.append(validations(folder))
            if name == "online":
                assert len(server.rows) == NUM_PROBES + 4 * 4, "the probes and the rows of 4 steps"
    assert found[0] == found[1] and len(found[0]) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Before the first step


def test_a_wrong_server_is_refused_by_name_before_anything_is_written(fake, run_of, keys, tmp_path):
    told, message = WRONG["context"]  # the others in test_served.py
    with fake(**told).listening() as url, pytest.raises(BadInput, match=message) as refused:
        trained(run_of(), keys("run", *at(url), "data.max_length=60"))
    assert url in str(refused.value)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "states").iterdir())


def test_what_contradicts_a_server_is_refused_in_one_line(fake, run_of, keys, tmp_path):
    run = run_of()
    with pytest.raises(BadInput, match="^engine.name vllm: states come from data.features y already: leave one out$"):
        load_run(run, keys("run", *at("http://x"), "data.features=y"))
    rows = f"data.validation={tmp_path / 'rows.jsonl'}"
    with pytest.raises(BadInput, match="train.decode_prompts 2: decoding takes the target's layers, which the server"):
        trained(run, keys("run", *at("http://x"), rows, "train.decode_prompts=2"))
    with pytest.raises(BadInput, match="^engine.server 'x:1': expected a URL such as"):
        trained(run, keys("run", *at("x:1")))
    with fake().listening() as url:
        pass
    with pytest.raises(BadInput, match=f"^{url}: cannot be reached: .*refused"):
        trained(run, keys("run", *at(url)))
    assert not (tmp_path / "run").exists()


def test_a_target_that_needs_its_layers_is_loaded_with_them_and_says_so(fake, run_of, keys, capsys):
    run = run_of("llama", {"type": "mtp"})
    with fake().listening() as url:
        trained(run, keys("run", *at(url), "train.max_steps=3"))
    assert "engine.name vllm: the target is loaded with its layers: head mtp reads them" in capsys.readouterr().err


def test_what_a_killed_rank_left_is_removed_and_nothing_else(fake, run_of, keys, tmp_path):
    server, (own, other) = fake(), (label_of(tmp_path / "run", rank) for rank in range(2))
    left = [tmp_path / "states" / f"{label}-1.safetensors" for label in (own, other)]
    for path in left:
        path.write_text("")
    with server.listening() as url:
        trained(run_of(), keys("run", *at(url)))
    assert [path.exists() for path in left] == [False, True] and set(server.labels) == {own}


# ---------------------------------------------------------------------------------------------------------------------
# While it trains


@pytest.mark.slow
def test_a_dead_server_ends_in_a_checkpoint_and_the_same_command_goes_on(
    fake, run_of, keys, quick, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(train_data, "ROWS_AHEAD", 4)
    run, server, step = run_of(), fake(), trainer.Loop.step

    def dies(self, number, batches):
        server.num_away = 10**9 if number == 2 else server.num_away
        return step(self, number, batches)

    with server.listening() as url:
        whole = trained(run, keys("whole", *at(url)))
        command, port = [run, *keys("run", *at(url))], int(url.rpartition(":")[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.Loop, "step", dies)
            assert main(command) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headstart: ")]
    assert len(lines) == 1 and re.fullmatch(f"headstart: server {url}: .*; gave up after 0.3 s", lines[0])
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step_")) == len(losses(tmp_path / "run")) in range(2, 8)
    server.num_away = 0
    with server.listening(port):
        assert main(command) == 0
    assert losses(tmp_path / "run") == whole


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_server(fake, run_of, keys, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train_data, "ROWS_AHEAD", 4)
    server, step = fake(), trainer.Loop.step

    def dies(self, number, batches):
        if number == 3:
            server.num_away = 10**9
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return step(self, number, batches)

    monkeypatch.setattr(trainer.Loop, "step", dies)
    with server.listening() as url, pytest.raises(SystemExit) as ended:
        trained(run_of(), keys("run", *at(url), "train.max_steps=200"))
    assert ended.value.code == 143 and "SIGTERM: stopped at step" in capsys.readouterr().err
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_run_does_not_go_on_with_the_states_of_another_engine(fake, run_of, keys):
    run, server = run_of(), fake()
    with server.listening() as url:
        trained(run, keys("run", *at(url), "train.stop_at_step=3"))
        server.told = {"version": "0.1"}
        with pytest.raises(BadInput, match="holds a run on states of .*'0.0'.*, not .*'0.1'"):
            trained(run, keys("run", *at(url)))


@pytest.mark.slow
def test_no_more_rows_are_asked_for_than_may_wait(fake, run_of, keys, monkeypatch):
    monkeypatch.setattr(train_data, "ROWS_AHEAD", 6)
    server, counts = fake(), []
    step = trainer.Loop.step

    def slow(self, number, batches):
        counts.append(len(server.rows) - NUM_PROBES)
        row = step(self, number, batches)
        time.sleep(0.05)
        return row

    monkeypatch.setattr(trainer.Loop, "step", slow)
    with server.listening() as url:
        trained(run_of(num_rows=24), keys("run", *at(url), "train.batch_size=2"))
    first, *later = counts  # the rows before the first step are those that a fresh head starts from
    most = [first + 2 * done + 6 for done in range(1, 8)]
    assert all(count <= limit for count, limit in zip(later, most, strict=True)), counts
    assert later[0] > first + 2, "they are asked for before they are needed"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["the server", "training"])
def test_the_side_that_limits_is_named(side, fake, run_of, keys, monkeypatch, capsys, tmp_path):
    """A trainer waits less than 5 % of its time for a server that is faster than its steps."""
    server, step, ahead = fake(), trainer.Loop.step, 1 if side == "the server" else 16

    def slow(self, number, batches):
        time.sleep(0.2 if side == "training" else 0.0)  # while rows are answered
        return step(self, number, batches)

    monkeypatch.setattr(train_data, "ROWS_AHEAD", ahead)
    monkeypatch.setattr(trainer.Loop, "step", slow)
    with server.listening() as url:
        server.delay = lambda number: 0.5 if side == "the server" and number > 16 else 0.0
        trained(run_of(), keys("run", *at(url), "train.batch_size=1"))
    shares = [row["data_wait"] for row in read_appended(tmp_path / "run" / "metrics.jsonl")]
    if side == "training":
        waited = sum(shares[3:]) / len(shares[3:])  # the first steps wait for the first rows, which come in any order
        assert waited < 0.05 and limit_of(waited).endswith("training limits"), shares
    else:
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waited for the server")]
        waited = re.fullmatch(r"waited for the server (\d+)% of the time: the server limits", line)
        assert waited and int(waited[1]) > 30 and max(shares) > 0.3


@pytest.mark.soak
def test_restarts_and_kills_of_both_sides_leave_the_losses_of_extracted_states(folder_of, run_of, keys, tmp_path):
    run, port = run_of(num_rows=50), free_port()
    how = ["train.max_steps=60", "train.checkpoint_every=4", *at(f"http://127.0.0.1:{port}")]
    words = ["-m", "fake", "--host", "127.0.0.1", "--port", str(port), "--model", str(folder_of("llama"))]
    words += ["--dtype", "float32", *serving_flags([1, 2, 3, 4], tmp_path / "states")]
    running: list[subprocess.Popen[bytes]] = []

    def start(*command, **env):
        running.append(subprocess.Popen([sys.executable, *command], env={**os.environ, **env}))
        return running[-1]

    def serve():
        process = start(str(Path(__file__).with_name("fake_server.py")), *words, PACE="0.02")
        assert answers_in_time(f"http://127.0.0.1:{port}", seconds=300, pause=0.1, why_gone=lambda: None)
        return process

    def wait_for(count):
        while len(losses(tmp_path / "run")) < count:
            assert trainer_process.poll() is None
            time.sleep(0.01)

    def kill(process):
        process.kill()
        assert process.wait() == -signal.SIGKILL

    try:
        server = serve()
        out = extracted(run, tmp_path / "out", f"http://127.0.0.1:{port}")
        trainer_process = start("-m", "headstart.train", run, *keys("run", *how))
        for count in (10, 32):
            wait_for(count)
            kill(server)
            server = serve()
            wait_for(count + 10)
            kill(trainer_process)
            trainer_process = start("-m", "headstart.train", run, *keys("run", *how))
        assert trainer_process.wait() == 0
    finally:
        for process in running:
            process.kill()
            process.wait()
    online = losses(tmp_path / "run")
    offline = trained(run, keys("offline", "train.max_steps=60", f"data.features={out}"))
    assert online == offline and len(online) == 60
    assert not list((tmp_path / "states").iterdir())


@pytest.mark.slow
def test_two_processes_ask_for_their_own_rows(fake, run_of, keys, tmp_path):
    run, server, label = run_of(num_rows=16), fake(), {rank: label_of(tmp_path / "two", rank) for rank in range(2)}
    (tmp_path / "held_out.jsonl").write_text("\n".join((tmp_path / "rows.jsonl").read_text().splitlines()[3:8]))
    launch = ["accelerate.commands.launch", "--config_file", str(PACKAGE_CONFIGS / "accelerate" / "ddp.yaml")]
    launch += ["--num_processes", "2", "--main_process_port", str(free_port()), "-m", "headstart.train", run]
    more = [f"data.validation={tmp_path / 'held_out.jsonl'}", "train.validate_every=4"]
    with server.listening() as url:
        one = trained(run, keys("one", *more, *at(url)))
        before, asked_alone = len(server.rows), len(server.rows)
        left = [tmp_path / "states" / f"{label[rank]}-1.safetensors" for rank in range(2)]
        for path in left:
            path.write_text("")
        two = [*keys("two", *more, *at(url), "train.batch_size=2")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, "-m", *launch, *two], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "two") == pytest.approx(one, rel=1e-5)
    figures = [validations(tmp_path / name) for name in ("one", "two")]
    assert figures[0] == figures[1] and len(figures[0]) == 2
    counts = Counter(server.labels[before:])
    fresh = server.labels[:asked_alone].count(label_of(tmp_path / "one"))
    own = NUM_PROBES + 8 * 2  # of each rank, beside validation and what a fresh head starts from
    assert set(counts) == set(label.values()) and all(own < count < fresh for count in counts.values())
    assert not list((tmp_path / "states").iterdir()) and "waited for the server" in done.stderr


@pytest.mark.parametrize(("has_gpu", "given"), [(False, []), (True, ["0.5"])])
def test_beside_a_training_a_server_takes_half_of_a_gpu_unless_it_is_told_its_share(
    has_gpu, given, run_of, keys, target_of, tmp_path, monkeypatch
):
    def started(process):
        raise BadInput(process.line)

    told = ["engine.name=vllm", "engine.python=P", "engine.args=--gpu-memory-utilization 0.8"]
    run, target = load_run(run_of(), keys("own", *told)), target_of("llama")
    rank: Any = SimpleNamespace(process_index=0)
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(ServerProcess, "__enter__", started)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(BadInput) as caught, ExitStack() as holding:
        open_server(run, target, rank, PlainConsole(), holding)
    shares = [share for flag, share in pairwise(shlex.split(str(caught.value))) if flag == "--gpu-memory-utilization"]
    assert shares == [*given, "0.8"], "the last one counts"
