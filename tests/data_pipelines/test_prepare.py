"""Prepared data has each conversation once, on one side of the split, whole or not at all, with a card that adds up."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from chats import chat, turns
from headstart.base.errors import BadInput
from headstart.base.files import replacing, unfinished_name
from headstart.base.jsonl import read_jsonl
from headstart.base.owned import LOCK, MARKER
from headstart.configs.loader import build, read_config
from headstart.data_pipelines import dataset_card
from headstart.data_pipelines.prepare import PrepareConfig, prepare, prepared_before
from headstart.data_pipelines.rows import parallel
from headstart.scripts.data.prepare import prepare as command
from typer import Typer
from typer.testing import CliRunner

NUM_ROWS = 200


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with chats.jsonl: 200 chats with an id each."""
    monkeypatch.chdir(tmp_path)
    write("chats.jsonl", [chat(f"How much is {i} and {i}?", f"It is {2 * i}.", id=i) for i in range(NUM_ROWS)])
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(**settings: Any) -> dict[str, Any]:
    return asdict(prepare(build(PrepareConfig, {"sources": ["chats.jsonl"], "output": "out", **settings})))


def split(name: str, output: str = "out") -> list[dict[str, Any]]:
    path = Path(output, f"{name}.jsonl")
    return read_jsonl(path) if path.stat().st_size else []


def both(output: str = "out") -> list[dict[str, Any]]:
    return split("train", output) + split("validation", output)


REQUEST = {"model": "m", "messages": [{"role": "user", "content": "How far?"}], "reasoning_effort": "low"}
CHOICE = {"message": {"role": "assistant", "content": "Two miles."}, "finish_reason": "stop"}
LOGS = {
    "request and response": {"request": REQUEST, "response": {"choices": [CHOICE]}},
    "bodies as text": {"request_body": json.dumps(REQUEST), "response_body": json.dumps({"choices": [CHOICE]})},
    "a batch's": {"custom_id": "7", "body": REQUEST, "response": {"body": {"choices": [CHOICE]}}},
    "joined text": {"request": REQUEST, "response": "Two miles."},
}


@pytest.mark.parametrize("row", LOGS.values(), ids=LOGS)
def test_a_row_of_a_servers_log_is_a_chat_and_its_question_can_be_excluded(row: dict[str, Any]) -> None:
    write("log.jsonl", [row])
    run(sources=["log.jsonl"], validation_share=0)
    [chat_] = split("train")
    assert chat_["messages"] == chat("How far?", "Two miles.")["messages"]
    assert chat_["chat_template_kwargs"] == {"reasoning_effort": "low"}
    write("asked.jsonl", [{"request": REQUEST}])
    with pytest.raises(BadInput, match="no row is left for training: 1 read, 1 "):
        run(sources=["log.jsonl"], exclude=["asked.jsonl"], validation_share=0, output="others")


def test_a_log_without_answers_has_prompts_alone_and_a_response_of_no_known_shape_is_counted() -> None:
    write("log.jsonl", [{"request": REQUEST}, {"request": REQUEST, "response": {"choices": [{"message": 5}]}}])
    card = run(sources=["log.jsonl"], validation_share=0, filters={"require_answer": False})
    assert [turn["role"] for turn in split("train")[0]["messages"]] == ["user"]
    assert card["dropped"] == {"malformed": 1}


def test_rows_are_written_with_an_id_of_the_row_alone_its_source_and_its_own_id() -> None:
    run(validation_share=0)
    rows = split("train")
    assert [row["source_id"] for row in rows] == [str(i) for i in range(NUM_ROWS)]
    ids = {row["source_id"]: row["id"] for row in rows}
    assert rows[3] == {"id": ids["3"], "source": "chats.jsonl", "source_id": "3"} | chat(
        "How much is 3 and 3?", "It is 6."
    )
    assert len(set(ids.values())) == NUM_ROWS and all(len(row["id"]) == 32 for row in rows)
    write("moved.jsonl", read_jsonl("chats.jsonl")[50:10:-1])
    run(sources=["moved.jsonl"], output="again")
    assert all(ids[row["source_id"]] == row["id"] for row in both("again"))


def test_equal_conversations_are_kept_once_whatever_their_shape_and_source() -> None:
    write("again.jsonl", [{"instruction": "How much is 3  and 3?", "output": "it is 6."}, chat("New?", "Yes.")])
    write("other.jsonl", [chat("How much is 3 and 3?", "It is six.")])
    card = run(sources=["chats.jsonl", "again.jsonl", "other.jsonl"], validation_share=0)
    assert card["sources"]["again.jsonl"] == {"read": 2, "kept": 1, "dropped": {"duplicate": 1}}
    assert card["sources"]["other.jsonl"]["kept"] == 1
    assert card["examples"] == {"duplicate": ["again.jsonl:1"]}


GREETING = {"role": "assistant", "content": "Hello!"}
BEFORE = [[], [GREETING], turns(system="Be kind."), [*turns(system="Be kind."), GREETING]]  # the first question


def test_the_split_is_by_question_and_does_not_depend_on_order_or_other_rows() -> None:
    run(validation_share=0.3)
    side = {row["source_id"]: name for name in ("train", "validation") for row in split(name)}
    assert 30 < list(side.values()).count("validation") < 90
    answered = [chat(f"How much is {i} and {i}?", "No idea.", id=i) for i in reversed(range(0, NUM_ROWS, 2))]
    answered = [{**row, "messages": [*before, *row["messages"]]} for row in answered for before in BEFORE]
    write("answered.jsonl", answered)
    run(sources=["answered.jsonl"], output="again", validation_share=0.3)
    for name in ("train", "validation"):
        assert all(side[row["source_id"]] == name for row in split(name, "again"))
    run(output="more", validation_share=0.5)
    in_more = {row["source_id"] for row in split("validation", "more")}
    assert {number for number, name in side.items() if name == "validation"} < in_more, "a larger share adds rows"


def test_the_card_adds_up() -> None:
    write("bad.jsonl", [{"query": 1}, chat("Why?"), chat("Why?", " "), {"text": "\ud800 half"}, chat("Why?", "So.")])
    card = run(sources=["chats.jsonl", "bad.jsonl"], validation_share=0.1)
    assert card["read"] == NUM_ROWS + 5 == card["kept"] + sum(card["dropped"].values())
    dropped = {"empty_answer": 1, "half_character": 1, "malformed": 1, "no_answer": 1}
    assert card["dropped"] == card["sources"]["bad.jsonl"]["dropped"] == dropped
    assert card["examples"]["malformed"][0].startswith("bad.jsonl:1: unknown row shape with keys query")
    assert card["examples"]["empty_answer"] == ["bad.jsonl:3"]
    for name in ("train", "validation"):
        assert card["splits"][name] == {"rows": len(split(name))}
    assert card == json.loads(Path("out/card.json").read_text())


def test_excluded_questions_are_dropped_whatever_their_answer() -> None:
    write("eval.jsonl", [{"prompt": "how much is 5 and 5?"}, {"turns": ["How much is 6 and 6?", "And 7?"]}])
    card = run(exclude=["eval.jsonl"])
    assert card["dropped"] == {"excluded": 2}
    assert not {"5", "6"} & {row["source_id"] for row in both()}


@pytest.mark.slow
def test_workers_write_the_same_bytes() -> None:
    rows = [chat(f"{i}?", f"{i * i}. " * (i % 70)) for i in range(700)]
    write("many.jsonl", rows)
    run(sources=["many.jsonl"])
    run(sources=["many.jsonl"], output="again", num_workers=2)
    for name in ("train.jsonl", "validation.jsonl", "card.json"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes()


def test_an_interrupted_run_leaves_nothing(folder, monkeypatch):
    before = set(folder.iterdir())

    def fail(count: int) -> None:
        assert list(Path("out").glob(".train.jsonl.*.unfinished"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareConfig(sources="chats.jsonl", output="out"), on_rows=fail)
    assert set(folder.iterdir()) == before
    monkeypatch.setattr(parallel, "ROWS_AT_A_TIME", 64)
    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text() + "no JSON\n")
    with pytest.raises(BadInput, match=f"^chats.jsonl:{NUM_ROWS + 1}: not JSON"):
        run()
    assert set(folder.iterdir()) == before


def visible(folder: Path | str) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if path.name not in (MARKER, LOCK)}


DATA_SET = {"train.jsonl", "validation.jsonl", "card.json"}


def test_a_killed_run_is_not_taken_for_a_finished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill came when all rows were written, before the card was; another config may then use the folder."""
    child = os.fork()
    if not child:

        def killed(path: Path) -> Any:
            return os._exit(9) if path.name == "card.json" else replacing(path)

        monkeypatch.setattr(dataset_card, "replacing", killed)
        run(validation_share=0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert {"train.jsonl", "validation.jsonl"} <= visible("out")
    Path("out", unfinished_name("train.jsonl", 999999999)).write_text("half")
    card = run(validation_share=0.1)
    assert visible("out") == DATA_SET
    assert {name: {"rows": len(split(name))} for name in card["splits"]} == card["splits"]


def test_the_same_config_does_nothing_and_another_one_or_other_rows_are_refused() -> None:
    card = run(validation_share=0.1)
    stamps = {name: Path("out", name).stat().st_mtime_ns for name in visible("out")}
    assert run(validation_share=0.1, num_workers=2) == card
    assert {name: Path("out", name).stat().st_mtime_ns for name in visible("out")} == stamps
    with pytest.raises(BadInput, match=r"^out: was prepared with validation_share 0.1, now 0.2; give another"):
        run(validation_share=0.2)
    path = Path("chats.jsonl")
    path.write_text(path.read_text().replace("It is", "It's "))  # as many bytes
    with pytest.raises(BadInput, match=r"^out: was prepared from other rows: sha256 of chats.jsonl \w+, now \w+;"):
        run(validation_share=0.1)


def test_a_damaged_card_is_named_and_an_empty_folder_taken() -> None:
    Path("out").mkdir()
    run()
    Path("out/card.json").write_text("{}")
    with pytest.raises(BadInput, match=r"^out/card.json: damaged; give another output"):
        run()
    assert prepared_before(PrepareConfig(sources="chats.jsonl", output="new")) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sources": []}, "no data source is given"),
        ({"sources": ["gone.jsonl"]}, "gone.jsonl: no such file"),
        ({"sources": ["chats.jsonl", "chats.jsonl"]}, "sources: two are named chats.jsonl; give each its own `name`"),
        ({"validation_share": 1.0}, "validation_share 1.0: expected 0 or more, below 1"),
        ({"num_workers": 0}, "num_workers 0: expected at least 1"),
        ({"tokenizer": "./gone"}, "tokenizer ./gone: cannot be loaded: "),
        ({"output": "chats.jsonl"}, "chats.jsonl: a file, not a folder"),
        ({"output": "chats.jsonl/new"}, "chats.jsonl/new: chats.jsonl is a file, not a folder"),
        ({"filters": {"min_characters": 1000}}, "no row is left for training: 200 read, 200 short; for example chats."),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(settings: dict[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(BadInput) as caught:
        run(**settings)
    assert problem in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["chats.jsonl"]


def test_rows_with_one_question_cannot_be_split() -> None:
    """Their documents are in the system prompts; the question's hash puts all on one side."""
    write("one.jsonl", [{"messages": turns("Sum it up.", f"It is {i}.", system=f"Text {i}")} for i in range(9)])
    for share in (0.01, 0.99):
        with pytest.raises(BadInput, match="^all 9 rows .* ask the same first question, .*validation_share=0"):
            run(sources=["one.jsonl"], validation_share=share)
    assert run(sources=["one.jsonl"], validation_share=0)["splits"]["train"]["rows"] == 9


def test_the_shipped_config_is_the_default() -> None:
    raw = read_config("data/prepare.yaml", ["sources=[a.jsonl]", "output=out"])
    assert build(PrepareConfig, raw) == PrepareConfig(sources=["a.jsonl"], output="out")


def test_the_command_shows_what_was_kept_and_dropped() -> None:
    app = Typer()
    app.command()(command)
    write("bad.jsonl", [chat("Why?", "So.", truncated=True)])
    line = "data/prepare.yaml sources=[chats.jsonl,bad.jsonl] output=out validation_share=0.1"
    first, again = (CliRunner().invoke(app, shlex.split(line)) for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.output
    assert "1 truncated" in first.output and "train: " in first.output and "written to out" in first.output
    assert again.output.startswith("nothing to do: out was prepared by this config")
    refused = CliRunner().invoke(app, shlex.split(line.replace("0.1", "0.2")))
    assert isinstance(refused.exception, BadInput)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rows() -> None:
    """80 MB of text, judged in less than it."""
    with Path("large.jsonl").open("w") as file:
        for i in range(40_000):
            file.write(json.dumps(chat(f"What comes after {i}?", f"{i} and {i + 1} " * 120)) + "\n")
    script = (
        "from headstart.data_pipelines.prepare import *\n"
        "import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "limits = FilterConfig(max_repeated_words=None)\n"
        "prepare(PrepareConfig(sources='large.jsonl', output='out', filters=limits))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 30e6 < os.path.getsize("large.jsonl")
