"""One server for answers and states: started once, again where it ends, and at last the run ends in a line."""

import signal
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.data_pipelines.served.state_server import Gone
from headstart.engines.servers.setting import EngineSetting
from headstart.scripts.unattended import target_server
from headstart.scripts.unattended.running.journal import ServerTrial
from headstart.scripts.unattended.target_server import MOST_STARTS, TargetServer


@pytest.fixture
def server(python, tmp_path):
    """server(args): of a run, and what the run says."""

    def make(args="", engine="vllm"):
        said, ran = list[str](), list[list[str]]()
        journal = SimpleNamespace(serving=ServerTrial("", 0.1, [100.0]), stateless="", answers_until=60.0)
        settings = SimpleNamespace(
            engine=EngineSetting(name=engine, python=python, args=args),
            target="T",
            dtype="float32",
            device="cpu",
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
            step=lambda what, arguments, **_: ran.append(arguments),
            ran=ran,
        )
        return TargetServer(run, list), said

    return make


@pytest.fixture
def plain(monkeypatch):
    """Servers that are asked for states are started as for answers alone, which takes less time."""
    monkeypatch.setattr(TargetServer, "stating", TargetServer.plain)


def url_in(words):
    return next(word for word in words if word.startswith("engine.server=")).removeprefix("engine.server=")


def trained(server):
    """What a training is told by the server."""
    server.train("learning", ["train", "config"], name="learn", seconds=1.0, until=None)
    return server.run.ran[-1][2:]


def is_up(url):
    with urllib.request.urlopen(f"{url}/health") as response:
        return response.status == 200


def ended(server):
    """The server is killed."""
    server.process.process.send_signal(signal.SIGKILL)
    server.process.process.wait()


def test_one_server_answers_and_gives_states(server, plain):
    with server()[0] as one:
        asked, learnt = one.answering(), trained(one)
        url = url_in(asked)
        assert asked[:2] == learnt[:2] == ["engine.name=vllm", f"engine.server={url}"] and is_up(url)
        assert "train.decode_prompts=0" in learnt and one.keep()
    with pytest.raises(OSError, match="refused"):
        is_up(url)


def test_a_server_that_ends_is_started_again_at_its_address_a_few_times(server, plain):
    one, said = server()
    with one:
        url = url_in(one.answering())
        for _ in range(MOST_STARTS - 1):
            ended(one)
            assert one.keep() and is_up(url) and url_in(trained(one)) == url
            assert said[-1].endswith("ended with code -9: its log is empty: it is started again")
        ended(one)
        assert not one.keep(), "the command that asks it is stopped"
        with pytest.raises(BadInput, match="^vLLM ended with code -9: its log is empty$"):
            trained(one)


def test_a_server_that_gives_no_states_answers_all_the_same(server, monkeypatch):
    def refuses(_):
        raise BadInput("vLLM ended with code 1: ValueError: this target's states share a cache with others")

    monkeypatch.setattr(TargetServer, "stating", refuses)
    one, said = server()
    with one:
        assert is_up(url_in(one.answering())) and trained(one) == []
        assert one.process is None, "beside a training with all layers no server takes memory"
    assert any("no states from the server: vLLM ended" in line for line in said)
    assert "share a cache" in one.run.journal.stateless


def test_another_engine_answers_and_our_own_trains(server):
    one, _ = server(engine="sglang")
    with one:
        assert is_up(url_in(one.answering())) and trained(one) == []


@pytest.mark.parametrize("ends", ["never", "once", "always", "at first", "not right"])
def test_what_reads_by_the_server_reads_again_where_that_has_ended(ends, server, plain, monkeypatch):
    one, said = server()

    class Target(SimpleNamespace):
        def attach(self, *_):
            if ends == "not right":
                raise BadInput("has another tokenizer")
            if ends == "at first" and one.num_starts == 1:
                ended(one)
                raise Gone("vLLM ended")

        def to(self, _):
            return "bare"

    def find(target):
        read.append(target)
        if target == "bare" and (ends == "always" or (ends == "once" and len(read) == 1)):
            ended(one)
            raise Gone("vLLM ended")
        return f"by {target}"

    read, stub = list[str](), SimpleNamespace(read=lambda _: Target(adapter=None))
    monkeypatch.setattr(target_server, "ServedTarget", stub)
    monkeypatch.setattr(target_server, "StateServer", lambda *_, **__: None)
    monkeypatch.setattr(target_server, "layers_read", lambda *_: [])
    one.run.load_target = lambda: "whole"
    with one:
        if ends == "always":
            with pytest.raises(BadInput, match="vLLM ended with code -9"):
                one.reading(find)
        else:
            assert one.reading(find) == ("by whole" if ends == "not right" else "by bare")
        assert ends != "not right" or one.process is None, "beside the whole target no server takes memory"
    nums = {"never": 1, "once": 2, "always": MOST_STARTS, "at first": 1, "not right": 0}
    assert read == ["bare"] * nums[ends] + ["whole"] * (ends == "not right")
    assert ends != "not right" or said[-1] == "no states from the server: has another tokenizer"


def test_what_the_run_itself_finds_wrong_ends_it(server, plain, monkeypatch):
    monkeypatch.setattr(TargetServer, "target", lambda server: "bare")

    def find(target):
        raise BadInput("--budget: too short")

    with server()[0] as one, pytest.raises(BadInput, match="--budget: too short"):
        one.reading(find)
