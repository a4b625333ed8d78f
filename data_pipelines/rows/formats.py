"""Reads the rows of a local file: JSON Lines, JSON, Parquet or Arrow."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.jsonl import iter_jsonl, loads

LOCAL_FORMATS = ".jsonl, .jsonl.gz, .json (a list), .parquet, .arrow"
ROWS_AT_A_TIME = 256  # rows that are read at a time from a column format

LocatedRows = Iterator[tuple[dict[str, Any], str]]  # (row, its origin such as `train.jsonl:17`)
Reader = Callable[[Path], LocatedRows]


def is_known_format(path: Path) -> bool:
    """Whether the file's name ends in that of a known format."""
    return _reader_of(path) is not None


def read_file(path: Path) -> LocatedRows:
    """Yield (row, its origin such as `train.jsonl:17`). Only .json files are read into memory as a whole.

    Raises: BadInput if the format is unknown, the file is damaged or empty, or a row is not an object.
    """
    reader = _reader_of(path)
    if reader is None:
        raise BadInput(f"{path}: unknown data format; known are {LOCAL_FORMATS}")
    return reader(path)


def _reader_of(path: Path) -> Reader | None:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _jsonl_rows
    return {".json": _json_rows, ".parquet": _column_rows, ".arrow": _column_rows}.get(path.suffix)


def _jsonl_rows(path: Path) -> LocatedRows:
    return ((data, f"{path}:{line}") for line, data in iter_jsonl(path))


def _json_rows(path: Path) -> LocatedRows:
    try:
        items = loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        hint = "; a file with one object per line should be named .jsonl" if error.msg == "Extra data" else ""
        raise BadInput(f"{path}:{error.lineno}: not JSON: {error.msg}{hint}") from error
    except ValueError as error:
        raise BadInput(f"{path}: not JSON that can be read: {error}") from error
    if not isinstance(items, list):
        raise BadInput(f"{path}: should be a list of objects, got {type(items).__name__}")
    if not items:
        raise BadInput(f"{path}: empty file")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadInput(f"{path}[{index}]: not a JSON object but {json.dumps(item)[:60]}")
        yield item, f"{path}[{index}]"


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(ROWS_AT_A_TIME)


def _arrow_batches(path: Path) -> Iterator[Any]:
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as file:
        is_file_format = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file_format:
            reader = ipc.open_file(file)
            record_batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            record_batches = iter(ipc.open_stream(file))
        for batch in record_batches:
            for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
                yield batch.slice(start, ROWS_AT_A_TIME)


def _column_rows(path: Path) -> LocatedRows:
    batches, kind = (_parquet_batches, "Parquet") if path.suffix == ".parquet" else (_arrow_batches, "Arrow")
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise BadInput(f"{path}: reading {path.suffix} needs pyarrow: pip install pyarrow") from error
    index = 0
    try:
        for batch in batches(path):
            for data in batch.to_pylist():
                yield without_absent(data), f"{path}[{index}]"
                index += 1
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path}: not readable as {kind}: {one_line(error)}") from error
    if index == 0:
        raise BadInput(f"{path}: empty file")


def without_absent(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a column format without nulls inside its objects: there, all rows have the keys that one of them has."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(part) for key, part in value.items() if part is not None}
        return [cleaned(part) for part in value] if isinstance(value, list) else value

    return {key: cleaned(value) for key, value in row.items()}


def one_line(error: Exception) -> str:
    """Another library's error message in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
