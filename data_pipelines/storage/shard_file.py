"""The file format of a shard: samples, optionally with the target's hidden states at some of their tokens.

A shard is a safetensors file with these tensors, for R rows with N tokens in total:

  offsets [R + 1], input_ids [N], flags [N]      flags: bits of SEGMENT, SUPERVISED, FEATURES, POST_NORM
  features [n, L, D], features_offsets [R + 1]   states of the n tokens with the bit FEATURES
  post_norm [m, D], post_norm_offsets [R + 1]    states of the m tokens with the bit POST_NORM
  features_scales [n, L], post_norm_scales [m]   only if stored with 8 bits, see quantise.py
  pictures [p], pictures_offsets [R + 1]         JSON of each row's pictures, only if a row has some
  shift [N]                                      of `TargetOutput`, only if a row has one

offsets[r] and offsets[r + 1] are the first and the end index of row r.
"""

import hashlib
import json
import mmap
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import BadInput
from ...base.files import replacing
from ...targets.layers.target_output import TargetOutput
from ..rows.samples import Sample
from .quantise import SCALE, STORAGE, Packed, unpack

SEGMENT, POST_NORM, FEATURES, SUPERVISED = 0b11, 0b10000, 0b100000, 0b10000000  # bits of a token's flags
KINDS = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "BF16": np.uint16, "U8": np.uint8}
NAMES = dict(zip((torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8), KINDS, strict=True))
PLAIN = {"offsets", "input_ids", "flags"}  # tensors that every shard has


@dataclass
class PackedStates:
    """The stored states of one sample."""

    features_at: np.ndarray  # [T] bool: positions with stored features
    features: Packed  # [n, L, D], in the order of these n positions
    post_norm_at: np.ndarray  # [T] bool: positions with stored post_norm
    post_norm: Packed  # [m, D]
    dtype: torch.dtype  # of the unpacked states: the target's
    shift: np.ndarray | None = None  # [T] of `TargetOutput`

    def unpacked(self) -> TargetOutput:
        """Features [T, L, D] and post_norm [T, D] of the sample, zero at positions that were not stored."""
        return TargetOutput(
            scattered(unpack(self.features, self.dtype), self.features_at),
            scattered(unpack(self.post_norm, self.dtype), self.post_norm_at),
            shift=None if self.shift is None else torch.from_numpy(self.shift.astype(np.int64)),
        )


def scattered(values: Tensor, at: np.ndarray) -> Tensor:
    """values [n, ...], at [T] bool with n True -> [T, ...]: the values at the True positions, zeros elsewhere."""
    out = values.new_zeros(len(at), *values.shape[1:])
    out[torch.from_numpy(at)] = values
    return out


@dataclass
class StoredSample:
    """A sample with its stored states, if there are any."""

    sample: Sample
    packed: PackedStates | None = None

    @cached_property
    def states(self) -> TargetOutput | None:
        """The states, unpacked on first use; None if none are stored."""
        return None if self.packed is None else self.packed.unpacked()


def row_bytes(num_tokens: int, *, num_vectors: int = 0, vector_size: int = 0, item_bytes: int = 0) -> int:
    """Bytes of a row on disk. Args: num_vectors: stored vectors of vector_size values with item_bytes bytes each."""
    scale = SCALE.itemsize if item_bytes == 1 else 0
    return 8 + 5 * num_tokens + num_vectors * (vector_size * item_bytes + scale)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(frozen=True)
class ShardEntry:
    """A manifest's entry for a shard."""

    file: str
    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    bytes: int
    sha256: str


def write_shard(path: Path, rows: Sequence[StoredSample], *, metadata: dict[str, Any]) -> ShardEntry:
    """Write a shard; the same rows and metadata give the same bytes. Raises BadInput if the file cannot be written."""
    # the largest items first, so that every tensor is aligned
    columns = dict(sorted(_columns(rows).items(), key=lambda column: -column[1][0].itemsize))
    header: dict[str, Any] = {"__metadata__": {"headstart": json.dumps(metadata, sort_keys=True)}}
    end = 0
    for name, pieces in columns.items():
        start, end = end, end + sum(piece.nbytes for piece in pieces)
        shape = [sum(map(len, pieces)), *pieces[0].shape[1:]]
        header[name] = {"dtype": NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            tensors = (piece for pieces in columns.values() for piece in pieces if piece.nbytes)
            data = (tensor.contiguous().flatten().view(torch.uint8).numpy().data for tensor in tensors)
            for piece in chain((len(text).to_bytes(8, "little"), text), data):
                digest.update(piece)
                file.write(piece)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    return ShardEntry(
        file=path.name,
        num_rows=len(rows),
        num_tokens=sum(len(row.sample) for row in rows),
        num_supervised_tokens=sum(int(row.sample.loss_mask.sum()) for row in rows),
        bytes=8 + len(text) + end,
        sha256=digest.hexdigest(),
    )


def _columns(rows: Sequence[StoredSample]) -> dict[str, list[Tensor]]:
    """The tensors of the file by name, each as a list of pieces to concatenate along the first dimension."""
    samples, states = [row.sample for row in rows], [row.packed for row in rows if row.packed is not None]
    assert len(states) in (0, len(rows))
    flags = [sample.segments | np.where(sample.loss_mask, SUPERVISED, 0).astype(np.uint8) for sample in samples]
    for row_flags, row in zip(flags, states, strict=False):
        row_flags |= np.where(row.features_at, FEATURES, 0).astype(np.uint8)
        row_flags |= np.where(row.post_norm_at, POST_NORM, 0).astype(np.uint8)
    columns = {
        "offsets": [_offsets(samples)],
        "input_ids": [torch.tensor(sample.input_ids, dtype=torch.int32) for sample in samples],
        "flags": [torch.from_numpy(row_flags) for row_flags in flags],
    }
    if any(sample.pictures for sample in samples):
        texts = [np.frombuffer(json.dumps(sample.pictures).encode(), np.uint8) for sample in samples]
        columns["pictures"] = [torch.tensor(text) for text in texts]
        columns["pictures_offsets"] = [_offsets(texts)]
    if any(row.shift is not None for row in states):
        shifts = [
            np.zeros(len(one), np.int32) if row.shift is None else row.shift
            for one, row in zip(samples, states, strict=True)
        ]
        columns["shift"] = [torch.from_numpy(shift.astype(np.int32)) for shift in shifts]
    for name in ("features", "post_norm") if states else ():
        packed: list[Packed] = [getattr(row, name) for row in states]
        columns[f"{name}_offsets"] = [_offsets([row.values for row in packed])]
        columns[name] = [row.values for row in packed]
        if packed[0].scales is not None:
            columns[f"{name}_scales"] = [row.scales for row in packed if row.scales is not None]
    return columns


def _offsets(rows: Sequence[Sized]) -> Tensor:
    return torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class RowFile:
    """A shard mapped into memory: only the bytes of the rows that are used are read."""

    def __init__(self, path: Path):
        """Raises BadInput, naming the file, if it is missing, truncated or not a shard."""
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
            raise BadInput(f"{path}: damaged: cannot be read as a shard") from error
        if end != size or not PLAIN <= self._arrays.keys():
            raise BadInput(f"{path}: damaged: {size} bytes, by its header {end}")
        self.has_states = "features" in self._arrays

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self._arrays["offsets"])

    def forget(self) -> None:
        """Release the memory of rows that were read; the system's file cache may keep them."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def row(self, index: int) -> StoredSample:
        arrays = self._arrays
        here = slice(*arrays["offsets"][index : index + 2].tolist())
        flags = arrays["flags"][here]  # [T]
        sample = Sample(
            input_ids=arrays["input_ids"][here],
            segments=flags & np.uint8(SEGMENT),
            loss_mask=(flags & np.uint8(SUPERVISED)) != 0,
            pictures=self._pictures(index),
        )
        if not self.has_states:
            return StoredSample(sample)
        packed = PackedStates(
            (flags & np.uint8(FEATURES)) != 0,
            self._packed("features", index),
            (flags & np.uint8(POST_NORM)) != 0,
            self._packed("post_norm", index),
            getattr(torch, self.metadata["dtype"]),
            np.array(self._arrays["shift"][here]) if "shift" in self._arrays else None,
        )
        return StoredSample(sample, packed)

    def _pictures(self, index: int) -> tuple[str, ...]:
        if "pictures" not in self._arrays:
            return ()
        here = slice(*self._arrays["pictures_offsets"][index : index + 2].tolist())
        return tuple(json.loads(self._arrays["pictures"][here].tobytes()))

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
