"""Answers on disk: appended as they arrive, resumable after a kill at any point, and sorted at the end."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ...base.differing import first_difference
from ...base.errors import BadInput
from ...base.files import remove, replacing, write_text
from ...base.jsonl import index_appended
from ...base.owned import OwnedFolder
from .conversations import Exchange

COMMAND = "headstart data regenerate"
FORMAT = 1
SYNC_SECONDS = 1.0  # after a power loss, at most the rows of this time are missing


@dataclass
class Counts:
    """Numbers of conversations and tokens of a run."""

    answered: int = 0
    truncated: int = 0  # the last answer was cut at max_tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: int = 0


@dataclass(frozen=True)
class RunSummary:
    """The entries of a finished run's manifest.json, apart from its settings."""

    is_complete: bool
    rows: int
    duplicates: int
    counts: Counts


@dataclass
class RunIndex:
    """All conversations of a run, before it starts."""

    source_ids: dict[str, str] = field(default_factory=dict)  # of the row of each conversation, by its key, in order
    num_rows: int = 0
    num_duplicates: int = 0

    @classmethod
    def of(cls, exchanges: Iterable[Exchange]) -> "RunIndex":
        index = cls()
        for exchange in exchanges:
            index.num_rows += exchange.sample == 0
            index.num_duplicates += exchange.key in index.source_ids
            index.source_ids.setdefault(exchange.key, exchange.source_id)
        return index


class AnswerStore:
    """A folder of answered rows by key, for one process at a time.

    Rows are appended to `answers.part.jsonl`; `finish` writes `answers.jsonl` (in order), `failed.jsonl` and
    `manifest.json`. Only the first row of a key is stored, also over several runs.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        """Args: settings: everything that the rows depend on, as JSON.

        Entering the store raises BadInput if the folder was started with other settings (naming the first that
        differs), belongs to another command, is in use, or has a damaged file.
        """
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self.part = self.folder / "answers.part.jsonl"
        self._offsets: dict[str, int] = {}  # of the row of each key, in bytes of the part file
        self._synced = time.monotonic()

    def __enter__(self) -> "AnswerStore":
        self._owned = OwnedFolder(self.folder, command=COMMAND, settings=self.settings)
        try:
            manifest = self._read_manifest()
            if manifest is None:
                self._write_manifest({"is_complete": False})
            elif difference := first_difference(manifest["settings"], self.settings):
                raise BadInput(f"{self.folder}: started with {difference}; give a new folder")
            self._file = self._open_part()
        except BaseException:
            self._owned.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # the lock is released even if the last rows cannot be written
            stack.callback(self._owned.close)
            stack.callback(self._file.close)
            self._sync()

    def __contains__(self, key: object) -> bool:
        return key in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def finished(self) -> RunSummary | None:
        """The summary of a complete run; None if rows are missing."""
        manifest = self._read_manifest()
        if manifest is None or not manifest["is_complete"] or not (self.folder / "answers.jsonl").exists():
            return None
        remove(self.part)  # it is still there if the run was killed just before removing it
        counts = Counts(**{name: manifest["counts"][name] for name in Counts.__dataclass_fields__})
        return RunSummary(True, manifest["rows"], manifest["duplicates"], counts)

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row, unless the key has one."""
        if key in self._offsets:
            return
        self._offsets[key] = self._file.tell()
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def finish(self, index: RunIndex, failed: Mapping[str, dict[str, Any]]) -> RunSummary:
        """Write the stored rows in the order of the index. Args: failed: rows of failed.jsonl, by key."""
        self._sync()
        counts = Counts(failed=len(failed))
        with replacing(self.folder / "answers.jsonl") as path, path.open("wb") as file:
            file.writelines(self._counted(index.source_ids, counts))
        failures = self.folder / "failed.jsonl"
        if failed:
            with replacing(failures) as path, path.open("wb") as file:
                rows = (failed[key] for key in index.source_ids if key in failed)
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        else:
            remove(failures)
        summary = RunSummary(not failed, index.num_rows, index.num_duplicates, counts)
        self._write_manifest(asdict(summary))
        if not failed:
            remove(self.part)  # kept while conversations are missing, for a later run to resume
        return summary

    def _counted(self, keys: Iterable[str], counts: Counts) -> Iterator[bytes]:
        """The stored rows of these keys, in their order, which are added to the counts."""
        with self.part.open("rb") as file:
            for key in keys:
                if key not in self._offsets:
                    continue
                file.seek(self._offsets[key])
                line = file.readline()
                row = json.loads(line)
                counts.answered += 1
                counts.truncated += row["truncated"]
                counts.prompt_tokens += row["usage"]["prompt_tokens"]
                counts.completion_tokens += row["usage"]["completion_tokens"]
                yield line

    def _read_manifest(self) -> dict[str, Any] | None:
        path = self.folder / "manifest.json"
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_bytes())
            is_ours = manifest["format"] == FORMAT and {"settings", "is_complete"} <= manifest.keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path}: not a manifest of regenerated answers") from error
        if not is_ours:
            raise BadInput(f"{path}: format {manifest['format']!r}, expected {FORMAT}")
        return manifest

    def _write_manifest(self, entries: Mapping[str, Any]) -> None:
        manifest = {"format": FORMAT, "settings": self.settings, **entries}
        write_text(self.folder / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")

    def _open_part(self) -> BinaryIO:
        """The part file, opened at the end of its last complete row; a partial row left by a kill is truncated."""
        file = self.part.open("a+b")
        advice = "delete this line to have its row answered again"
        self._offsets = index_appended(file, lambda row: row["id"], where=str(self.part), advice=advice)
        return file

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()
