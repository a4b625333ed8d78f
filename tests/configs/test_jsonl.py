"""JSON Lines are read whole and in order, and every fault is named by file and line."""

import gzip
import json
from pathlib import Path

import pytest
from headstart.configs.errors import BadInput
from headstart.configs.jsonl import iter_jsonl, read_jsonl


def written(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_objects_come_in_file_order_and_as_utf8(tmp_path: Path) -> None:
    assert read_jsonl(written(tmp_path, '{"text": "é"}\n{"text": "日本"}')) == [{"text": "é"}, {"text": "日本"}]


def test_a_gzipped_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    rows = [{"i": i} for i in range(5)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    assert read_jsonl(written(tmp_path, gzip.compress(content), "rows.jsonl.gz")) == rows


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path: Path) -> None:
    assert read_jsonl(written(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n')) == [{"a": 1}]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = written(tmp_path, '\n{"a": 1}\n   \n\n{"a": 2}\n\n')
    assert list(iter_jsonl(path)) == [(2, {"a": 1}), (5, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ('{"a": 1}\n\n{"a": }\n', 3, "not JSON: Expecting value at column 7"),
        ('{"a": 1}\n[1, 2]\n', 2, "not a JSON object but [1, 2]"),
        ('"text"\n', 1, 'not a JSON object but "text"'),
        ('{"a": 1' + "0" * 5000 + "}\n", 1, "not JSON that can be read: a number of too many digits"),
        ('{"a": ' + "[" * 100_000 + "}\n", 1, "not JSON that can be read: nested too deeply"),
        (b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8: invalid start byte at byte 8 of the line"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, content: str, line: int, problem: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}:{line}: {problem}"


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "prompts.jsonl.gz"):
        with pytest.raises(BadInput, match=f"^{name}: no such file$"):
            read_jsonl(name)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a folder, not a file$"):
        read_jsonl(tmp_path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_objects_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match="prompts.jsonl: empty file$"):
        read_jsonl(written(tmp_path, content))


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    for content in (whole[:-12], b"not gzip at all"):
        with pytest.raises(BadInput, match="damaged gzip file"):
            read_jsonl(written(tmp_path, content, "rows.jsonl.gz"))
