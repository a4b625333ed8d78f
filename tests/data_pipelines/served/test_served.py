"""States that a server gives are stored as those of a target here; a wrong server is refused by name, untouched."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from headstart.base.errors import BadInput
from headstart.base.owned import MARKER
from headstart.data_pipelines.served.in_vllm.headstart_weights import weights_digest
from headstart.data_pipelines.served.reading import NUM_PROBES, ServedTarget, check_server
from headstart.data_pipelines.served.state_server import StateServer
from headstart.data_pipelines.storage.shards import Shards, read_manifest
from headstart.engines.servers.process import ServerProcess
from headstart.engines.servers.setting import EngineSetting
from headstart.scripts.data.extract import extract
from headstart.targets.loading import TargetConfig
from headstart.targets.target import Target
from run_files import contents
from served_targets import KINDS
from words import word_tokenizer

HEADS = {
    "eagle3": ({"type": "eagle3"}, [1, 2, 3, 4]),
    "medusa": ({"type": "medusa", "num_depths": 2}, [4]),
    "other layers": ({"type": "eagle3", "feature_layers": [0, 3]}, [0, 3, 4]),
    "more layers than are read": ({"type": "eagle"}, [1, 4]),
}


@pytest.fixture
def fake(target_of, tmp_path):
    """fake(kind, layers, **told)."""

    def make(kind="llama", layers=(1, 2, 3, 4), **told):
        return FakeServer(target_of(kind), list(layers), tmp_path / "states", **told)

    return make


def here(run, output, **how):
    extract(run, output=output, device="cpu", **{"storage_dtype": "float32", **how})


def served(run, output, url, **how):
    overrides = [*how.pop("overrides", ()), "engine.name=vllm", f"engine.server={url}"]
    here(run, output, overrides=overrides, **how)


def by_own(run, output, python, args="", overrides=(), **how):
    """By a server that is started for it."""
    told = [*overrides, "engine.name=vllm", f"engine.python={python}", *([f"engine.args={args}"] if args else [])]
    here(run, output, overrides=told, **how)


def rows_of(folder) -> list[Any]:
    return list(Shards(folder))


CASES = [(head, "qwen2") for head in HEADS] + [("eagle3", kind) for kind in KINDS if kind != "qwen2"]


@pytest.mark.fast_only(kind=["qwen2"], head=["eagle3", "other layers"])
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_stored_is_what_the_target_itself_gives_and_no_token_is_asked_for_that_nothing_reads(
    kind, head, fake, run_of, tmp_path
):
    config, layers = HEADS[head]
    run, server = run_of(kind, config), fake(kind, layers)
    with server.listening() as url:
        served(run, tmp_path / "out", url)
    here(run, tmp_path / "here")
    ours, theirs = (read_manifest(tmp_path / name).fields for name in ("here", "out"))
    for a, b in zip(rows_of(tmp_path / "here"), rows_of(tmp_path / "out"), strict=True):
        assert a.sample == b.sample
        torch.testing.assert_close(a.states.features, b.states.features, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.states.post_norm, b.states.post_norm, atol=1e-4, rtol=0)
    assert theirs == ours | {"engine": "vllm", "engine_version": "0.0", "engine_quantization": None}
    assert not list((tmp_path / "states").iterdir()), "what was taken is removed"
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {"manifest.json", "shard_00000.safetensors"}
    rows = rows_of(tmp_path / "out")
    needed = [(row.packed.features_at | row.packed.post_norm_at).nonzero()[0] for row in rows]
    wanted = sorted(int(at[-1]) + 1 for at in needed if len(at))
    assert sorted(server.rows[-len(wanted) :]) == wanted and len(server.rows) <= NUM_PROBES + len(wanted)
    # rows end with tokens that are only predicted; so one that fills the context leaves room for a token
    assert all(len(row.sample) > at[-1] + 1 for row, at in zip(rows, needed, strict=True) if len(at))


def test_a_server_is_asked_for_states_by_no_proxy_of_the_environment(fake, silent_proxy):
    with fake().listening() as url:
        assert len(StateServer(url, label="ab").ask([1, 5, 9]).states) == 3


@torch.no_grad()
def test_a_target_without_layers_reads_rows_by_the_server(fake, folder_of, target_of):
    ids = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(2))
    ours = target_of("qwen2").read_texts(ids, feature_layers=(1, 3))
    with fake("qwen2").listening() as url:
        source = TargetConfig(path=str(folder_of("qwen2")), dtype="float32")
        served = ServedTarget.read(source)
        served.attach(StateServer(url, label="ab"), [1, 2, 3, 4])
        theirs = served.read_texts(ids, feature_layers=(1, 3))
    for name in ("features", "post_norm"):
        torch.testing.assert_close(getattr(ours, name)[:, :-1], getattr(theirs, name)[:, :-1], atol=1e-4, rtol=0)
    assert theirs.features.shape == ours.features.shape


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


WRONG = {
    "target": ({"weights": "ab" * 16}, "serves target .* .weights abababababab., not"),
    "damaged checkpoint": ({"weights": "OSError: gone"}, "weights OSError: gon"),
    "layers": ({"layers": [1, 2, 4]}, r"gives the states of layers \[1, 2, 4\] of 4, asked for are \[1, 2, 3, 4\]"),
    "last layer": ({"layers": [1, 2, 3]}, r"gives the states of layers \[1, 2, 3\] of 4"),
    "depth": ({"num_layers": 5}, r"of 5, asked for are"),
    "dtype": ({"dtype": "bfloat16"}, "computes in dtype bfloat16, target.dtype is float32"),
    "tokenizer": ({"vocabulary": "cd" * 16}, "has another tokenizer: vocabulary cdcd"),
    "context": ({"max_length": 59}, "its max-model-len is 59, rows have up to 60 tokens"),
}


@pytest.fixture
def refused(target_of, tmp_path):
    """refused(server, message): by its name, as states of the target; what it gave is removed."""

    def check(server, message):
        with server.listening() as url, pytest.raises(BadInput, match=message) as caught:
            check_server(StateServer(url, label="ab"), target_of("llama"), [1, 2, 3, 4], max_length=60, revision=None)
        assert url in str(caught.value) and not list((tmp_path / "states").iterdir())

    return check


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_server_is_refused_by_name(what, fake, refused):
    told, message = WRONG[what]
    refused(fake(**told), message)


def test_another_target_or_tokenizer_has_another_digest(folder_of, refused, tmp_path):
    for name in ("weights", "words"):
        shutil.copytree(folder_of("llama"), tmp_path / name)
    model = Target.load(folder_of("llama")).model
    model.model.layers[2].mlp.up_proj.weight.data[:, 0] += 0.01
    model.save_pretrained(tmp_path / "weights")
    word_tokenizer(["v0", *(f"w{i}" for i in range(1, 61))]).save_pretrained(tmp_path / "words")
    for name, message in (("weights", "serves target .*/weights .*, not .*/llama"), ("words", "has another tokenizer")):
        refused(FakeServer(Target.load(tmp_path / name, dtype="float32"), [1, 2, 3, 4], tmp_path / "states"), message)


def test_the_digest_is_that_of_the_weights_in_whatever_files(folder_of, tmp_path):
    model = Target.load(folder_of("qwen2")).model
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert weights_digest(str(tmp_path / "parts")) == weights_digest(str(folder_of("qwen2")))
    assert weights_digest(str(folder_of("llama"))) != weights_digest(str(folder_of("qwen2")))
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="not all that"):
        weights_digest(str(tmp_path / "parts"))


def test_another_norm_than_ours_is_noticed(fake, refused):
    """A server whose logits are not those of its states with our final norm and output layer."""
    server = fake()
    right = server.states
    server.states = lambda ids: (right(ids)[0], right(ids)[1], right(ids)[2] - 0.5)
    refused(server, "it computes something else than we")


def test_a_server_that_gives_no_states_is_refused_before_anything_is_written(fake, run_of, tmp_path):
    server = fake()
    server.has_connector = False
    with server.listening() as url, pytest.raises(BadInput, match="does not run headstart's connector"):
        served(run_of(), tmp_path / "out", url)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match=f"^{url}: cannot be reached: .*refused"):
        StateServer(url, label="ab")
    with pytest.raises(BadInput, match="engine.server 'localhost:8000': expected a URL such as http"):
        StateServer("localhost:8000", label="ab")
    unseen = fake()
    with unseen.listening() as url:
        shutil.rmtree(tmp_path / "states")
        unseen.num_unwritten = 1
        with pytest.raises(BadInput, match="states: not seen here"):
            StateServer(url, label="ab").ask([5, 6])


def test_an_engine_that_gives_no_states_is_refused(run_of, tmp_path):
    with pytest.raises(BadInput, match="engine: name 'sglang': expected headstart or vllm"):
        here(run_of(), tmp_path / "out", overrides=["engine.name=sglang"])


def test_features_of_two_engines_are_not_mixed(fake, run_of, tmp_path):
    run = run_of()
    here(run, tmp_path / "here")
    with fake().listening() as url:
        served(run, tmp_path / "out", url)
        with pytest.raises(BadInput, match="holds samples with engine None, now vllm"):
            served(run, tmp_path / "here", url)
    served(run, tmp_path / "out", url)  # finished: no server is needed
    with pytest.raises(BadInput, match="holds samples with engine vllm, now None"):
        here(run, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


@pytest.mark.slow
def test_answers_that_get_lost_are_asked_for_again(fake, run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("headstart.data_pipelines.served.state_server.FIRST_PAUSE", 0.01)
    run, server = run_of(), fake()
    with server.listening() as url:
        served(run, tmp_path / "whole", url)
        server.num_away, server.num_unwritten = 3, 2
        asker = StateServer(url, label="ab")
        asker.file_patience = 0.2
        for _ in range(4):
            assert asker.ask([5, 6, 7]).states.shape == (3, 4, 32)
        assert (server.num_away, server.num_unwritten) == (0, 0)
        server.num_away = 4
        served(run, tmp_path / "out", url)
    assert contents(tmp_path / "out", but=MARKER) == contents(tmp_path / "whole", but=MARKER)
    with pytest.raises(BadInput, match="refused.*; gave up after 0.3 s"):
        asker.patience = 0.3
        asker.ask([5])


@pytest.mark.parametrize("is_up", [True, False])
def test_rows_of_a_lost_server_go_to_the_others(is_up, fake, run_of, tmp_path, monkeypatch):
    """It is lost in the middle, or was never there; the rows are those of the target all the same."""
    monkeypatch.setattr("headstart.data_pipelines.served.reading.AT_ONCE", 2)
    run, first, second = run_of(), fake(), fake()

    def dies(number):
        first.num_away = 10**6 * (number == NUM_PROBES + 2)
        return 0.01

    first.delay, second.delay = dies, lambda number: 0.01
    here(run, tmp_path / "here")
    with first.listening() as one, second.listening() as other:
        served(run, tmp_path / "out", f"[{one if is_up else 'http://127.0.0.1:9'}, {other}]")
    for a, b in zip(rows_of(tmp_path / "here"), rows_of(tmp_path / "out"), strict=True):
        torch.testing.assert_close(a.states.features, b.states.features, atol=1e-4, rtol=0)
    assert len(first.rows) == (NUM_PROBES + 2) * is_up and len(second.rows) >= 12 - 2 * is_up
    assert not list((tmp_path / "states").iterdir()), "nothing is left of either"


@pytest.mark.parametrize("is_restarted", [True, False])
def test_servers_of_different_targets_are_not_mixed(is_restarted, fake):
    """Neither one that is another after its restart, nor one of several."""
    first, second = fake(), fake(version="9.9")
    with first.listening() as one, second.listening() as other:
        asker = StateServer(one, other, label="ab")
        asker.ask([5, 6, 7])
        if is_restarted:
            first.told, named = {"version": "9.9"}, one
        else:
            first.num_away, named = 1, other
        with pytest.raises(BadInput, match=f"{named}: is another one than before: version 0.0, now 9.9"):
            asker.ask([5, 6, 7])


def test_a_full_disk_at_the_server_ends_in_its_line(fake, run_of, tmp_path):
    server = fake()
    with server.listening() as url:
        server.problem = "No space left on device"
        with pytest.raises(BadInput, match="the server could not write it: OSError: No space left on device"):
            served(run_of(), tmp_path / "out", url)
    assert not list((tmp_path / "states").iterdir()) and not (tmp_path / "out").exists()


def ended(work):
    """In a child process: its end, with what it raised on stderr."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.mark.slow
def test_killed_at_any_point_it_loses_and_repeats_no_row(fake, run_of, tmp_path):
    num_kills = 20
    run, server, source = run_of(num_rows=30 * num_kills), fake(), random.Random(1)
    how = {"shard_bytes": 10_000, "batch_tokens": 200}
    with server.listening() as url:
        served(run, tmp_path / "whole", url, **how)
        num_shards, num_killed = len(list((tmp_path / "whole").glob("shard_*"))), 0
        for number in range(num_kills):
            child, after = os.fork(), source.uniform(0, 1)
            if child == 0:
                ended(lambda: served(run, tmp_path / "out", url, **how))
            until = time.monotonic() + (after if number % 3 == 2 else 60)  # some before they have written anything
            wanted = num_shards * (number + 1) // (num_kills + 1)
            while len(list((tmp_path / "out").glob("shard_*"))) < wanted and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(after / 20)
            os.kill(child, signal.SIGKILL)
            num_killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert num_killed == num_kills
        served(run, tmp_path / "out", url, **how)
    # a few of the random rows have no token to learn, and are left out
    assert len(Shards(tmp_path / "out")) == len(Shards(tmp_path / "whole")) > 29 * num_kills
    assert contents(tmp_path / "out", but=MARKER) == contents(tmp_path / "whole", but=MARKER)
    assert not list((tmp_path / "states").iterdir()), "nor do files stay at the server"


# ---------------------------------------------------------------------------------------------------------------------
# A server of our own


@pytest.fixture
def python(tmp_path):
    """In the place of an environment with vLLM: an interpreter that runs the stand-in."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {os.path.dirname(__file__)}/fake_server.py "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_a_server_of_our_own_runs_for_the_extraction_alone(python, run_of, tmp_path, monkeypatch):
    ended = []
    close = ServerProcess.close
    monkeypatch.setattr(ServerProcess, "close", lambda self: (ended.append(self.process.pid), close(self)))
    run = run_of()
    by_own(run, tmp_path / "out", python, "--tensor-parallel-size 2")
    here(run, tmp_path / "here")
    for a, b in zip(rows_of(tmp_path / "out"), rows_of(tmp_path / "here"), strict=True):
        torch.testing.assert_close(a.states.features, b.states.features, atol=1e-4, rtol=0)
    with pytest.raises(ProcessLookupError):
        os.kill(ended[0], 0)
    assert not {"states", "vllm.log"} & set(os.listdir(tmp_path / "out"))


@pytest.mark.slow
def test_a_server_of_our_own_gives_the_states_under_an_adapter(python, run_of, folder_of, lora, tmp_path, capfd):
    """vLLM is told to serve it, and asked by its name; a running server of another one is refused."""
    adapter = lora(folder_of("llama"), r=12)
    under = [f"target.adapter={adapter}"]
    by_own(run_of(), tmp_path / "out", python, overrides=under)
    flags = f"--enable-lora --lora-modules {adapter.name}={adapter} --max-lora-rank 16"
    assert flags in capfd.readouterr().err
    for name, more in (("here", under), ("base", [])):
        here(run_of(), tmp_path / name, overrides=more)
    out, ours, base = (rows_of(tmp_path / name) for name in ("out", "here", "base"))
    for a, b, c in zip(out, ours, base, strict=True):
        torch.testing.assert_close(a.states.features, b.states.features, atol=1e-4, rtol=0)
        assert len(c.sample) < 8 or (a.states.features - c.states.features).abs().max() > 0.01


def test_a_running_server_with_another_adapter_or_none_is_refused(fake, run_of, folder_of, lora, tmp_path):
    adapter, server = lora(folder_of("llama")), fake(adapter="ab" * 20)
    with server.listening() as url:
        with pytest.raises(BadInput, match=f"serves .*, not {adapter.name}"):
            served(run_of(), tmp_path / "out", url, overrides=[f"target.adapter={adapter}"])
        with pytest.raises(BadInput, match="gives states with adapter abab.*, not None"):
            served(run_of(), tmp_path / "out", url)
        server.names.append(adapter.name)
        with pytest.raises(BadInput, match=rf"gives states with adapter abab.*, not {adapter} \([0-9a-f]+\)"):
            served(run_of(), tmp_path / "out", url, overrides=[f"target.adapter={adapter}"])


def test_an_adapter_of_a_part_that_heads_share_is_refused_before_a_server_is_started(run_of, folder_of, lora, tmp_path):
    adapter = lora(folder_of("llama"), target_modules=["lm_head"])
    with pytest.raises(BadInput, match="lm_head.*: expected lora_A and lora_B of linear layers alone"):
        by_own(run_of(), tmp_path / "out", "no_python", overrides=[f"target.adapter={adapter}"])


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        (["(B pid=2) ERROR [b.py:7] ValueError: no model", "RuntimeError: see above"], "ValueError: no model"),
        (["torch.cuda.OutOfMemoryError: 24 GiB"], "OutOfMemoryError: 24 GiB"),
        (
            ["core.ValidationError: 1 validation error for Config", "  Value error, no such method [type=value_error]",
             "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"],
            "no such method",
        ),
    ],
    ids=["the first", "with its module", "of a setting"],
)  # fmt: skip
def test_a_server_that_does_not_start_is_quoted_and_its_log_named(log, quoted, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = ["(A pid=1) WARNING [a.py:1] beware of such as `OSError: x`", *log]
    (tmp_path / "python").write_text("\n".join(["#!/bin/sh", "cat <<'END'", *log, "END", "exit 1", ""]))
    (tmp_path / "python").chmod(0o755)
    broken = EngineSetting(name="vllm", python=str(tmp_path / "python")).process("T", log=tmp_path / "log")
    with pytest.raises(BadInput, match=f"vLLM ended with code 1: {quoted}$"), broken:
        pass
    unnamed = EngineSetting(name="vllm", python=str(tmp_path / "python")).process("T")
    with pytest.raises(BadInput, match=f"{quoted}; its log: /") as caught, unnamed:
        pass
    kept = Path(str(caught.value).rpartition(": ")[2])
    assert kept.read_text() == (tmp_path / "log").read_text() == "".join(f"{line}\n" for line in log), "it stays"
    nowhere = EngineSetting(name="vllm", python="nowhere").process("T", log=tmp_path / "log")
    with pytest.raises(BadInput, match="--engine-python nowhere: No such file"), nowhere:
        pass


@pytest.mark.slow
def test_a_killed_extraction_takes_its_server_with_it(python, run_of, tmp_path):
    run = run_of(num_rows=400)
    child = os.fork()
    if child == 0:
        ended(lambda: by_own(run, tmp_path / "out", python, shard_bytes=3000, batch_tokens=64))
    marker = str(tmp_path / "out" / "states")
    running = lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and marker in command_of(pid)]  # noqa: E731
    until = time.monotonic() + 240
    while not (running() and list((tmp_path / "out").glob("shard_*"))):
        assert time.monotonic() < until
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    until = time.monotonic() + 60
    while running() and time.monotonic() < until:
        time.sleep(0.05)
    assert not running()


def command_of(process):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""
