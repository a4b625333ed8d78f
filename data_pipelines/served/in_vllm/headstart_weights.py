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

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
AT_ONCE = 2**24  # bytes that are read at a time
READERS = 16  # threads, each with a tensor of its own


def weights_digest(path: str, revision: str | None = None, whole: str = WHOLE) -> str:
    """40 hex digits of sha256 over the name, the dtype, the shape and the sha256 of each stored tensor.

    Args: whole: the name of a file that holds all of them, where there is one.
    Raises: OSError or ValueError if the files are missing or damaged.
    """
    digest = hashlib.sha256()
    tensors = sorted(_tensors(path, revision, whole))
    with ThreadPoolExecutor(READERS) as readers:
        contents = readers.map(lambda tensor: _digest(*tensor[3:]), tensors)
        for (name, dtype, shape, *_), content in zip(tensors, contents, strict=True):
            digest.update(f"{name} {dtype} {shape} {content}\n".encode())
    return digest.hexdigest()[:40]


def vocabulary_digest(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> str:
    """32 hex digits of sha256 over the tokens of a tokenizer and their ids: what token ids mean."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    return digest_of_vocabulary(tokenizer)


def digest_of_vocabulary(tokenizer: Any) -> str:
    """`vocabulary_digest` of a tokenizer that is loaded."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _tensors(path: str, revision: str | None, name: str) -> Iterator[tuple[str, str, tuple[int, ...], str, int, int]]:
    """Lists each stored tensor: its name, dtype, shape, file, first byte in it and number of bytes."""
    whole = _file(path, name, revision)
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
            yield name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + start, end - start


def _file(path: str, name: str, revision: str | None) -> str | None:
    """A file of a local folder or hub id; None: it has no such file."""
    if Path(path).is_dir():
        return str(Path(path, name)) if Path(path, name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        return cached_file(path, name, revision=revision)
    except OSError:
        return None


def _digest(file: str, start: int, num_bytes: int) -> str:
    """The sha256 of a tensor's bytes."""
    digest, end = hashlib.sha256(), start + num_bytes
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for at in range(start, end, AT_ONCE):
            digest.update(os.pread(descriptor, min(AT_ONCE, end - at), at))
    finally:
        os.close(descriptor)
    return digest.hexdigest()
