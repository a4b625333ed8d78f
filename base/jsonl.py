"""Reading JSON Lines files, plain or gzipped, with errors that name file and line.

Of files that a run appends to, a kill may have cut the last line short.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from .errors import BadInput

Key = TypeVar("Key", bound=Hashable)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All objects of a .jsonl or .jsonl.gz file (UTF-8), in file order.

    Blank lines are skipped. BadInput: no such file, a folder, no object at all, or a line that is no JSON object
    (the message opens with FILE:LINE).
    """
    return [data for _, data in iter_jsonl(path)]


def iter_jsonl(
    path: str | Path, *, on_fault: Callable[[BadInput], object] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object), reading one line at a time; blank lines are skipped but counted.

    BadInput as for `read_jsonl`, raised at the line; with `on_fault`, a line that is no object goes there instead.
    """
    num_objects = line_number = 0
    try:
        with _open(Path(path)) as file:
            for line_number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                num_objects += 1
                try:
                    data = _parse(line, where=f"{path}:{line_number}")
                except BadInput as error:
                    if on_fault is None:
                        raise
                    on_fault(error)
                    continue
                yield line_number, data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path}:{line_number + 1}: damaged gzip file: {error}") from error
    if num_objects == 0:
        raise BadInput(f"{path}: empty file")


def read_appended(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that is appended to, without a last line that a kill cut short; none if there is no file.

    BadInput: a line that is no JSON object (the message opens with FILE:LINE).
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    try:
        return [_parse(line, where=f"{path}:{i}") for i, line in enumerate(lines, start=1) if line.endswith(b"\n")]
    except BadInput as error:
        raise BadInput(f"{error}; delete that line") from error


def index_appended(
    file: BinaryIO, key_of: Callable[[dict[str, Any]], Key], *, where: str, advice: str
) -> dict[Key, int]:
    """The offset of the first row with each key, in a file open for reading and writing, which is left at its end. A
    last line that a kill cut short is cut off.

    Raises: BadInput, with the advice, on a line without a key. Args: where: names the file.
    """
    offsets: dict[Key, int] = {}
    end = file.seek(0)
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            offsets.setdefault(key_of(json.loads(line)), end)
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{where}:{number}: damaged; {advice}") from error
        end += len(line)
    file.truncate(end)
    file.seek(end)
    return offsets


def loads(text: str | bytes) -> Any:
    """`json.loads`, but every failure is a ValueError with a one-line message."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:  # Python's own limit, of 4,300
        raise ValueError("a number of too many digits") from error


@contextmanager
def naming_faults(row: Mapping[str, Any], origin: str) -> Iterator[None]:
    """Turn an exception into BadInput that names the origin, if the row itself cannot be encoded as UTF-8 JSON."""
    try:
        yield
    except Exception as error:
        fault = _fault(row)
        if fault is None:
            raise
        raise BadInput(f"{origin}: {fault}") from error


def _fault(row: Mapping[str, Any]) -> str | None:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except RecursionError:
        return "nested too deeply"
    except UnicodeEncodeError:
        return "half of a character, a lone surrogate, which UTF-8 cannot write"
    return None


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise BadInput(f"{path}: a folder, not a file")
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def _parse(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        data = loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise BadInput(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{where}: not a JSON object but {json.dumps(data)[:60]}")
    return data
