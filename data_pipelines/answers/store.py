"""Answers on disk: rows appended as they come, resumed after a kill at any point, and put in order at the end."""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...configs.errors import BadInput

FORMAT = 1
SYNC_SECONDS = 1.0  # a machine that loses power loses the rows of no more than this


class AnswerStore:
    """A folder that fills up with answered rows, each under a key.

    Rows are appended to `answers.part.jsonl`; `finish` writes `answers.jsonl`, in order, `failed.jsonl` and
    `manifest.json`, each complete or not at all. A row is stored once, whatever is added, and however often the run is
    started again. One process at a time.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        """Args: settings: what all rows depend on, as JSON; a folder begun with others is refused.

        Raises: BadInput on that, naming the first setting that differs; on a folder of something else, in use, or with
            a damaged file.
        """
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self._places: dict[str, int] = {}  # key to byte in the part file
        self._part: BinaryIO | None = None
        self._lock: Any = None
        self._synced = time.monotonic()

    def __enter__(self) -> "AnswerStore":
        self._check_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system, also after a kill
        except OSError as error:
            self._lock.close()
            raise BadInput(f"{self.folder}: in use by another process") from error
        try:
            manifest = self._read_manifest()
            if manifest is None:
                self._write_manifest({"is_complete": False})
            else:
                check_settings(manifest["settings"], self.settings, folder=self.folder)
            self._part = self._open_part()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._part is not None:
            self._sync()
            self._part.close()
        self._lock.close()

    @property
    def part(self) -> Path:
        return self.folder / "answers.part.jsonl"

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def finished(self) -> dict[str, Any] | None:
        """The manifest of a run that left nothing to do; None where something is."""
        manifest = self._read_manifest()
        is_complete = manifest is not None and manifest["is_complete"] and (self.folder / "answers.jsonl").exists()
        if is_complete:
            self.part.unlink(missing_ok=True)  # where the run was killed just before
        return manifest if is_complete else None

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row, unless there is one under the key."""
        assert self._part is not None
        if key in self._places:
            return
        self._places[key] = self._part.tell()
        self._part.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._part.flush()
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def finish(
        self,
        keys: Iterable[str],
        failed: list[dict[str, Any]],
        *,
        keep: Callable[[Mapping[str, Any]], bool],
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write the rows stored under `keys`, in that order, those to `keep`; returns the manifest.

        Args: failed: rows for failed.jsonl. more: further entries of the manifest.
        """
        self._sync()
        counts: Counter[str] = Counter()
        digest = hashlib.sha256()
        write_whole(self.folder / "answers.jsonl", self._kept(keys, keep, counts, digest))
        failures = self.folder / "failed.jsonl"
        if failed:
            write_whole(failures, (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in failed))
        else:
            failures.unlink(missing_ok=True)
        manifest = self._write_manifest(
            {
                "is_complete": not failed,
                **more,
                "counts": {**counts, "failed": len(failed)},
                "sha256": digest.hexdigest(),
            }
        )
        if not failed:
            self.part.unlink()  # kept until all is there: a later run goes on from it
        return manifest

    def _kept(
        self, keys: Iterable[str], keep: Callable[[Mapping[str, Any]], bool], counts: "Counter[str]", digest: Any
    ) -> Iterator[bytes]:
        counts.update(answered=0, written=0, truncated=0, ended_early=0, prompt_tokens=0, completion_tokens=0)
        with self.part.open("rb") as file:
            for key in keys:
                if key not in self._places:
                    continue
                file.seek(self._places[key])
                line = file.readline()
                row = json.loads(line)
                counts["answered"] += 1
                counts["truncated"] += row["truncated"]
                counts["ended_early"] += row["num_turns_left"] > 0
                counts.update(row["usage"])
                if keep(row):
                    counts["written"] += 1
                    digest.update(line)
                    yield line

    def _check_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise BadInput(f"{self.folder}: a file, not a folder")
        there = {path.name for path in self.folder.iterdir() if path.name[0] != "."} if self.folder.exists() else set()
        if there and "manifest.json" not in there:
            raise BadInput(f"{self.folder}: holds other files ({min(there)}); give a new folder")

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

    def _write_manifest(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        manifest = {"format": FORMAT, "settings": self.settings, **entries}
        write_whole(
            self.folder / "manifest.json", [json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n"]
        )
        return manifest

    def _open_part(self) -> BinaryIO:
        """The part file behind its last whole row; what a kill left behind that is cut off."""
        file = self.part.open("a+b")
        file.seek(0)
        end = 0
        for number, line in enumerate(file, start=1):
            try:
                key = json.loads(line)["id"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(
                    f"{self.part}:{number}: damaged; delete this line to have its row answered again"
                ) from error
            if key is None:
                break
            self._places.setdefault(key, end)
            end += len(line)
        file.truncate(end)
        file.seek(end)
        return file

    def _sync(self) -> None:
        assert self._part is not None
        self._part.flush()
        os.fsync(self._part.fileno())
        self._synced = time.monotonic()


def check_settings(there: Any, now: Any, *, folder: Path, at: str = "") -> None:
    """Raises BadInput naming the first setting, dotted, that a folder was begun with otherwise."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in [*now, *there]:
            check_settings(there.get(key), now.get(key), folder=folder, at=f"{at}.{key}" if at else key)
    elif there != now:
        shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in map(json.dumps, (there, now))]
        raise BadInput(f"{folder}: begun with {at} {shown[0]}, now {shown[1]}; give a new folder")


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """A file that appears complete or not at all: written beside `path`, synced, then moved."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with unfinished.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
