"""The safetensors files that a target is stored in: the place of each tensor, and the fingerprint of all of them.

The fingerprint is of all bytes. They are read once: the digests of a file's tensors are kept in the user's cache by the
file's path, size and time of change.
"""

import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from ...base.errors import BadInput, first_line
from ...base.files import cache_root, write_json
from .tensor_files import read_weight_map

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AT_ONCE = 2**24  # bytes that are read at a time
READERS = 16  # threads, each with a tensor of its own
SETTLED = 2.0  # seconds since a file's last change, before which another change may bear the same time
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # of others the bytes are read
PLAIN = ("F64", "F32", "F16", "BF16")  # weights that are not quantised


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str  # as safetensors names it: F32, BF16, ...
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    num_bytes: int

    def digest(self) -> str:
        """The sha256 of its bytes, in hex digits."""
        digest, end = hashlib.sha256(), self.start + self.num_bytes
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            for start in range(self.start, end, AT_ONCE):
                digest.update(os.pread(descriptor, min(AT_ONCE, end - start), start))
        finally:
            os.close(descriptor)
        return digest.hexdigest()


def stored_tensors(path: str, *, revision: str | None = None) -> dict[str, StoredTensor]:
    """The tensors of a local folder or hub id by name. Raises BadInput if it has none, or damaged files."""
    whole, tensors = found_file(path, WHOLE, revision), dict[str, StoredTensor]()
    for file in shards_of(path, revision) if whole is None else [whole]:
        tensors |= read_header(file)
    return tensors


def indexed_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint's folder by name, as engines read it: where it has an index, those that this names,
    MTP modules in a file of their own among them. Raises BadInput if a file cannot be read."""
    index = Path(folder, INDEX)
    names = sorted(set(read_weight_map(index).values())) if index.is_file() else [WHOLE]
    return {name: tensor for file in names for name, tensor in read_header(Path(folder, file)).items()}


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


def fingerprint_of_stored(tensors: Mapping[str, StoredTensor], *, num_layers: int | None = None) -> str:
    """`fingerprint_of_digests` of a target's tensors in files: it identifies its weights as stored, in however many
    files, and without the MTP modules that a checkpoint has behind its num_layers layers (None: with them)."""
    own = {name: one for name, one in tensors.items() if num_layers is None or not is_beside(name, num_layers)}
    digests = digests_of(tensors)
    return fingerprint_of_digests((name, one.dtype, one.shape, digests[name]) for name, one in own.items())


def digests_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """`StoredTensor.digest` of each tensor by name; those of files that did not change since they were kept are not
    computed again. A cache that cannot be written keeps nothing."""
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(READERS) as readers:
        for file in sorted({tensor.file for tensor in tensors.values()}):
            names = [name for name, tensor in tensors.items() if tensor.file == file]
            path = cache_root() / "digests" / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"
            stat = file.stat()
            state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            known = kept_digests(path, state)
            missing = [name for name in names if name not in known]
            known |= zip(missing, readers.map(lambda name: tensors[name].digest(), missing), strict=True)
            if missing and time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED:
                with suppress(OSError):
                    write_json(path, {"file": str(file.resolve()), "state": state, "digests": known}, indent=None)
            digests |= {name: known[name] for name in names}
    return digests


def kept_digests(path: Path, state: list[int]) -> dict[str, str]:
    """The digests that were kept of a file in this state; none if there are none, or they are damaged."""
    try:
        kept = json.loads(path.read_text())
        return {str(name): str(digest) for name, digest in kept["digests"].items()} if kept["state"] == state else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def is_beside(name: str, num_layers: int) -> bool:
    """Whether a tensor is an MTP module's: it is named so, or stands behind the last layer."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return re.search(r"(?:^|\.)mtp(?:_layers)?\.", name) is not None or (
        layer is not None and int(layer[1]) >= num_layers
    )


def fingerprint_of_digests(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """40 hex digits of sha256 over the name, the dtype, the shape and the digest of all bytes of each tensor."""
    digest = hashlib.sha256()
    for name, dtype, shape, content in sorted(tensors):
        digest.update(f"{name} {dtype} {tuple(shape)} {content}\n".encode())
    return digest.hexdigest()[:40]
