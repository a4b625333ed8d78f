"""Prepared data has each conversation once, on one side of the split, whole or not at all, with a card that adds up."""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from chats import chat
from headstart.configs.errors import BadInput
from headstart.configs.files import replacing
from headstart.configs.jsonl import read_jsonl
from headstart.configs.loader import build, read_config
from headstart.configs.owned import LOCK, MARKER
from headstart.data_pipelines import dataset_card, parallel
from headstart.data_pipelines.digests import Digests
from headstart.data_pipelines.prepare import PrepareConfig, prepare, prepared_before
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


def test_rows_are_written_with_id_source_and_their_own_id() -> None:
    run(validation_share=0)
    rows = split("train")
    assert [row["source_id"] for row in rows] == [str(i) for i in range(NUM_ROWS)]
    assert rows[3] == {"id": rows[3]["id"], "source": "chats.jsonl", "source_id": "3"} | chat(
        "How much is 3 and 3?", "It is 6."
    )
    assert len({row["id"] for row in rows}) == NUM_ROWS and all(len(row["id"]) == 32 for row in rows)


def test_ids_depend_on_the_row_alone() -> None:
    run()
    rows = read_jsonl("chats.jsonl")
    random.Random(0).shuffle(rows)
    write("moved.jsonl", rows[:50])
    run(sources=["moved.jsonl"], output="again")
    ids = {row["source_id"]: row["id"] for row in both()}
    assert all(ids[row["source_id"]] == row["id"] for row in both("again"))


def test_equal_conversations_are_kept_once_whatever_their_shape_and_source() -> None:
    write("again.jsonl", [{"instruction": "How much is 3  and 3?", "output": "it is 6."}, chat("New?", "Yes.")])
    write("other.jsonl", [chat("How much is 3 and 3?", "It is six.")])
    card = run(sources=["chats.jsonl", "again.jsonl", "other.jsonl"], validation_share=0)
    assert card["sources"]["again.jsonl"] == {"read": 2, "kept": 1, "dropped": {"duplicate": 1}}
    assert card["sources"]["other.jsonl"]["kept"] == 1
    assert card["examples"] == {"duplicate": ["again.jsonl:1"]}


@pytest.mark.parametrize(("once", "kept"), [("conversation", 3), ("prompt", 2), ("none", 4)])
def test_what_is_kept_once_can_be_chosen(once: str, kept: int) -> None:
    write("some.jsonl", [chat("Hi?", "Yes."), chat("Hi?", "No."), chat("Ho?", "Yes."), chat("hi?", "yes.")])
    assert run(sources=["some.jsonl"], once=once, validation_share=0)["kept"] == kept


def test_a_repeated_source_repeats_its_training_rows_and_no_validation_row() -> None:
    card = run(sources=[{"source": "chats.jsonl", "epochs": 3}], validation_share=0.2)
    train, validation = split("train"), split("validation")
    assert len(train) == 3 * (NUM_ROWS - len(validation)) and len({row["id"] for row in train}) == len(train)
    assert card["dropped"] == {"repeated_validation": 2 * len(validation)}


def test_the_split_is_by_prompt_and_does_not_depend_on_order_or_other_rows() -> None:
    run(validation_share=0.3)
    side = {row["source_id"]: name for name in ("train", "validation") for row in split(name)}
    assert 30 < list(side.values()).count("validation") < 90
    answered = [chat(f"How much is {i} and {i}?", "No idea.", id=i) for i in reversed(range(0, NUM_ROWS, 2))]
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
        content, counts, rows = Path("out", f"{name}.jsonl").read_bytes(), card["splits"][name], split(name)
        assert counts["sha256"] == sha256(content).hexdigest() and counts["bytes"] == len(content)
        turns = [turn for row in rows for turn in row["messages"]]
        assert (counts["rows"], counts["turns"]) == (len(rows), len(turns))
        assert counts["characters"] == sum(len(turn["content"]) for turn in turns)
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        assert counts["answer_characters"] == sum(len(turn["content"]) for turn in answers)
    assert card == json.loads(Path("out/card.json").read_text())


def test_the_readme_has_front_matter_that_loads_the_data(folder: Path) -> None:
    card = run(validation_share=0.1)
    text = Path("out/README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    [config] = front["configs"]
    files = {entry["split"]: str(folder / "out" / entry["path"]) for entry in config["data_files"]}
    loaded = pytest.importorskip("datasets").load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
    assert {name: len(rows) for name, rows in loaded.items()} == {
        name: card["splits"][name]["rows"] for name in ("train", "validation")
    }
    assert f"| chats.jsonl | {NUM_ROWS} | {NUM_ROWS} |" in text


def test_excluded_questions_are_dropped_whatever_their_answer() -> None:
    write("eval.jsonl", [{"prompt": "how much is 5 and 5?"}, {"turns": ["How much is 6 and 6?", "And 7?"]}])
    card = run(exclude=["eval.jsonl"])
    assert card["dropped"] == {"excluded": 2}
    assert not {"5", "6"} & {row["source_id"] for row in both()}


def test_workers_write_the_same_bytes() -> None:
    rows = [chat(f"{i}?", f"{i * i}. " * (i % 70)) for i in range(700)]
    write("many.jsonl", rows)
    run(sources=["many.jsonl"])
    run(sources=["many.jsonl"], output="again", num_workers=2)
    for name in ("train.jsonl", "validation.jsonl", "card.json"):
        assert Path("out", name).read_bytes() == Path("again", name).read_bytes()


def test_tokens_are_counted_by_the_tokenizer(saved_target: Path) -> None:
    write("words.jsonl", [{"text": " ".join(f"w{i}" for i in range(count))} for count in (2, 5, 9)])
    card = run(
        sources=["words.jsonl"],
        validation_share=0,
        tokenizer=str(saved_target),
        filters={"min_tokens": 3, "max_tokens": 8},
    )
    assert card["dropped"] == {"few_tokens": 1, "many_tokens": 1}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_leaves_nothing(
    error: type[BaseException], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(folder.iterdir())

    def fail(count: int) -> None:
        assert list(Path("out").glob(".train.jsonl.*.unfinished"))
        raise error

    with pytest.raises(error):
        prepare(PrepareConfig(sources="chats.jsonl", output="out"), on_rows=fail)
    assert set(folder.iterdir()) == before
    monkeypatch.setattr(parallel, "ROWS_AT_A_TIME", 64)
    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text() + "no JSON\n")
    with pytest.raises(BadInput, match=f"^chats.jsonl:{NUM_ROWS + 1}: not JSON"):
        run()
    assert set(folder.iterdir()) == before


def visible(folder: Path | str) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if path.name not in (MARKER, LOCK)}


DATA_SET = {"train.jsonl", "validation.jsonl", "card.json", "README.md"}


@pytest.mark.parametrize("last", ["README.md", "card.json"])
def test_a_killed_run_is_not_taken_for_a_finished_one(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill came when all rows were written, before the card was; another config may then use the folder."""
    child = os.fork()
    if not child:

        def killed(path: Path) -> Any:
            return os._exit(9) if path.name == last else replacing(path)

        monkeypatch.setattr(dataset_card, "replacing", killed)
        run(validation_share=0.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert {"train.jsonl", "validation.jsonl"} <= visible("out")
    Path("out/.train.jsonl.999999999.unfinished").write_text("half")
    card = run(validation_share=0.1)
    assert visible("out") == DATA_SET
    assert {name: len(split(name)) for name in card["splits"]} == {n: c["rows"] for n, c in card["splits"].items()}


def test_two_runs_do_not_share_a_folder() -> None:
    """The second one says who has it and touches nothing, whatever its config: no card beside another's rows."""
    inside: list[str] = []

    def second(count: int) -> None:
        before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
        with pytest.raises(BadInput, match=f"^out: in use by process {os.getpid()} on .* \\(headstart data prepare, "):
            run(validation_share=0.5)
        assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before
        inside.append("refused")

    card = prepare(PrepareConfig(sources="chats.jsonl", output="out", validation_share=0.1), on_rows=second)
    assert inside and card.config["validation_share"] == 0.1 and visible("out") == DATA_SET


def test_the_same_config_does_nothing_and_another_one_is_refused() -> None:
    card = run(validation_share=0.1)
    stamps = {name: Path("out", name).stat().st_mtime_ns for name in visible("out")}
    assert run(validation_share=0.1, num_workers=2) == card
    assert {name: Path("out", name).stat().st_mtime_ns for name in visible("out")} == stamps
    with pytest.raises(BadInput, match=r"^out: was prepared with validation_share 0.1, now it is 0.2; give another"):
        run(validation_share=0.2)
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps(chat("More?", "Yes.")) + "\n")
    with pytest.raises(
        BadInput, match=r"^out: chats.jsonl had sha256 \w+ when this was prepared from it, now \w+; give"
    ):
        run(validation_share=0.1)


def test_a_folder_of_something_else_is_refused_and_an_empty_one_taken() -> None:
    Path("out").mkdir()
    run()
    for content in ("{}", "no JSON", "[]"):
        shutil.rmtree("other", ignore_errors=True)
        Path("other").mkdir()
        Path("other/card.json").write_text(content)
        with pytest.raises(BadInput, match=r"^other: holds other files \(card.json\), not those of headstart data"):
            run(output="other")
        assert Path("other/card.json").read_text() == content and os.listdir("other") == ["card.json"]
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
        ({"once": "often"}, "once 'often': expected conversation or prompt or none"),
        ({"validation_share": 1.0}, "validation_share 1.0: expected 0 or more, below 1"),
        ({"num_workers": 0}, "num_workers 0: expected at least 1"),
        ({"filters": {"max_tokens": 5}}, "filters.min_tokens and filters.max_tokens need a tokenizer"),
        ({"filters": {"max_tokens": 5}, "tokenizer": "./gone"}, "tokenizer ./gone: cannot be loaded: "),
        ({"output": "chats.jsonl"}, "chats.jsonl: a file, not a folder"),
        ({"output": "chats.jsonl/new"}, "chats.jsonl/new: chats.jsonl is a file, not a folder"),
        (
            {"filters": {"min_characters": 1000}},
            "no row is left for training: 200 read, 200 short; for example chats.jsonl:1",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(settings: dict[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(BadInput) as caught:
        run(**settings)
    assert problem in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["chats.jsonl"]


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


def test_a_set_of_digests_knows_each_and_takes_little_memory() -> None:
    seen, source = Digests(), random.Random(0)
    digests = [source.randbytes(16) for _ in range(5000)]
    assert [seen.add(digest) for digest in digests] == [True] * 5000
    assert [seen.add(digest) for digest in digests] == [False] * 5000
    assert len(seen) == 5000 and len(seen._table) <= 43 * 5000


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
