"""Rows come from every kind of source one at a time, with their place in it, and what cannot be read is named."""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.configs.loader import build
from headstart.data_pipelines.rows.config import DataConfig
from headstart.data_pipelines.rows.sources import Row, iter_rows

ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(hub_is: Callable) -> list[tuple[str, str | None, str, bool]]:
    """Stands in for the hub: records (name, config, split, streaming) and gives ROWS."""
    calls: list[tuple[str, str | None, str, bool]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        calls.append((name, config, split, streaming))
        return (dict(row) for row in ROWS)

    hub_is(load_dataset)
    return calls


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool) -> None:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = pyarrow.Table.from_pylist(rows)
    with (ipc.new_stream if stream else ipc.new_file)(str(path), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)


def write_parquet(path: Path, rows: list[dict[str, Any]], **how: Any) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    schema = None if rows else pyarrow.schema({"text": pyarrow.string()})
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, **how)


def texts(spec: Any, **how: Any) -> list[str]:
    return [row.data["text"] for row in iter_rows(spec, **how)]


def message(spec: Any, **how: Any) -> str:
    with pytest.raises(BadInput) as caught:
        list(iter_rows(spec, **how))
    return str(caught.value)


def test_jsonl_rows_carry_file_line_and_source(folder: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS[:2])
    (folder / "train.jsonl").write_text(f"\n{lines}\n\n{json.dumps(ROWS[2])}\n")
    rows = list(iter_rows("train.jsonl"))
    assert [row.data for row in rows] == ROWS
    assert [row.origin for row in rows] == ["train.jsonl:2", "train.jsonl:3", "train.jsonl:5"]
    assert {row.source for row in rows} == {"train.jsonl"}


def test_every_format_gives_the_same_rows(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    (folder / "a.json").write_text(json.dumps(ROWS, indent=2))
    write_parquet(folder / "a.parquet", ROWS, row_group_size=2)
    write_arrow(folder / "stream.arrow", ROWS, stream=True)
    write_arrow(folder / "file.arrow", ROWS, stream=False)
    for name in ("a.jsonl.gz", "a.json", "a.parquet", "stream.arrow", "file.arrow"):
        rows = list(iter_rows(name))
        assert [row.data for row in rows] == ROWS, name
        assert rows[-1].origin == ("a.jsonl.gz:3" if name == "a.jsonl.gz" else f"{name}[2]")


def test_a_column_format_adds_no_nulls_to_calls_and_schemas(folder: Path) -> None:
    """Its columns have the keys of all rows: to a row without one, it gives null."""
    calls = [{"city": "Paris"}, {"city": "Rome", "to": "Bari"}, {"copies": 2}]
    types = [{"type": "string"}, {"type": "string", "enum": ["a"]}, {"type": "integer"}]
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": call}}]}], "tools": [kind]}
        for call, kind in zip(calls, types, strict=True)
    ]
    write_parquet(folder / "a.parquet", rows)
    write_arrow(folder / "a.arrow", rows, stream=True)
    for name in ("a.parquet", "a.arrow"):
        assert [row.data for row in iter_rows(name)] == rows


def test_what_save_to_disk_writes_is_a_source(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"), num_shards=2)
    assert texts("saved") == ["one", "two", "three"]


def test_a_folder_gives_its_data_files_in_order_and_a_pattern_some_of_them(folder: Path) -> None:
    write_jsonl(folder / "data" / "b" / "train-1.jsonl", ROWS[1:])
    write_jsonl(folder / "data" / "a-test.jsonl", [{"text": "test"}])
    write_jsonl(folder / "data" / "a-train-0.jsonl", ROWS[:1])
    write_jsonl(folder / "data" / ".cache" / "x.jsonl", [{"text": "hidden"}])
    (folder / "data" / "README.md").write_text("no rows")
    assert texts("data") == ["test", "one", "two", "three"]
    assert texts("data/**/*train-?.jsonl") == ["one", "two", "three"]
    assert texts(str(folder / "data" / "*.jsonl")) == ["test", "one"]
    assert message("data/*.parquet") == "data/*.parquet: no file matches"
    (folder / "empty").mkdir()
    assert message("empty").startswith("empty: no data file in this folder; known formats are .jsonl")


def test_several_sources_follow_each_other_up_to_num_rows_and_no_more_is_read(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "b.jsonl").write_text('{"text": "four"}\n{"text": "five"}\nnot read\n')
    assert texts(["a.json", "b.jsonl"], num_rows=5) == ["one", "two", "three", "four", "five"]


def test_a_missing_file_is_named_before_anything_is_read(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", ROWS)
    with pytest.raises(BadInput, match="^gone.jsonl: no such file$"):
        iter_rows(["a.jsonl", "gone.jsonl"])


def test_a_mapping_limits_names_and_renames(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", [{"question": "1?", "answer": "1"}, {"question": "2?", "answer": "2"}])
    columns = {"question": "prompt", "answer": "response"}
    spec = {"source": "a.jsonl", "name": "sums", "num_rows": 1, "columns": columns}
    [first] = iter_rows(spec)
    assert first.data == {"prompt": "1?", "response": "1"} and first.source == "sums"
    spec["columns"] = {"question": "answer", "answer": "question"}
    assert next(iter_rows(spec)).data == {"answer": "1?", "question": "1"}, "two columns may change places"
    spec["columns"] = {"question": "prompt", "answer": "prompt"}
    assert message(spec).endswith("columns: two keys are renamed to 'prompt'")
    spec["columns"] = {"query": "prompt"}
    assert message(spec) == "a.jsonl:1: columns: no key 'query'; its keys are question, answer"


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("owner/chats", ("owner/chats", None, "train", False)),
        ("owner/chats:train_sft[:10%]", ("owner/chats", None, "train_sft[:10%]", False)),
        ("owner/OpenHermes-2.5", ("owner/OpenHermes-2.5", None, "train", False)),
        ("owner/chats@en", ("owner/chats", "en", "train", False)),
        ("owner/chats@en:test", ("owner/chats", "en", "test", False)),
        ({"source": "owner/chats", "streaming": True}, ("owner/chats", None, "train", True)),
    ],
)
def test_a_hub_name_loads_its_config_and_split(spec: Any, call: tuple[Any, ...], hub: list[Any]) -> None:
    name = spec if isinstance(spec, str) else spec["source"]
    assert list(iter_rows(spec, num_rows=2)) == [Row(ROWS[i], f"{name}[{i}]", name) for i in range(2)]
    assert hub == [call]


def test_a_path_wins_over_a_hub_name(folder: Path, hub: list[Any]) -> None:
    (folder / "owner").mkdir()
    (folder / "owner" / "chats").write_text("")
    assert message("owner/chats") == (
        "owner/chats: unknown data format; known are .jsonl, .jsonl.gz, .json (a list), .parquet, .arrow"
    )
    assert hub == []


@pytest.mark.parametrize("spec", ["train.jsonl", "data/x.parquet", "./data/x", "../x", "/data/x", "a/b/c", "train"])
def test_what_looks_like_a_file_is_never_looked_up_on_the_hub(spec: str, hub: list[Any]) -> None:
    assert message(spec) == f"{spec}: no such file"
    assert hub == []


def test_a_hub_data_set_that_fails_is_one_line(hub_is: Callable) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("first line\nsecond line")

    def fail_later(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise ConnectionError("gone")

    hub_is(fail)
    expected = "owner/chats:test: no such file, and the hub data set cannot be loaded: first line second line"
    assert message("owner/chats:test") == expected
    hub_is(fail_later)
    assert message("owner/chats") == "owner/chats: no such file, and the hub data set fails at row 1: gone"


def test_missing_datasets_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message("owner/chats").endswith("a hub data set needs datasets: pip install datasets")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"source": "a.jsonl", "weigth": 2}, "sources.0.weigth: unknown key; did you mean sources.0.weight?"),
        ({"source": "a.jsonl", "weight": 0}, "sources.0: weight 0.0: expected above 0"),
        ({"source": "a.jsonl", "num_rows": 0}, "sources.0: num_rows 0: expected at least 1"),
        ({"source": "a.jsonl", "streaming": True}, "a.jsonl: streaming is for hub data sets; this is a local file"),
        ({"name": "x"}, "sources.0.source: required key is missing"),
        ([], "no data source is given"),
        ("", "no data source is given"),
    ],
)
def test_a_bad_source_is_one_line(folder: Path, spec: Any, problem: str) -> None:
    write_jsonl(folder / "a.jsonl", ROWS)
    assert message(spec) == problem


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
        ("a.arrow", "not arrow", "a.arrow: not readable as Arrow: "),
        ("a.csv", "a,b", "a.csv: unknown data format; known are .jsonl"),
    ],
)
def test_a_bad_file_is_named(folder: Path, name: str, content: str, problem: str) -> None:
    if name in ("a.parquet", "a.arrow"):
        pytest.importorskip("pyarrow")
    (folder / name).write_text(content)
    assert message(name).startswith(problem)


def test_a_truncated_arrow_file_and_an_empty_parquet_file_are_named(folder: Path) -> None:
    write_arrow(folder / "a.arrow", [{"text": "x" * 1000}] * 100, stream=True)
    (folder / "a.arrow").write_bytes((folder / "a.arrow").read_bytes()[:2000])
    assert message("a.arrow").startswith("a.arrow: not readable as Arrow: ")
    write_parquet(folder / "a.parquet", [])
    assert message("a.parquet") == "a.parquet: empty file"


def test_the_config_builds_from_a_mapping_and_refuses_empty_limits() -> None:
    assert build(DataConfig, {"train": ["a.jsonl"], "num_rows": 3}) == DataConfig(train=["a.jsonl"], num_rows=3)
    for key in ("max_length", "num_rows"):
        with pytest.raises(BadInput, match=f"^data: {key} 0: expected at least 1$"):
            build(DataConfig, {"train": "a.jsonl", key: 0}, where="data")
