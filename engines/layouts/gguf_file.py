"""Reading a GGUF file: its keys, and shapes and values of its tensors."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput, first_line
from ...targets.weights.gguf import check_gguf

SMALL = 1 << 22  # elements up to which all of a tensor's values are read; of larger ones a sample of rows


@dataclass
class GgufFile:
    """The contents of a file. shapes: [rows, columns], as in PyTorch. lengths: number of entries of each text key."""

    keys: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)  # the reader's tensor objects
    problem: str | None = None  # why the file cannot be read

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture"))

    def own(self, key: str) -> Any:
        """The value of an architecture's own key; None if it is missing."""
        return self.keys.get(f"{self.architecture}.{key}")

    def values(self, name: str) -> np.ndarray:
        """A tensor's values, dequantised; empty if the package gguf cannot read its type."""
        from gguf.quants import dequantize

        tensor = self.stored[name]
        part = tensor.data if tensor.n_elements <= SMALL else tensor.data[:: tensor.n_elements // SMALL + 1]
        try:
            return part if part.dtype.kind == "i" else dequantize(part, tensor.tensor_type)
        except NotImplementedError:
            return np.empty(0)


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file; `problem` is set if it is damaged.

    Raises: BadInput if it is not a GGUF file or the package gguf is missing.
    """
    check_gguf(path)
    stat = path.stat()
    return _read_gguf(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)  # the package takes seconds for a vocabulary, and a command asks for one file several times
def _read_gguf(path: Path, size: int, mtime_ns: int) -> GgufFile:
    """size, mtime_ns: of the file as it is now, by which another one of the same name is read anew."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadInput(f"{path}: needs the package gguf (pip install gguf)") from error
    file = GgufFile()
    try:
        reader = GGUFReader(path)
    except Exception as error:  # a damaged file makes the reader raise errors of many kinds
        file.problem = f"not a whole GGUF file: {first_line(error)}"
        return file
    for key, entry in reader.fields.items():
        parts = [entry.parts[i] for i in entry.data]
        if entry.types and entry.types[-1].name == "STRING":
            file.lengths[key] = len(parts)
            file.keys[key] = bytes(parts[0]).decode(errors="replace") if len(entry.types) == 1 else None
        else:
            values = [part[0].item() for part in parts]
            file.keys[key] = values if entry.types and entry.types[0].name == "ARRAY" else next(iter(values), None)
    for tensor in reader.tensors:
        file.stored[tensor.name] = tensor
        file.shapes[tensor.name] = tuple(int(size) for size in reversed(tensor.shape))
    return file
