"""What was measured so far, on disk batch by batch: a measurement that was killed goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from torch import nn

from ... import __version__
from ...configs.errors import BadInput
from ...configs.files import locked, write_text
from ...heads.target import Target
from ..generate import Generation, Round
from ..suites.prompts import Suite
from .environment import device_name

FILE = "measured.jsonl"
Record = dict[str, Any]
TREE = -1  # the batch number under which a measurement keeps its tree


class BatchStore:
    """OUTPUT/measured.jsonl: a line per finished batch, under the key of all that its figures depend on.

    A line is written and synced when all repeats and sides of its batch are done. Lines of other keys, left by a
    measurement with other settings, are kept. The file exists from the first batch until the report is written. One
    process at a time.
    """

    def __init__(self, folder: str | Path, *, on_first: Callable[[], object] = lambda: None):
        """on_first: called when there is a file to go on from."""
        self.path, self._on_first = Path(folder) / FILE, on_first
        self._file: BinaryIO | None = None
        self._offsets: dict[tuple[str, int], int] = {}  # of each line's first byte
        self._digests: dict[int, str] = {}
        self.used: set[str] = set()

    def __enter__(self) -> "BatchStore":
        """Raises BadInput where another process measures into the folder, and on a damaged file."""
        if self.path.exists():
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """How many batches it holds, under any key."""
        return sum(batch != TREE for _, batch in self._offsets)

    def get(self, key: str, batch: int) -> Record | None:
        """The record of a batch; None where it is still to be measured."""
        self.used.add(key)
        if (key, batch) not in self._offsets:
            return None
        assert self._file is not None
        self._file.seek(self._offsets[key, batch])
        return json.loads(self._file.readline())["measured"]

    def add(self, key: str, batch: int, record: Record) -> None:
        """Keep a batch, on disk when this returns."""
        file = self._file or self._open()
        assert (key, batch) not in self._offsets, "a batch was measured twice"
        offset = file.seek(0, os.SEEK_END)
        file.write(json.dumps({"key": key, "batch": batch, "measured": record}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        self._offsets[key, batch] = offset

    def finish(self) -> None:
        """Drop what the finished report holds; the file is removed where nothing else is in it."""
        if self._file is None:
            return
        offsets = sorted(offset for (key, _), offset in self._offsets.items() if key not in self.used)
        if not offsets:
            self.path.unlink()
            return
        lines = []
        for offset in offsets:
            self._file.seek(offset)
            lines.append(self._file.readline().decode())
        write_text(self.path, "".join(lines))

    def digest_of(self, drafter: Any) -> str:
        """`identity` of a drafter, computed once."""
        if id(drafter) not in self._digests:
            self._digests[id(drafter)] = identity(drafter)
        return self._digests[id(drafter)]

    def _open(self) -> BinaryIO:
        """Positioned after the last whole line; what a kill left behind it is cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = locked(self.path)
        self._on_first()
        file.seek(0)
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                self._offsets[row["key"], row["batch"]] = end
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(f"{self.path}:{number}: damaged; delete this line to measure its batch again") from error
            end += len(line)
        file.truncate(end)
        return file


def settings_key(
    target: Target, drafter: Any, suite: Suite, settings: Record, *, name: str, engine: str, store: BatchStore
) -> str:
    """The key of a measurement: a hash of everything that its figures depend on.

    That is the weights and the config of the target, its dtype and device, the drafter down to its weights, the
    prompts, the settings, the number of threads and the versions. Names too: what a report tells apart is measured
    apart.
    """
    parts = {
        "engine": engine,
        "names": [name, suite.name],
        "target": [target.fingerprint, target.config.to_dict(), sorted(target.eos_token_ids), target.is_adapted],
        "drafter": store.digest_of(drafter),
        "prompts": suite.digest,
        "settings": settings,
        "machine": [str(target.dtype), str(target.device), device_name(target.device), torch.get_num_threads()],
        "versions": [__version__, torch.__version__, transformers.__version__, [part.name for part in fields(Round)]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def kept_in(
    store: BatchStore | None, target: Target, drafter: Any, suite: Suite, config: Any, *, name: str, engine: str
) -> tuple[BatchStore, str] | None:
    """The store, where there is one, and the key of a measurement in it. Args: config: the settings, a dataclass."""
    if store is None:
        return None
    return store, settings_key(target, drafter, suite, asdict(config), name=name, engine=engine, store=store)


def identity(drafter: Any) -> str:
    """Which drafter this is: its class and plain settings, the weights of a head byte by byte, the fingerprint of a
    model."""
    digest = hashlib.sha256(type(drafter).__qualname__.encode())
    if isinstance(drafter, nn.Module):
        digest.update(repr(getattr(drafter, "config", None)).encode())
        for name, value in sorted(drafter.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
    for name, value in sorted(getattr(drafter, "__dict__", {}).items()):
        if isinstance(value, nn.Module):
            digest.update(f"{name} {identity(value)}".encode())
        elif isinstance(value, Target):
            digest.update(f"{name} {value.fingerprint} {value.dtype} {value.config.to_dict()}".encode())
        elif isinstance(value, str | int | float | tuple | None):
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()


def record_of(runs: list[Generation]) -> list[list[Any]]:
    """Repeats of one side: token ids and rounds of each, the fields of a round in their order."""
    return [[run.token_ids, [astuple(done) for done in run.rounds]] for run in runs]


def generations_from(record: list[list[Any]]) -> list[Generation]:
    """The repeats that `record_of` wrote."""
    return [Generation(token_ids, [Round(*done) for done in rounds]) for token_ids, rounds in record]
