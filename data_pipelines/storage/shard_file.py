"""A sample with what is kept of the target's states on it, and the file that holds many of them.

A shard is a safetensors file of these tensors, for R rows of N tokens in all:

  offsets [R + 1], num_cut [R], input_ids [N], flags [N]     flags: the segment, and bits for what follows
  features [n, L, D], features_offsets [R + 1]               of the n tokens that have the bit FEATURES
  post_norm [m, D], post_norm_offsets [R + 1]                of the m tokens that have the bit POST_NORM
  features_scales [n, L], post_norm_scales [m]               in 8 bits, see quantise.py
"""

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...configs.errors import BadInput
from .quantise import SCALE, STORAGE, Packed, unpack
from .samples import Sample

SEGMENT, POST_NORM, FEATURES, SUPERVISED = 0b11, 0b10000, 0b100000, 0b10000000  # of a token's flags
KINDS = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "BF16": np.uint16, "U8": np.uint8}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
PLAIN = {"offsets": "I64", "num_cut": "I32", "input_ids": "I32", "flags": "U8"}


@dataclass
class States:
    """The target's states on one sample, as `heads.target.TargetOutput` without rows: features [T, L, D], post_norm
    [T, D]; zeros where nothing was kept."""

    features: Tensor
    post_norm: Tensor


@dataclass
class Kept:
    """States at some tokens. features_at, post_norm_at: [T] bool; features [n, L, D] and post_norm [m, D], as many as
    are True there. dtype: what they are read as."""

    features_at: np.ndarray
    features: Packed
    post_norm_at: np.ndarray
    post_norm: Packed
    dtype: torch.dtype

    def states(self) -> States:
        return States(
            spread(unpack(self.features, self.dtype), self.features_at),
            spread(unpack(self.post_norm, self.dtype), self.post_norm_at),
        )


def spread(values: Tensor, at: np.ndarray) -> Tensor:
    """values [n, ...] at the tokens [T] that are True: [T, ...], zeros elsewhere."""
    out = values.new_zeros(len(at), *values.shape[1:])
    out[torch.from_numpy(at)] = values
    return out


@dataclass
class Stored:
    """A sample, and what is kept of the target's states on it."""

    sample: Sample
    kept: Kept | None = None

    @cached_property
    def states(self) -> States | None:
        """Made on first use, of this row alone; None where none are kept."""
        return None if self.kept is None else self.kept.states()


def row_bytes(num_tokens: int, *, num_features: int = 0, num_post_norm: int = 0, values: int = 0, item: int = 0) -> int:
    """What a row takes on disk.

    Args: num_features, num_post_norm: vectors that are kept. values: of a vector. item: bytes of a value.
    """
    scale = SCALE.itemsize if item == 1 else 0
    return 12 + 5 * num_tokens + (num_features + num_post_norm) * (values * item + scale)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass
class _Column:
    """One tensor of the file, in pieces along its first dimension."""

    name: str
    kind: str
    shape: list[int]
    pieces: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def write_rows(path: Path, rows: Sequence[Stored], *, metadata: dict[str, Any]) -> dict[str, Any]:
    """Writes a shard, whole or not at all; returns its size in bytes, its checksum and its counts.

    The same rows give the same bytes. BadInput: the disk is full, or cannot be written to.
    """
    columns = sorted(_columns(rows), key=lambda column: -np.dtype(KINDS[column.kind]).itemsize)  # so that all align
    header: dict[str, Any] = {"__metadata__": {"headstart": json.dumps(metadata, sort_keys=True)}}
    end = 0
    for column in columns:
        start, end = end, end + column.num_bytes
        header[column.name] = {"dtype": column.kind, "shape": column.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            pieces = (piece.reshape(-1).view(np.uint8).data for c in columns for piece in c.pieces if piece.nbytes)
            for piece in (len(text).to_bytes(8, "little"), text, *pieces):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise BadInput(f"{path}: {error.strerror}") from error
    return {
        "file": path.name,
        "num_rows": len(rows),
        "num_tokens": sum(len(row.sample) for row in rows),
        "num_supervised_tokens": sum(int(row.sample.loss_mask.sum()) for row in rows),
        "bytes": 8 + len(text) + end,
        "sha256": digest.hexdigest(),
    }


def _columns(rows: Sequence[Stored]) -> list[_Column]:
    samples, kept = [row.sample for row in rows], [row.kept for row in rows if row.kept is not None]
    assert len(kept) in (0, len(rows))
    num_tokens = sum(map(len, samples))
    flags = [sample.segments | np.where(sample.loss_mask, SUPERVISED, 0).astype(np.uint8) for sample in samples]
    if kept:
        for flag, one in zip(flags, kept, strict=True):
            flag |= np.where(one.features_at, FEATURES, 0).astype(np.uint8)
            flag |= np.where(one.post_norm_at, POST_NORM, 0).astype(np.uint8)
    columns = [
        _offsets("offsets", map(len, samples)),
        _Column("num_cut", "I32", [len(rows)], [np.array([sample.num_cut for sample in samples], dtype=np.int32)]),
        _Column("input_ids", "I32", [num_tokens], [np.ascontiguousarray(s.input_ids, np.int32) for s in samples]),
        _Column("flags", "U8", [num_tokens], flags),
    ]
    for name in ("features", "post_norm") if kept else ():
        packed: list[Packed] = [getattr(one, name) for one in kept]
        columns.append(_offsets(f"{name}_offsets", (len(one.values) for one in packed)))
        columns.append(_tensors(name, [one.values for one in packed]))
        if packed[0].scales is not None:
            columns.append(_tensors(f"{name}_scales", [one.scales for one in packed if one.scales is not None]))
    return columns


def _offsets(name: str, lengths: Any) -> _Column:
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return _Column(name, "I64", [len(ends)], [ends])


def _tensors(name: str, tensors: list[Tensor]) -> _Column:
    shape = [sum(map(len, tensors)), *tensors[0].shape[1:]]
    pieces = [tensor.contiguous().flatten().view(torch.uint8).numpy() for tensor in tensors]
    return _Column(name, NAMES[tensors[0].dtype], shape, pieces)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class RowFile:
    """A shard, mapped into memory: what is not asked for is not read.

    BadInput, which names the file: it is missing, truncated, or not one of ours.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 8 < length <= size - 8 else {}
            self.metadata: dict[str, Any] = json.loads(header.pop("__metadata__")["headstart"])
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bytes = np.frombuffer(self._map, np.uint8)
            self._arrays = {name: self._array(8 + length, **entry) for name, entry in header.items()}
            end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        except FileNotFoundError as error:
            raise BadInput(f"{path}: no such file") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path}: damaged: not the shard that was written there") from error
        if end != size or not PLAIN.keys() <= self._arrays.keys():
            raise BadInput(f"{path}: damaged: {size} bytes, its header says {end}")
        self.has_states = "features" in self._arrays

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self._arrays["offsets"])

    def forget(self) -> None:
        """Gives back the memory of what was read; it stays in the system's cache of files."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def row(self, index: int) -> Stored:
        arrays = self._arrays
        here = slice(*arrays["offsets"][index : index + 2].tolist())
        flags = arrays["flags"][here]  # [T]
        sample = Sample(
            input_ids=arrays["input_ids"][here],
            segments=flags & np.uint8(SEGMENT),
            loss_mask=(flags & np.uint8(SUPERVISED)) != 0,
            num_cut=int(arrays["num_cut"][index]),
        )
        if not self.has_states:
            return Stored(sample)
        kept = Kept(
            (flags & np.uint8(FEATURES)) != 0,
            self._packed("features", index),
            (flags & np.uint8(POST_NORM)) != 0,
            self._packed("post_norm", index),
            getattr(torch, self.metadata["dtype"]),
        )
        return Stored(sample, kept)

    def _packed(self, name: str, index: int) -> Packed:
        here = slice(*self._arrays[f"{name}_offsets"][index : index + 2].tolist())
        scales = self._arrays.get(f"{name}_scales")
        values = _tensor(self._arrays[name][here], STORAGE[self.metadata["storage_dtype"]])
        return Packed(values, None if scales is None else _tensor(scales[here], SCALE))

    def _array(self, start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
        first, last = data_offsets
        return self._bytes[start + first : start + last].view(KINDS[dtype]).reshape(shape)


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.asarray(array)).view(dtype)
