"""Rows load from every kind of source with their place in it, and every source that cannot be read is named."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from headstart.configs.errors import BadInput
from headstart.configs.loader import build
from headstart.data_pipelines.sources import DataConfig, Row, load_rows
from pyarrow import parquet

ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stands in for the hub: records (name, split) and gives ROWS."""
    calls: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def message(spec: str | list[str]) -> str:
    with pytest.raises(BadInput) as caught:
        load_rows(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_rows_carry_file_and_line(folder: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS[:2])
    (folder / "train.jsonl").write_text(f"\n{lines}\n\n{json.dumps(ROWS[2])}\n")
    rows = load_rows("train.jsonl")
    assert [row.data for row in rows] == ROWS
    assert [row.origin for row in rows] == ["train.jsonl:2", "train.jsonl:3", "train.jsonl:5"]


def test_gzip_json_and_parquet_give_the_same_rows(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    (folder / "a.json").write_text(json.dumps(ROWS, indent=2))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=2)
    for name, last in (("a.jsonl.gz", "a.jsonl.gz:3"), ("a.json", "a.json[2]"), ("a.parquet", "a.parquet[2]")):
        rows = load_rows(name)
        assert [row.data for row in rows] == ROWS
        assert rows[-1].origin == last


def test_parquet_chats_come_as_lists_of_dicts(folder: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}]), folder / "a.parquet")
    assert load_rows("a.parquet") == [Row({"messages": chat}, "a.parquet[0]")]


def test_several_sources_follow_each_other_up_to_num_rows(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "b.jsonl").write_text('{"text": "four"}\n{"text": "five"}\nnot read\n')
    assert [row.origin for row in load_rows(["a.json", "b.jsonl"], num_rows=5)][3:] == ["b.jsonl:1", "b.jsonl:2"]
    assert [row.data for row in load_rows(["a.json", "gone.jsonl"], num_rows=2)] == ROWS[:2]


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("owner/chats", ("owner/chats", "train")),
        ("owner/chats:train_sft[:10%]", ("owner/chats", "train_sft[:10%]")),
        ("owner/OpenHermes-2.5", ("owner/OpenHermes-2.5", "train")),
    ],
)
def test_a_hub_name_loads_its_split(spec: str, call: tuple[str, str], hub: list[tuple[str, str]]) -> None:
    assert load_rows(spec, num_rows=2) == [Row(ROWS[0], f"{spec}[0]"), Row(ROWS[1], f"{spec}[1]")]
    assert hub == [call]


def test_a_path_wins_over_a_hub_name(folder: Path, hub: list[tuple[str, str]]) -> None:
    (folder / "owner").mkdir()
    (folder / "owner" / "chats").write_text("")
    assert message("owner/chats") == (
        "owner/chats: unknown data format; known are .jsonl, .jsonl.gz, .json (a list), .parquet"
    )
    assert hub == []


@pytest.mark.parametrize(
    "spec", ["train.jsonl", "data/train.jsonl", "data/x.parquet", "./data/x", "../x", "/data/x", "a/b/c", "train"]
)
def test_what_looks_like_a_file_is_never_looked_up_on_the_hub(spec: str, hub: list[tuple[str, str]]) -> None:
    assert message(spec) == f"{spec}: no such file"
    assert hub == []


def test_a_hub_data_set_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *, split: str) -> None:
        raise ConnectionError("first line\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    expected = "owner/chats:test: no such file, and the hub data set does not load: first line second line"
    assert message("owner/chats:test") == expected


def test_missing_datasets_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message("owner/chats").endswith("a hub data set needs datasets: pip install datasets")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", '{"text": "one"}', "a.json: should be a list of objects, got dict"),
        ("a.json", '[\n{"text": }]', "a.json:2: not JSON: Expecting value"),
        ("a.json", '{"a": 1}\n{"a": 2}', "a.json:2: not JSON: Extra data; a file with one object per line should be"),
        ("a.json", '[{"a": 1}, 3]', "a.json[1]: not a JSON object but 3"),
        ("a.json", "[]", "a.json: empty file"),
        ("a.jsonl", '{"a": 1}\n{"a"\n', "a.jsonl:2: not JSON: "),
        ("a.parquet", "not parquet", "a.parquet: not readable as Parquet: "),
        ("a.csv", "a,b", "a.csv: unknown data format; known are .jsonl"),
    ],
)
def test_a_bad_file_is_named(folder: Path, name: str, content: str, problem: str) -> None:
    (folder / name).write_text(content)
    assert message(name).startswith(problem)


def test_an_empty_parquet_file_a_folder_and_no_source_are_named(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), folder / "a.parquet")
    (folder / "data").mkdir()
    assert message("a.parquet") == "a.parquet: empty file"
    assert message("data") == "data: a folder, not a file; give its files one by one"
    assert message([]) == message("") == "no data source is given"


def test_the_config_builds_from_a_mapping_and_refuses_empty_limits() -> None:
    assert build(DataConfig, {"train": ["a.jsonl"], "num_rows": 3}) == DataConfig(train=["a.jsonl"], num_rows=3)
    for key in ("max_length", "num_rows"):
        with pytest.raises(BadInput, match=f"^data: {key} should be at least 1, got 0$"):
            build(DataConfig, {"train": "a.jsonl", key: 0}, where="data")
