"""Where training rows come from: local JSON Lines, JSON and Parquet files, or data sets on the Hugging Face hub."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..configs.errors import BadInput
from ..configs.jsonl import iter_jsonl

LOCAL_FORMATS = ".jsonl, .jsonl.gz, .json (a list), .parquet"


@dataclass(kw_only=True)
class DataConfig:
    """Which rows to train and validate on. Each source is a file or a hub name, `owner/name` or `owner/name:split`."""

    train: str | list[str]
    validation: str | list[str] | None = None
    max_length: int = 2048  # tokens; longer rows are cut on the right
    num_rows: int | None = None  # the first rows of `train`, over all its sources; None is all

    def __post_init__(self) -> None:
        for name, value in (("max_length", self.max_length), ("num_rows", self.num_rows)):
            if value is not None and value < 1:
                raise BadInput(f"{name} should be at least 1, got {value}")


@dataclass(frozen=True)
class Row:
    """One row as its source gave it, and where it stood there ("train.jsonl:17"), for error messages."""

    data: dict[str, Any]
    origin: str


def load_rows(spec: str | list[str], *, num_rows: int | None = None) -> list[Row]:
    """The rows of one source or of several, in the order given; only the first `num_rows` when that is set.

    A source is a path to a .jsonl, .jsonl.gz, .json (a list of objects) or .parquet file or, when there is no such path
    and it reads like one, a hub name: `owner/name` (split `train`) or `owner/name:split`.

    BadInput: no such file, another format, a line or item that is no object (with its place), a hub data set that
    cannot be loaded, no source at all.
    """
    specs = [spec] if isinstance(spec, str) else spec
    if not all(specs) or not specs:
        raise BadInput("no data source is given")
    rows = chain.from_iterable(_rows_of(one) for one in specs)
    return list(islice(rows, num_rows))


def _rows_of(spec: str) -> Iterator[Row]:
    path = Path(spec)
    if not path.exists():
        if _looks_local(spec):
            raise BadInput(f"{spec}: no such file")
        return _hub_rows(spec)
    if path.is_dir():
        raise BadInput(f"{spec}: a folder, not a file; give its files one by one")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return (Row(data, f"{spec}:{line}") for line, data in iter_jsonl(path))
    if path.suffix == ".json":
        return _json_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise BadInput(f"{spec}: unknown data format; known are {LOCAL_FORMATS}")


def _looks_local(spec: str) -> bool:
    """True unless `spec` reads as `owner/name` or `owner/name:split`; a version such as `-2.5` is no file suffix."""
    name, _, _ = spec.partition(":")
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None
    return not is_hub_name or re.search(r"\.[A-Za-z]\w*$", name) is not None


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        hint = "; a file with one object per line should be named .jsonl" if error.msg == "Extra data" else ""
        raise BadInput(f"{path}:{error.lineno}: not JSON: {error.msg}{hint}") from error
    if not isinstance(items, list):
        raise BadInput(f"{path}: should be a list of objects, got {type(items).__name__}")
    if not items:
        raise BadInput(f"{path}: empty file")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadInput(f"{path}[{index}]: not a JSON object but {json.dumps(item)[:60]}")
        yield Row(item, f"{path}[{index}]")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BadInput(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from error
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for data in batch.to_pylist():
                    yield Row(data, f"{path}[{index}]")
                    index += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path}: not readable as Parquet: {_one_line(error)}") from error
    if index == 0:
        raise BadInput(f"{path}: empty file")


def _hub_rows(spec: str) -> Iterator[Row]:
    name, _, split = spec.partition(":")
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"{spec}: no such file, and a hub data set needs datasets: pip install datasets") from error
    try:
        rows: Any = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub, the network and the data set's own format each raise their own kind
        raise BadInput(f"{spec}: no such file, and the hub data set does not load: {_one_line(error)}") from error
    return (Row(data, f"{spec}[{index}]") for index, data in enumerate(rows))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
