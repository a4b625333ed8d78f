"""One server for answers and states: started once, again where it ends, and given up in a line."""

import signal
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.served.state_server import Gone
from headstart.engines.servers.setting import EngineSetting
from headstart.scripts.unattended.running.journal import ServerTrial
from headstart.scripts.unattended.target_server import MOST_STARTS, TargetServer


@pytest.fixture
def server(python, tmp_path):
    """server(args): of a run, and what the run says."""

    def make(args="", engine="vllm"):
        said: list[str] = []
        journal = SimpleNamespace(serving=ServerTrial("", 0.1, [100.0]), unserved="", stateless="", answers_until=60.0)
        settings = SimpleNamespace(
            engine=EngineSetting(name=engine, python=python, args=args),
            target="T",
            max_new_tokens=12,
            budget=60.0,
            adapter="",
        )
        run: Any = SimpleNamespace(
            settings=settings,
            journal=journal,
            folder=tmp_path,
            clock=SimpleNamespace(used=0.0, left=60.0),
            left_until=lambda _: 60.0,
            say=lambda line, **_: said.append(line),
            write=lambda: None,
            check_stop=lambda: None,
        )
        return TargetServer(run, list, least=8), said

    return make


@pytest.fixture
def plain(monkeypatch):
    """Servers that are asked for states are started as for answers alone, which takes less time."""
    monkeypatch.setattr(TargetServer, "stating", TargetServer.plain)


def url_in(words):
    return next(word for word in words if word.startswith("engine.server=")).removeprefix("engine.server=")


def is_up(url):
    with urllib.request.urlopen(f"{url}/health") as response:
        return response.status == 200


def test_one_server_answers_and_gives_states(server, plain):
    with server()[0] as one:
        asked, learnt = one.answering(), one.training()
        url = url_in(asked)
        assert asked[:2] == learnt[:2] == ["engine.name=vllm", f"engine.server={url}"] and is_up(url)
        assert "train.decode_prompts=0" in learnt and one.keep()
    with pytest.raises(OSError, match="refused"):
        is_up(url)


def test_a_server_that_ends_is_started_again_at_its_address(server, plain):
    one, said = server()
    with one:
        url = url_in(one.training())
        one.process.process.send_signal(signal.SIGKILL)
        one.process.process.wait()
        assert one.keep() and is_up(url) and url_in(one.training()) == url
        assert said[-1].endswith("ended with code -9: its log is empty: it is started again")


def test_a_server_that_ends_again_and_again_is_given_up(server, plain):
    one, said = server()
    with one:
        one.training()
        kept = list[bool]()
        while not kept or kept[-1]:
            one.process.process.kill()
            one.process.process.wait()
            kept.append(one.keep())
        assert len(kept) == MOST_STARTS and said[-1].endswith("our own engine runs the target")
        assert one.run.journal.unserved.startswith("vLLM ended with code -9")
        assert one.training() == one.answering() == []


def test_a_server_that_gives_no_states_answers_all_the_same(server, monkeypatch):
    def refuses(_):
        raise BadInput("vLLM ended with code 1: ValueError: this target's states share a cache with others")

    monkeypatch.setattr(TargetServer, "stating", refuses)
    one, said = server()
    with one:
        assert is_up(url_in(one.answering())) and one.training() == []
    assert "no states from the server: vLLM ended" in said[-1] and "share a cache" in one.run.journal.stateless


def test_another_engine_answers_and_our_own_trains(server):
    one, _ = server(engine="sglang")
    with one:
        assert is_up(url_in(one.answering())) and one.training() == []


def test_a_training_whose_server_is_given_up_is_run_again_without_it(server, plain):
    one, _ = server()
    ran = []

    def step(what, arguments, *, meanwhile=None, **how):
        ran.append(arguments)
        if meanwhile is not None:
            one.give_up("it is gone")
            assert not meanwhile()
        return SimpleNamespace(stopped=False)

    one.run.step = step
    with one:
        one.train("learning", ["train", "config"], name="learn", seconds=1.0, until=None)
    assert ran[0][2:4] == ["engine.name=vllm", next(word for word in ran[0] if "server" in word)]
    assert ran[1:] == [["train", "config"]]


@pytest.mark.parametrize("ends", ["never", "once", "always", "not right"])
def test_what_reads_by_the_server_reads_again_where_that_has_ended(ends, server, plain, monkeypatch):
    one, said = server()

    def opened(server):
        if ends == "not right":
            raise BadInput("has another tokenizer")
        return "bare"

    def find(target):
        read.append(target)
        if target == "bare" and (ends == "always" or (ends == "once" and len(read) == 1)):
            one.process.process.kill()
            one.process.process.wait()
            raise Gone("vLLM ended")
        return f"by {target}"

    monkeypatch.setattr(TargetServer, "target", opened)
    read = list[str]()
    with one:
        found = one.reading(find, lambda: "whole")
        assert (one.process is None) == (found == "by whole"), "beside the whole target no server takes memory"
    nums = {"never": 1, "once": 2, "always": MOST_STARTS, "not right": 0}
    assert read == ["bare"] * nums[ends] + ["whole"] * (found == "by whole")
    assert found == ("by bare" if ends in ("never", "once") else "by whole")
    assert ends != "not right" or said[-1] == "no states from the server: has another tokenizer"


def test_what_the_run_itself_finds_wrong_ends_it(server, plain, monkeypatch):
    monkeypatch.setattr(TargetServer, "target", lambda server: "bare")

    def find(target):
        raise BadInput("--budget: too short")

    with server()[0] as one, pytest.raises(BadInput, match="--budget: too short"):
        one.reading(find, lambda: "whole")
