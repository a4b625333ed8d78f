"""Every row is answered once, as its source says, at the turns that are asked; a run that stops anywhere ends as if it
had not stopped."""

import hashlib
import json
import os
from functools import partial

import pytest
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_jsonl
from headstart.configs.loader import build, read_config, shipped
from headstart.data_pipelines.answers.conversations import Answer, Failure, SamplingConfig, exchanges
from headstart.data_pipelines.answers.dispatch import by_threads, in_batches
from headstart.data_pipelines.answers.regenerate import RegenerateConfig, regenerate
from headstart.data_pipelines.rows.sources import Row
from headstart.targets.chat.messages import script_of


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def answered(request):
    """An answer that depends on all that was asked, and on nothing else."""
    asked = json.dumps([request.messages, request.seed, vars(request.sampling)])
    text = hashlib.sha256(asked.encode()).hexdigest()[:12]
    is_cut = request.messages[-1]["content"].startswith("tell me all")
    return Answer(assistant(text), "length" if is_cut else "stop", len(request.messages), 5)


THREADS = partial(by_threads, answer=answered, num_threads=3)
BATCHES = partial(in_batches, answer=lambda requests: [answered(one) for one in requests], batch_size=4)
WAYS = pytest.mark.parametrize("answers", [THREADS, BATCHES], ids=["threads", "batches"])


@pytest.fixture
def configured(tmp_path):
    """configured(rows, key=value ...): a RegenerateConfig on these rows."""

    def make(rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        raw = {"sources": str(path), "output": str(tmp_path / "out"), "target": "tiny", **keys}
        return build(RegenerateConfig, raw)

    return make


def rows_of(config):
    with open(f"{config.output}/answers.jsonl") as file:
        return [json.loads(line) for line in file]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in os.listdir(folder) if name[0] != "."}


@WAYS
def test_each_new_answer_stands_in_the_history_of_the_next(answers, configured):
    config = configured([{"id": "r", "messages": [user("a"), assistant("old"), user("b"), assistant("old")]}])
    seen = []

    def spy(request):
        seen.append(request)
        return answered(request)

    if answers is THREADS:
        regenerate(config, partial(by_threads, answer=spy, num_threads=1))
    else:
        regenerate(config, partial(in_batches, answer=lambda requests: [spy(one) for one in requests], batch_size=2))
    [row] = rows_of(config)
    assert [message["content"] for message in row["messages"]][::2] == ["a", "b"]
    assert seen[1].messages == row["messages"][:3] and "old" not in json.dumps(row)
    assert seen[0].seed != seen[1].seed
    assert (row["source_id"], row["num_turns_left"], row["target"]) == ("r", 0, "tiny")
    assert row["usage"] == {"prompt_tokens": 1 + 3, "completion_tokens": 10}


def test_an_answer_that_was_cut_ends_its_conversation_and_is_flagged(configured):
    config = configured([{"turns": ["a", "tell me all", "b"]}, {"prompt": "c"}])
    summary = regenerate(config, THREADS)
    [cut, whole] = rows_of(config)
    assert cut["truncated"] and cut["finish_reason"] == "length"
    assert (cut["num_turns_left"], len(cut["messages"])) == (1, 4)
    assert not whole["truncated"]
    assert (summary.counts.answered, summary.counts.truncated) == (2, 1)


# keys and sampling


def test_several_samples_of_a_prompt_have_a_seed_each(configured, tmp_path):
    config = configured([{"prompt": "a"}, {"prompt": "b"}], sampling={"num_samples": 2, "top_p": 0.9, "thinking": True})
    regenerate(config, THREADS)
    rows = rows_of(config)
    asked = [(row["messages"][0]["content"], row["sample"]) for row in rows]
    assert asked == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len({row["messages"][1]["content"] for row in rows}) == 4
    assert all(row["sampling"]["top_p"] == 0.9 and row["sampling"]["thinking"] for row in rows)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["settings"]["sampling"] == {str(tmp_path / "rows.jsonl"): rows[0]["sampling"]}
    assert manifest["rows"] == 2


def test_equal_rows_are_asked_once(configured):
    config = configured([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"id": 1, "prompt": "a"}])
    summary = regenerate(config, THREADS)
    assert [row["messages"][0]["content"] for row in rows_of(config)] == ["a", "b", "a"]
    assert (summary.rows, summary.duplicates, summary.counts.answered) == (4, 1, 3)


# stopping and going on

ROWS = [{"prompt": "x" * (7 * number % 5) + str(number)} for number in range(11)] + [{"turns": ["a", "b"]}]


class Stopped(BaseException):
    """Stands for a kill."""


@WAYS
@pytest.mark.parametrize("call", ["os.replace", "os.fsync", "pathlib.Path.unlink", "row"])
def test_stopped_at_every_step_it_goes_on_to_the_same_end(answers, call, configured, tmp_path, monkeypatch):
    whole = configured(ROWS, output=str(tmp_path / "whole"))
    regenerate(whole, answers)
    config, reached = configured(ROWS), []

    def stopping(real, step):
        def at(*args, **kwargs):
            reached.append(step)
            if len(reached) == step:
                raise Stopped
            return real(*args, **kwargs)

        return at

    def in_steps(conversations, *, is_done, step):
        for outcome in answers(conversations, is_done=is_done):
            stopping(lambda: None, step)()
            yield outcome

    for step in range(1, 40):
        reached.clear()
        with monkeypatch.context() as patch:
            if call != "row":
                owner, name = call.rsplit(".", 1)
                patch.setattr(call, stopping(getattr(os if owner == "os" else __import__("pathlib").Path, name), step))
            way = partial(in_steps, step=step) if call == "row" else answers
            try:
                regenerate(config, way)
                break
            except Stopped:
                pass
    assert step > 1, "it was stopped at least once"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@WAYS
def test_a_row_cut_anywhere_is_asked_again_and_no_other(answers, configured, tmp_path):
    whole = configured(ROWS, output=str(tmp_path / "whole"))
    regenerate(whole, answers)
    lines = (tmp_path / "whole/answers.jsonl").read_bytes().splitlines(keepends=True)
    config, asked = configured(ROWS), []

    def failing(conversations, *, is_done):
        for key, _ in answers(conversations, is_done=is_done):
            asked.append(is_done(key))
            yield key, Failure("not now")

    regenerate(config, failing)
    for length in range(0, len(lines[4]), 37):
        (tmp_path / "out/answers.part.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:length])
        asked.clear()
        counts = regenerate(config, failing).counts
        assert counts.answered == 4 and asked.count(False) == len(ROWS) - 4
    regenerate(config, answers)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_line_before_the_last_is_named(configured, tmp_path):
    config = configured(ROWS)
    regenerate(config, lambda conversations, *, is_done: ((one.key, Failure("no")) for one in conversations))
    (tmp_path / "out/answers.part.jsonl").write_bytes(b'{"id": "a"}\n{"id": \n{"id": "b"}\n')
    with pytest.raises(BadInput, match=r"answers\.part\.jsonl:2: damaged"):
        regenerate(config, THREADS)


def test_a_finished_folder_is_left_as_it_is(configured, tmp_path):
    config = configured(ROWS)
    summary = regenerate(config, THREADS)
    before = contents(tmp_path / "out")

    def nobody(conversations, *, is_done):
        raise AssertionError("nothing is to be asked")

    assert regenerate(config, nobody) == summary and contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target": "other"}, "started with target tiny, now other"),
        ({"turns": "last"}, "turns all, now last"),
        ({"sampling": {"temperature": 0.5}}, r"sampling\..*rows\.jsonl\.temperature 1\.0, now 0\.5"),
        ({"engine": {"name": "openai", "server": "http://localhost:1"}}, "by engine, now openai"),
        ({"num_rows": 3}, "num_rows None, now 3"),
    ],
)
def test_a_folder_of_other_settings_is_refused(change, problem, configured, tmp_path):
    regenerate(configured(ROWS), THREADS)
    before = contents(tmp_path / "out")
    with pytest.raises(BadInput, match=problem):
        regenerate(configured(ROWS, **change), THREADS)
    assert contents(tmp_path / "out") == before


def test_a_folder_of_other_rows_or_of_something_else_is_refused(configured, tmp_path):
    regenerate(configured(ROWS), THREADS)
    with pytest.raises(BadInput, match=r"started with rows_sha256 "):
        regenerate(configured(ROWS[:-1]), THREADS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("dear diary")
    with pytest.raises(BadInput, match=r"mine: holds other files \(notes\.txt\)"):
        regenerate(configured(ROWS, output=str(tmp_path / "mine")), THREADS)
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_an_error_in_answering_stops_the_run_and_keeps_what_there_is(configured, tmp_path):
    def wrong(request):
        if request.messages[0]["content"].endswith("5"):
            raise BadInput("no such model")
        return answered(request)

    config = configured(ROWS)
    with pytest.raises(BadInput, match="no such model"):
        regenerate(config, partial(by_threads, answer=wrong, num_threads=1))
    assert len(read_jsonl(tmp_path / "out/answers.part.jsonl")) >= 3
    assert regenerate(config, THREADS).counts.answered == len(ROWS)


def test_text_that_is_no_unicode_does_not_spoil_the_file(configured):
    config = configured([{"prompt": "a"}])
    odd = Answer(assistant("half a smile \ud83d"), "stop")
    regenerate(config, partial(by_threads, answer=lambda request: odd, num_threads=1))
    [row] = read_jsonl(f"{config.output}/answers.jsonl")
    assert row["messages"][1]["content"] == "half a smile ?"


def test_the_shipped_configs_build():
    for path in shipped("data/regenerate_*.yaml"):
        config = build(RegenerateConfig, read_config(path, ["sources=x.jsonl", "output=y", "target=z"]))
        assert bool(config.engine.servers) == path.stem.endswith("server")
        assert f"data/{path.name}" in path.read_text(), "says its command"


SYSTEM, TOOL = {"role": "system", "content": "be brief"}, {"role": "tool", "content": "7"}
CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])


@pytest.mark.parametrize(
    ("messages", "every", "last"),
    [
        ([user("a")], [user("a"), None], [user("a"), None]),
        ([user("a"), assistant("b")], [user("a"), None], [user("a"), None]),
        (
            [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")],
            [SYSTEM, user("a"), None, user("c"), None],
            [SYSTEM, user("a"), assistant("b"), user("c"), None],
        ),
        (
            [user("a"), assistant("b"), user("c")],
            [user("a"), None, user("c"), None],
            [user("a"), assistant("b"), user("c"), None],
        ),
        ([user("a"), assistant("b"), assistant("c")], [user("a"), None], [user("a"), None]),
        ([SYSTEM, assistant("hi"), user("a")], [SYSTEM, assistant("hi"), user("a"), None], None),
        ([user("a"), CALL, TOOL, assistant("b")], [user("a"), CALL, TOOL, None], None),
        ([user("a"), CALL, TOOL], [user("a"), CALL, TOOL, None], None),
    ],
)
def test_the_turns_that_are_asked(messages, every, last):
    assert script_of(messages, turns="all") == every
    assert script_of(messages, turns="last") == (last or every)


@pytest.mark.parametrize(
    ("data", "questions"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"instruction": "a", "input": "b", "output": "c"}, ["a\n\nb"]),
        ({"instruction": "a", "input": ""}, ["a"]),
        ({"turns": ["a", "b"]}, ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
    ],
)
def test_every_shape_of_a_prompt_is_read(data, questions):
    [one] = exchanges(Row(data, "x:1"), SamplingConfig(), turns="all")
    assert one.script == [message for text in questions for message in (user(text), None)]
    assert one.source_id == "x:1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"text": "a"}, "x:1: no prompt among the keys text"),
        ({"messages": [SYSTEM]}, "x:1: no user turn to answer"),
        ({"messages": [assistant("a")]}, "x:1: no user turn to answer"),
        ({"prompt": 3}, "x:1: `prompt` should be text"),
        ({"turns": []}, "x:1: `turns` should be a list"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(data, problem):
    with pytest.raises(BadInput, match=problem):
        list(exchanges(Row(data, "x:1"), SamplingConfig(), turns="all"))


def test_a_key_depends_on_all_that_an_answer_depends_on():
    def keys(data, *, turns="all", **sampling):
        return {one.key for one in exchanges(Row(data, "x:1"), SamplingConfig(**sampling), turns=turns)}

    data = {"id": 1, "messages": [user("a"), assistant("b"), user("c")]}
    base = keys(data)
    others = [
        keys({**data, "id": 2}),
        keys({**data, "messages": [user("A"), *data["messages"][1:]]}),
        keys({**data, "tools": [{"type": "function"}]}),
        keys(data, turns="last"),
        *(keys(data, **{name: value}) for name, value in {"temperature": 0.5, "seed": 1, "thinking": True}.items()),
    ]
    assert len(base.union(*others)) == 1 + len(others)
    changed = {**data, "messages": [user("a"), assistant("other"), user("c")], "note": "x"}
    assert keys(changed) == base, "an answer that is asked anew says nothing about the row"
    assert len(keys(data, num_samples=3)) == 3
