"""The safetensors files that a target is stored in: the place of each tensor, and the fingerprint of all of them.

Only headers and single values are read, so that a target of any size is known by its files in seconds.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.hub import cached_file

from ...configs.errors import BadInput, first_line
from ..export.tensor_files import read_weight_map

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_VALUES = 64  # of each tensor, that the fingerprint is of
AT_ONCE = 2**17  # bytes up to which a tensor is read in one piece
READERS = 16  # threads, as each value is somewhere else on the disk
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # of others the bytes are read


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    num_bytes: int

    def spread(self) -> Tensor:
        """At most NUM_VALUES of its values, evenly spread."""
        dtype = DTYPES.get(self.dtype, torch.uint8)
        num, size = self.num_bytes // dtype.itemsize, dtype.itemsize
        if num == 0:
            return torch.empty(0)
        step = max(1, num // NUM_VALUES)
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            if self.num_bytes <= AT_ONCE:
                content = os.pread(descriptor, self.num_bytes, self.start)
                return torch.frombuffer(bytearray(content), dtype=dtype)[::step][:NUM_VALUES]
            parts = [os.pread(descriptor, size, self.start + i * step * size) for i in range(NUM_VALUES)]
            return torch.frombuffer(bytearray(b"".join(parts)), dtype=dtype)
        finally:
            os.close(descriptor)


def stored_tensors(path: str, *, revision: str | None = None) -> dict[str, StoredTensor]:
    """The tensors of a local folder or hub id by name. Raises BadInput if it has none, or damaged files."""
    whole, tensors = found_file(path, WHOLE, revision), dict[str, StoredTensor]()
    for file in shards_of(path, revision) if whole is None else [whole]:
        tensors |= read_header(file)
    return tensors


def found_file(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a local folder or hub id; None: it has no such file."""
    if Path(path).is_dir():
        return Path(path, name) if Path(path, name).is_file() else None
    try:
        cached = cached_file(path, name, revision=revision)
    except OSError:  # which transformers raises for a missing file, as for a missing network
        return None
    return None if cached is None else Path(cached)


def shards_of(path: str, revision: str | None) -> list[Path]:
    """The files that a model's index names. Raises BadInput if it has none, or one of them is missing."""
    index = found_file(path, INDEX, revision)
    if index is None:
        raise BadInput(f"target {path}: no {WHOLE} and no {INDEX} in it")
    files = {name: found_file(path, name, revision) for name in sorted(set(read_weight_map(index).values()))}
    for name, file in files.items():
        if file is None:
            raise BadInput(f"target {path}: no {name} in it, which {INDEX} names")
    return [file for file in files.values() if file is not None]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises BadInput if it is damaged."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            first, size = 8 + length, file.stat().st_size
            entries = json.loads(opened.read(length)) if first <= size else {}
        entries.pop("__metadata__", None)
        tensors = {}
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            tensors[name] = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), first + start, end - start)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: damaged: {first_line(error)}") from error
    if first > size or any(tensor.start + tensor.num_bytes > size for tensor in tensors.values()):
        raise BadInput(f"{file}: damaged: shorter than its header says")
    return tensors


def fingerprint_of_stored(tensors: Mapping[str, StoredTensor], *, num_layers: int) -> str:
    """`fingerprint_of_values` of a target's tensors in files: it identifies its weights as stored, in however many
    files, and without the MTP modules that a checkpoint has behind its num_layers layers."""
    own = {name: tensor for name, tensor in tensors.items() if not is_beside(name, num_layers)}
    with ThreadPoolExecutor(READERS) as readers:
        values = readers.map(StoredTensor.spread, own.values())
        return fingerprint_of_values(zip(own, (tensor.shape for tensor in own.values()), values, strict=True))


def is_beside(name: str, num_layers: int) -> bool:
    """Whether a tensor is an MTP module's: it is named so, or stands behind the last layer."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return re.search(r"(?:^|\.)mtp(?:_layers)?\.", name) is not None or (
        layer is not None and int(layer[1]) >= num_layers
    )


def fingerprint_of_values(tensors: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> str:
    """32 hex digits of sha256 over the name, the shape and NUM_VALUES evenly spread values of each tensor."""
    digest = hashlib.sha256()
    for name, shape, spread in sorted(tensors, key=lambda entry: entry[0]):
        digest.update(f"{name} {tuple(shape)}".encode() + spread.float().numpy().tobytes())
    return digest.hexdigest()[:32]
