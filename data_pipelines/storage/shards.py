"""Folders of samples in shards with checksums, with or without the target's hidden states.

FOLDER/manifest.json lists the shards and is written last. Until then FOLDER/progress/ has an entry for each complete
shard, so that an interrupted writer loses only the rows of its unfinished shard.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...base.differing import first_difference
from ...base.errors import BadInput, first_line
from ...base.files import remove, remove_unfinished, sha256_of, write_json
from .shard_file import RowFile, ShardEntry, StoredSample, row_bytes, write_shard

FORMAT = "headstart shards 1"
MANIFEST, PROGRESS = "manifest.json", "progress"
SHARD_BYTES = 128 * 2**20  # about three times as much memory is used until the shard is written
MOST_OPEN = 128  # shards that are mapped at a time; each needs a file descriptor
MOST_READ = 256 * 2**20  # approximate limit on mapped bytes, which count as memory of this process
READ_AROUND = 128 * 2**10  # bytes that the system maps in addition to those of a row


@dataclass(frozen=True)
class Manifest:
    """The contents of a finished folder's manifest.json."""

    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    bytes: int
    bytes_per_token: float
    fields: dict[str, Any]  # how the rows were made, as JSON; top-level keys in the file
    shards: list[ShardEntry]

    @classmethod
    def of(cls, shards: list[ShardEntry], fields: dict[str, Any]) -> "Manifest":
        summed = ("num_rows", "num_tokens", "num_supervised_tokens", "bytes")
        totals = {name: sum(getattr(shard, name) for shard in shards) for name in summed}
        bytes_per_token = round(totals["bytes"] / max(1, totals["num_tokens"]), 3)
        return cls(**totals, bytes_per_token=bytes_per_token, fields=fields, shards=shards)

    def as_json(self) -> dict[str, Any]:
        totals = asdict(self)
        fields, shards = totals.pop("fields"), totals.pop("shards")
        return {"format": FORMAT, **totals, **fields, "shards": shards}


class ShardWriter:
    """Writes samples into the shards of a folder: row by row, or whole shards, of which an interrupted writer with the
    same fields may have left some. done: the complete shards by number.
    """

    def __init__(self, folder: str | Path, *, fields: Mapping[str, Any] | None = None, shard_bytes: int = SHARD_BYTES):
        """Args: fields: how the rows are made, for the manifest. shard_bytes: approximate size of a shard.

        Raises: BadInput if the folder is finished, has shards with other fields (naming the key and both values), or
            cannot be written.
        """
        self.folder, self.shard_bytes = Path(folder), shard_bytes
        self.fields: dict[str, Any] = json.loads(json.dumps(dict(fields or {})))  # as JSON returns them
        self._rows: list[StoredSample] = []
        self._num_bytes = 0
        if (self.folder / MANIFEST).exists():
            raise BadInput(f"{folder}: holds finished shards; choose another folder")
        try:
            (self.folder / PROGRESS).mkdir(parents=True, exist_ok=True)
            self._check_same()
            sizes = {path.name: path.stat().st_size for path in self.folder.glob("shard_*")}
            self.done = {number: entry for number, entry in self._progress() if sizes.get(entry.file) == entry.bytes}
        except OSError as error:
            raise BadInput(f"{folder}: {error.strerror}") from error

    def add(self, stored: StoredSample) -> None:
        """Add the next row of a new folder. It is written when its shard is full, or by `finish`."""
        self._rows.append(stored)
        self._num_bytes += row_bytes(len(stored.sample))
        if self._num_bytes >= self.shard_bytes:
            self._flush()

    def write(self, number: int, rows: Sequence[StoredSample]) -> None:
        """Write a whole shard. For several processes that write different shards of one folder."""
        path = self.folder / f"shard_{number:05d}.safetensors"
        dtypes = {key: self.fields.get(key) for key in ("dtype", "storage_dtype")}
        entry = write_shard(path, rows, metadata={"owner": owner(self.fields), "number": number, **dtypes})
        write_json(self.folder / PROGRESS / f"{number:05d}.json", asdict(entry))
        self.done[number] = entry

    def finish(self) -> Manifest:
        """Write the remaining rows and the manifest, with the shards of all writers."""
        if self._rows:
            self._flush()
        self.done = dict(self._progress())
        manifest = Manifest.of([self.done[number] for number in range(len(self.done))], self.fields)
        write_json(self.folder / MANIFEST, manifest.as_json())
        clear_progress(self.folder)
        return manifest

    def _flush(self) -> None:
        self.write(len(self.done), self._rows)
        self._rows, self._num_bytes = [], 0

    def _check_same(self) -> None:
        path = self.folder / PROGRESS / "fields.json"
        before = _read_json(path) if path.exists() else None
        if before is None:
            write_json(path, self.fields)
        elif difference := first_difference(before, self.fields):
            raise BadInput(f"{self.folder}: holds unfinished shards with {difference}; choose another folder")

    def _progress(self) -> Iterator[tuple[int, ShardEntry]]:
        for path in sorted((self.folder / PROGRESS).glob("[0-9]*.json")):
            yield int(path.stem), ShardEntry(**_read_json(path))


class Shards(Sequence[StoredSample]):
    """The rows of a finished folder, with random access: only the bytes of the rows that are used are read.

    manifest: the folder's. lengths: [num_rows] tokens of each row. Can be pickled for other processes, which open the
    files themselves.
    """

    def __init__(self, folder: str | Path):
        """Raises BadInput, naming the file, if there is no manifest or it has another format, or if a shard is missing,
        truncated, or of another folder. Only `verify` finds damage inside a shard."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._open: dict[int, RowFile] = {}
        self._num_read = 0
        lengths = [self._checked(number).lengths for number in range(len(self.manifest.shards))]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._ends = np.cumsum([len(of_shard) for of_shard in lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.manifest.shards[number]
        self._num_read += shard.bytes // shard.num_rows + READ_AROUND
        if self._num_read > MOST_READ:
            self._num_read = 0
            for file in self._open.values():
                file.forget()
        return self._file(number).row(index - int(self._ends[number]) + shard.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def has_states(self) -> bool:
        return self.manifest.fields.get("storage_dtype") is not None

    def verify(self) -> None:
        """Read all shards and compare their checksums. Raises BadInput if a shard is damaged."""
        for shard in self.manifest.shards:
            path = self.folder / shard.file
            digest = sha256_of(path)
            if digest != shard.sha256:
                raise BadInput(f"{path}: damaged: sha256 {digest[:12]}..., in the manifest {shard.sha256[:12]}...")

    def _file(self, number: int) -> RowFile:
        """The mapped file of a shard; closes the least recently used one beyond MOST_OPEN."""
        file = self._open.pop(number, None) or RowFile(self.folder / self.manifest.shards[number].file)
        self._open[number] = file
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return file

    def _checked(self, number: int) -> RowFile:
        shard, file = self.manifest.shards[number], self._file(number)
        size = file.path.stat().st_size
        if size != shard.bytes:
            raise BadInput(f"{file.path}: damaged: {size} bytes, in the manifest {shard.bytes}")
        identity = {key: file.metadata.get(key) for key in ("owner", "number")}
        expected = {"owner": owner(self.manifest.fields), "number": number}
        if identity != expected or len(file.lengths) != shard.num_rows:
            raise BadInput(f"{file.path}: a shard of another folder, or another shard of this folder")
        return file


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder. Raises BadInput if there is none, or it is damaged or has another format."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PROGRESS).is_dir():
            raise BadInput(f"{folder}: unfinished; run the command that wrote it again to complete it")
        raise BadInput(f"{path}: no such file")
    data = _read_json(path)
    version = data.pop("format", None) if isinstance(data, dict) else None
    if version != FORMAT:
        raise BadInput(f"{path}: format {version!r}, expected {FORMAT!r}")
    try:
        shards = [ShardEntry(**entry) for entry in data.pop("shards")]
        totals = {field.name: data.pop(field.name) for field in fields(Manifest) if field.name in data}
        return Manifest(**totals, fields=data, shards=shards)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a manifest of shards: {first_line(error)}") from error


def is_shards(folder: Path) -> bool:
    """Whether a folder holds shards, finished or not."""
    path = folder / MANIFEST
    if not path.is_file():
        return (folder / PROGRESS).is_dir()
    manifest = _read_json(path)
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def owner(fields: Mapping[str, Any]) -> str:
    """16 hex digits of a hash of the fields, by which a shard identifies the folder that it belongs to."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def clear_progress(folder: Path) -> None:
    """Remove the progress folder, and incomplete files of interrupted writers."""
    remove(folder / PROGRESS)
    remove_unfinished(folder)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: damaged: {error}") from error
