"""Digests of the weights and of the vocabulary of a folder or hub id: both sides of a served extraction compute them.

Imports only what every environment with vLLM has, and nothing of headstart.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUM_VALUES = 64  # of each tensor, evenly spread
READERS = 16  # threads, as each value is somewhere else on the disk
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # of others the bytes are read


def weights_digest(path: str, revision: str | None = None) -> str:
    """32 hex digits of sha256 over the name, the shape and 64 evenly spread values of each stored tensor.

    Raises: OSError or ValueError if the files are missing or damaged.
    """
    digest = hashlib.sha256()
    tensors = sorted(_tensors(path, revision))
    with ThreadPoolExecutor(READERS) as readers:
        values = readers.map(lambda tensor: _spread(*tensor[2:]), tensors)
        for (name, shape, *_), spread in zip(tensors, values, strict=True):
            digest.update(f"{name} {shape}".encode() + spread.float().numpy().tobytes())
    return digest.hexdigest()[:32]


def vocabulary_digest(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> str:
    """32 hex digits of sha256 over the tokens of a tokenizer and their ids: what token ids mean."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    return digest_of_vocabulary(tokenizer)


def digest_of_vocabulary(tokenizer: Any) -> str:
    """`vocabulary_digest` of a tokenizer that is loaded."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _tensors(path: str, revision: str | None) -> Iterator[tuple[str, tuple[int, ...], str, str, int, int]]:
    """Of each stored tensor its name, shape, dtype, file, first byte in it and number of bytes."""
    whole = _file(path, WHOLE, revision)
    index = None if whole else _file(path, INDEX, revision)
    if index is not None:
        named = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        files = [_file(path, name, revision) for name in named]
    else:
        files = [whole]
    for file in files:
        if file is None:
            raise FileNotFoundError(f"{path}: no safetensors files, or not all that {INDEX} names")
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            entries = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            yield name, tuple(entry["shape"]), entry["dtype"], file, 8 + length + start, end - start


def _file(path: str, name: str, revision: str | None) -> str | None:
    """A file of a local folder or hub id; None: it has no such file."""
    if Path(path).is_dir():
        return str(Path(path, name)) if Path(path, name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        return cached_file(path, name, revision=revision)
    except OSError:
        return None


def _spread(kind: str, file: str, start: int, num_bytes: int) -> Tensor:
    """At most NUM_VALUES of a tensor's values."""
    dtype = DTYPES.get(kind, torch.uint8)
    size = dtype.itemsize
    num = num_bytes // size
    step = max(1, num // NUM_VALUES)
    chosen = range(0, num, step)[:NUM_VALUES]
    if not chosen:
        return torch.empty(0)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        parts = [os.pread(descriptor, size, start + i * size) for i in chosen]
    finally:
        os.close(descriptor)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=dtype)
