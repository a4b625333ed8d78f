"""Storing finished batches on disk, so that an interrupted measurement resumes where it stopped."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from torch import nn

from ... import __version__
from ...base.files import locked, write_text
from ...base.jsonl import index_appended
from ...targets.target import Target
from ..decoding.loop import Round
from ..figures.environment import device_name
from ..suites.prompts import Suite

FILE = "measured.jsonl"
Record = dict[str, Any]
BEFOREHAND = -1  # the batch number under which a measurement stores what it found before it began


class BatchStore:
    """OUTPUT/measured.jsonl: a line per finished batch, under a key that hashes all that its figures depend on.

    A line is written and synced when all repeats and sides of its batch are done. Lines with other keys, from
    measurements with other settings, are kept. The file exists from the first batch until the report is written. Only
    one process at a time may use it.
    """

    def __init__(self, folder: str | Path, *, on_first: Callable[[], object] = lambda: None):
        """Args: on_first: called when the file is opened or created."""
        self.path, self._on_first = Path(folder) / FILE, on_first
        self._file: BinaryIO | None = None
        self._offsets: dict[tuple[str, int], int] = {}  # of each line's first byte
        self.used: set[str] = set()

    def __enter__(self) -> "BatchStore":
        """Raises BadInput if another process measures into the folder, and on a damaged file."""
        if self.path.exists():
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        """How many batches it holds, under any key."""
        return sum(batch != BEFOREHAND for _, batch in self._offsets)

    def get(self, key: str, batch: int) -> Record | None:
        """The record of a batch; None if it is still to be measured."""
        self.used.add(key)
        if (key, batch) not in self._offsets:
            return None
        assert self._file is not None
        self._file.seek(self._offsets[key, batch])
        return json.loads(self._file.readline())["measured"]

    def add(self, key: str, batch: int, record: Record) -> None:
        """Store a batch; it is on disk when this returns."""
        file = self._file or self._open()
        assert (key, batch) not in self._offsets, "a batch was measured twice"
        offset = file.seek(0, os.SEEK_END)
        file.write(json.dumps({"key": key, "batch": batch, "measured": record}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        self._offsets[key, batch] = offset

    def finish(self) -> None:
        """Drop the batches of the finished report, and the file if nothing else is in it."""
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

    def _open(self) -> BinaryIO:
        """Open and index the file; an incomplete last line, left by a kill, is cut off. Raises as `__enter__`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = locked(self.path)
        self._on_first()
        advice = "delete this line to measure its batch again"
        self._offsets = index_appended(
            file, lambda row: (row["key"], row["batch"]), where=str(self.path), advice=advice
        )
        return file


def settings_key(target: Target, suite: Suite, settings: Record) -> str:
    """The key of a measurement: a hash of everything that its figures depend on.

    These are the target's weights, config, dtype, device and kernels, the prompts, the number of threads, the versions
    and the settings, which have the `identity` of each drafter; also the names there and the suite's, so that results
    that a report distinguishes are measured separately.
    """
    parts = {
        "suite": suite.name,
        "target": [target.fingerprint, target.config.to_dict(), sorted(target.eos_token_ids), target.is_adapted],
        "prompts": suite.digest,
        "settings": settings,
        "machine": [str(target.dtype), str(target.device), device_name(target.device), torch.get_num_threads()],
        "kernels": target.kernels,
        "versions": [__version__, torch.__version__, transformers.__version__, [part.name for part in fields(Round)]],
    }
    text = json.dumps(parts, sort_keys=True, default=lambda value: getattr(value, "__qualname__", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identity(drafter: Any) -> str:
    """A hash that identifies a drafter: its class and plain settings, all bytes of a head's weights, the fingerprint of
    a model."""
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
