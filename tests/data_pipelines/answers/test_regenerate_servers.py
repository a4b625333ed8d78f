"""Real HTTP servers that drop, stall, refuse and garble: every row is answered once, or named with the reason."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import yaml
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build, read_config
from headstart.data_pipelines.answers import client as client_module
from headstart.data_pipelines.answers.regenerate import RegenerateConfig
from headstart.engines.neutral_sampling import NEUTRAL
from headstart.engines.servers.address import KEY_NAME
from openai_server import answered, regenerated, serving

KEY = "sk-never-to-be-seen"
RUN = """
import sys
from headstart.configs.loader import build, read_config
from headstart.data_pipelines.answers.regenerate import RegenerateConfig, regenerate
from headstart.scripts.data.served_answers import by_messages
config = build(RegenerateConfig, read_config(sys.argv[1], sys.argv[2:]))
regenerate(config, by_messages(config)[0])
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A failing server is left alone for little time."""
    monkeypatch.setattr(client_module, "FIRST_REST", 0.02)


@pytest.fixture
def configured(tmp_path):
    """configured(servers, key=value ..., num_rows=): a config file for a run on made-up rows, quick to try again."""

    def write(*servers, num_rows=24, **keys):
        rows = [{"prompt": f"question {number}"} for number in range(num_rows)]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        client = {"backoff": 0.01, "patience": 60, "timeout": 60, "concurrency": 4, **keys.pop("client", {})}
        sections = {
            "sources": str(tmp_path / "prompts.jsonl"),
            "output": str(tmp_path / "out"),
            "target": "tiny",
            "engine": {"name": "openai", "server": [getattr(server, "url", server) for server in servers]},
            "client": client,
            **keys,
        }
        path = tmp_path / "regenerate.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


def run(path, *overrides):
    return regenerated(build(RegenerateConfig, read_config(path, overrides)))


def contents(output):
    return {path.name: path.read_bytes() for path in output.iterdir() if path.name[0] != "."}


FAULTS = {
    "drops": "drop",
    "500": (500, {}, {"error": {"message": "out of memory"}}),
    "502": (502, {}, b"<html>Bad Gateway</html>"),
    "503": (503, {"Retry-After": "0"}, b""),
    "529": (529, {}, {"message": "overloaded"}),
    "429": (429, {"Retry-After": "0.05"}, {"error": "slow down"}),
    "no JSON": (200, {}, b'{"choices": [{"mess'),
    "other JSON": (200, {}, {"choices": []}),
    "a list": (200, {}, []),
    "text that is none": (200, {}, {"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}),
    "shorter than said": (200, {"Content-Length": "900"}, b'{"choices": []}'),
    "given up": answered({"messages": [], "seed": 0}, finish_reason="abort"),
}


def test_servers_are_asked_by_no_proxy_of_the_environment(configured, tmp_path, silent_proxy):
    with serving() as server:
        run(configured(server, num_rows=3, client={"patience": 0.5}))
    assert len(read_jsonl(tmp_path / "out" / "answers.jsonl")) == 3


def test_what_fails_once_is_asked_again(configured, tmp_path):
    """Each fault at the first attempt of two of the requests."""
    replies = [*FAULTS.values()]

    def first_time(server, body, attempt):
        number = int(body["messages"][0]["content"].split()[-1])
        return replies[number % len(replies)] if attempt == 1 else None

    with serving() as good:
        run(configured(good), f"output={tmp_path / 'good'}")
    with serving(first_time) as server:
        counts = run(configured(server, num_rows=24)).counts
    assert counts.answered == 24 and counts.failed == 0 and counts.completion_tokens == 24 * 5
    assert (tmp_path / "out/answers.jsonl").read_bytes() == (tmp_path / "good/answers.jsonl").read_bytes()


def test_a_server_that_stalls_is_not_waited_for(configured):
    over = threading.Event()

    def stall(server, body, attempt):
        if attempt == 1 and body["messages"][0]["content"].endswith("7"):
            over.wait(60)

    with serving(stall) as server:
        counts = run(configured(server, client={"timeout": 0.5})).counts
        assert counts.answered == 24, "before those that stalled ever came"
        over.set()
    assert sum(num > 1 for num in server.attempts.values()) >= 2, "rows 7 and 17 were asked again"


def test_no_more_requests_at_a_time_than_asked_for(configured):
    with serving(delay=0.1) as first, serving(delay=0.1) as second:
        run(configured(first, second, num_rows=40, client={"concurrency": 5}))
    assert first.most_at_once == second.most_at_once == 5, "both are kept busy, and no busier"
    assert 10 <= len(first.bodies) <= 30, "the work is shared"


@pytest.mark.slow
def test_a_server_that_is_away_is_left_alone_until_it_is_back(configured):
    with serving() as away:
        port = away.server_port
    with serving(delay=0.01) as alive, ThreadPoolExecutor() as pool:
        running = pool.submit(run, configured(alive, away, num_rows=400))
        while len(alive.bodies) < 40:
            time.sleep(0.01)
        with serving(port=port) as back:
            counts = running.result().counts
            assert len(back.bodies) > 100
    assert counts.answered == 400 and counts.failed == 0
    assert max(alive.attempts.values()) == 1, "no row was asked twice on account of the other server"


def test_a_server_that_says_when_is_not_asked_before(configured):
    with serving(
        lambda server, body, attempt: (429, {"Retry-After": "0.4"}, {}) if len(server.bodies) <= 4 else None
    ) as s:
        run(configured(s))
    pauses = [after - before for before, after in pairwise(s.times)]
    assert 0.35 < max(pauses) < 2.0


def test_what_a_server_refuses_is_named_and_asked_again_by_the_next_run(configured, tmp_path):
    refusal = 400, {}, {"error": {"message": "This model's context is 8 tokens,\nnot 9"}}
    broken = 500, {}, {"error": "no such luck"}
    kinds = {"question 3": refusal, "question 5": broken}
    with serving(lambda server, body, attempt: kinds.get(body["messages"][0]["content"])) as server:
        path = configured(server)
        counts = run(path).counts
        assert (counts.answered, counts.failed) == (22, 2)
        failed = read_jsonl(tmp_path / "out/failed.jsonl")
        assert [row["source_id"].rsplit(":")[-1] for row in failed] == ["4", "6"]
        address = server.url.removesuffix("/v1")
        assert failed[0]["problem"] == f"{address}: 400 Bad Request: This model's context is 8 tokens, not 9"
        assert failed[1]["problem"].endswith("no such luck (6 attempts)")
        asked = Counter(body["messages"][0]["content"] for body in server.bodies)
        assert (asked["question 3"], asked["question 5"], asked["question 1"]) == (1, 6, 1)
        kinds.clear()
        server.bodies.clear()
        counts = run(path).counts
        assert (counts.answered, counts.failed, len(server.bodies)) == (24, 0, 2)
        assert not (tmp_path / "out/failed.jsonl").exists()
        after = contents(tmp_path / "out")
        run(path, f"output={tmp_path / 'once'}")
        assert contents(tmp_path / "once") == after


@pytest.mark.parametrize(("status", "why"), [(401, f"; its key is read from {KEY_NAME}"), (404, "")])
def test_what_no_request_can_get_past_stops_the_run(status, why, configured, monkeypatch, tmp_path):
    monkeypatch.setenv(KEY_NAME, KEY)
    said = {"error": {"message": f"not with {KEY}"}}
    with serving(lambda server, body, attempt: (status, {}, said) if len(server.bodies) > 8 else None) as server:
        path = configured(server)
        with pytest.raises(BadInput, match=rf"{status} .*: not with \*\*\*{why}$"):
            run(path)
        assert len(server.bodies) < 24
        server.fault = lambda *_: None
        assert run(path).counts.answered == 24
        assert max(server.attempts.values()) <= 2
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
    assert not any(KEY.encode() in data for data in contents(tmp_path / "out").values())


def test_the_run_stops_where_no_server_answers_any_more(configured, tmp_path):
    with serving(lambda server, body, attempt: "drop" if len(server.bodies) > 5 else None) as server:
        path = configured(server, client={"patience": 0.5, "num_attempts": 1000})
        with pytest.raises(BadInput, match=r"no server has answered for 0\.5 s: http://127.*: connection lost"):
            run(path)
        server.fault = lambda *_: None
        assert run(path).counts.answered == 24
    with pytest.raises(BadInput, match="cannot be reached: .*Connection refused"):
        run(path)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"http://me:{KEY}@localhost/v1", r"engine\.server: a URL with a password"),
        (f"https://localhost/v1?key={KEY}", r"engine\.server: a URL with a password or parameters"),
        ("localhost:8000", r"engine\.server 'localhost:8000': expected a URL such as"),
        ("http://localhost:port", r"engine\.server: not a URL"),
    ],
)
def test_what_is_no_url_is_refused_without_repeating_a_secret(url, problem, configured):
    with pytest.raises(BadInput, match=problem) as caught:
        run(configured(url))
    assert KEY not in str(caught.value)


def test_a_request_says_how_to_sample_and_rows_what_the_template_was_told(configured, tmp_path):
    sampling = {"temperature": 0.3, "top_p": 0.9, "top_k": 20, "max_tokens": 77, "thinking": True}
    extra = {"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False, "effort": "low"}}
    with serving() as server:
        run(configured(server, num_rows=2, sampling=sampling, client={"extra_body": extra}))
    [one, other] = server.bodies
    kwargs = extra["chat_template_kwargs"]  # which win over the sampling's
    expected = NEUTRAL | {k: sampling[k] for k in ("temperature", "top_p", "top_k", "max_tokens")}
    expected |= {"return_token_ids": True, "skip_special_tokens": False}
    expected |= {"model": "tiny", "min_p": 0.1, "chat_template_kwargs": kwargs}
    assert {key: one[key] for key in one if key not in ("messages", "seed")} == expected
    assert one["seed"] != other["seed"]
    [row, _] = read_jsonl(tmp_path / "out/answers.jsonl")
    assert row["chat_template_kwargs"].pop("strftime_now") and row["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_and_tool_calls_are_kept(key, configured, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    more = {key: "let me see", "content": None, "tool_calls": [call], "refusal": None}
    with serving(lambda server, body, attempt: answered(body, finish_reason="tool_calls", **more)) as server:
        run(configured(server, num_rows=1))
    [row] = read_jsonl(tmp_path / "out/answers.jsonl")
    call = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert row["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "let me see",
        "tool_calls": [call],
    }
    assert row["finish_reason"] == "tool_calls" and not row["truncated"]


def killed_and_resumed(path, server, *, num_kills, source):
    """Starts the run again and again, each killed after another number of answers; then lets it finish."""
    for _ in range(num_kills):
        enough = len(server.bodies) + source.randrange(12)
        running = subprocess.Popen([sys.executable, "-c", RUN, path], stderr=subprocess.PIPE)
        while len(server.bodies) < enough and running.poll() is None:
            time.sleep(0.001)
        time.sleep(source.random() * 0.02)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    done = subprocess.run([sys.executable, "-c", RUN, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("num_kills", "num_rows"),
    [
        pytest.param(3, 60, id="3 kills", marks=pytest.mark.slow),
        pytest.param(20, 300, id="20 kills", marks=pytest.mark.soak),
    ],
)  # fast: a row cut anywhere is asked again, in test_regenerate.py
def test_killed_at_random_points_it_ends_as_if_it_had_not_been(num_kills, num_rows, configured, tmp_path):
    fault = None
    if num_kills == 3:
        fault = lambda server, body, attempt: "drop" if attempt == 1 and body["seed"] % 7 == 0 else None  # noqa: E731
    with serving(fault, delay=0.004) as server:
        patient = {"timeout": 60, "patience": 120}  # a busy machine is no failure of the server
        path = configured(server, num_rows=num_rows, output=str(tmp_path / "killed"), client=patient)
        killed_and_resumed(path, server, num_kills=num_kills, source=random.Random(num_kills))
        num_asked = len(server.bodies)
        run(path, f"output={tmp_path / 'whole'}")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert set(contents(tmp_path / "whole")) == {"answers.jsonl", "manifest.json"}
    rows = read_jsonl(tmp_path / "killed/answers.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [f"question {i}" for i in range(num_rows)]
    if fault is None:  # asked again are only those that were under way at a kill: 4 threads, 4 more in their queue
        assert num_rows <= num_asked <= num_rows + 8 * num_kills


def test_servers_need_the_openai_package(configured, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(BadInput, match=r"needs the openai package: pip install openai$"):
        run(configured("http://localhost:1/v1"))


@pytest.mark.parametrize("key", ["sk-secret\nline", "sk-secret line", "sk-secrét"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key, configured, monkeypatch):
    monkeypatch.setenv(KEY_NAME, key)
    with serving() as server, pytest.raises(BadInput, match=f"^{KEY_NAME}: has a line break") as caught:
        run(configured(server))
    assert "secr" not in str(caught.value) and not server.bodies
