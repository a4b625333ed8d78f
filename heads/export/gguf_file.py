"""A GGUF file as its header says it is: keys, and shapes, types and values of tensors."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.errors import BadInput, first_line
from ..importing.gguf import check_gguf

SMALL = 1 << 22  # elements of a tensor whose values are looked at; larger ones are sampled


@dataclass
class GgufFile:
    """What a file says of itself. shapes are [rows, columns], as PyTorch has them; lengths, those of arrays of text."""

    keys: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # F32, BF16, Q8_0, ...
    stored: dict[str, Any] = field(default_factory=dict)  # of the reader
    problem: str | None = None  # with the file itself

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture"))

    def own(self, key: str) -> Any:
        """A key of the architecture."""
        return self.keys.get(f"{self.architecture}.{key}")

    def values(self, name: str) -> np.ndarray:
        """A tensor's numbers, dequantised; none of a type that the package gguf cannot read."""
        from gguf.quants import dequantize

        tensor = self.stored[name]
        part = tensor.data if tensor.n_elements <= SMALL else tensor.data[:: tensor.n_elements // SMALL + 1]
        try:
            return part if part.dtype.kind == "i" else dequantize(part, tensor.tensor_type)
        except NotImplementedError:
            return np.empty(0)


def read_gguf(path: Path) -> GgufFile:
    """Raises BadInput where it is no GGUF file at all, or the package gguf is missing."""
    check_gguf(path)
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)  # the package takes seconds for a vocabulary, and a command asks for one file several times
def _read(path: Path, size: int, mtime_ns: int) -> GgufFile:
    """size, mtime_ns: of the file as it is now, by which another one of the same name is read anew."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadInput(f"{path}: needs the package gguf (pip install gguf)") from error
    found = GgufFile()
    try:
        reader = GGUFReader(path)
    except Exception as error:  # a damaged file makes the reader raise errors of many kinds
        found.problem = f"not a whole GGUF file: {first_line(error)}"
        return found
    for key, entry in reader.fields.items():
        parts = [entry.parts[i] for i in entry.data]
        if entry.types and entry.types[-1].name == "STRING":
            found.lengths[key] = len(parts)
            found.keys[key] = bytes(parts[0]).decode(errors="replace") if len(entry.types) == 1 else None
        else:
            values = [part[0].item() for part in parts]
            found.keys[key] = values if entry.types and entry.types[0].name == "ARRAY" else next(iter(values), None)
    for tensor in reader.tensors:
        found.stored[tensor.name], found.kinds[tensor.name] = tensor, tensor.tensor_type.name
        found.shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))
    return found
