"""The safetensors files of a folder: where each tensor is, its shape and dtype, read from the headers alone."""

import re
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...base.errors import BadInput, first_line
from ...base.jsonl import loads

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")


@dataclass
class TensorFiles:
    """All tensors of a folder, by name."""

    files: dict[str, Path] = field(default_factory=dict)  # the file that holds each
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # as safetensors names them: F32, BF16, ...
    problems: list[str] = field(default_factory=list)  # with the files themselves, a line each

    @property
    def floats(self) -> list[str]:
        return [name for name, dtype in self.dtypes.items() if dtype.startswith(("F", "BF"))]

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)


def read_tensor_files(folder: Path) -> TensorFiles:
    """All tensors of a folder, and the problems of its files."""
    stored = TensorFiles()
    paths = sorted(folder.glob("*.safetensors"))
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES:
            stored.problems.append(f"{path.name}: a pickle, which can run code: weights belong in safetensors")
    if not paths:
        stored.problems.append("no safetensors file in it")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (a method of safetensors, not a dict)
                    if name in stored.files:
                        stored.problems.append(f"{path.name}: tensor {name} is in {stored.files[name].name} too")
                    part = opened.get_slice(name)
                    stored.files[name] = path
                    stored.shapes[name], stored.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        except (OSError, SafetensorError) as error:
            what = "a pickle under that name" if is_pickle(path) else first_line(error)
            stored.problems.append(f"{path.name}: not a whole safetensors file: {what}")
    check_index(folder, stored)
    return stored


def is_pickle(path: Path) -> bool:
    """Whether a file starts like a pickle or like torch.save's archive; one that cannot be read does not."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:
        return False
    return start.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")) or start == b"PK\x03\x04"


def read_weight_map(path: Path) -> dict[str, str]:
    """The file name of each tensor, from a safetensors index. Raises BadInput if the index is damaged."""
    try:
        index = loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: no index of tensors: {first_line(error)}") from error
    wrong = next((name for name in index if not isinstance(index[name], str)), None) if isinstance(index, dict) else ""
    if wrong is not None:
        raise BadInput(f"{path}: no index of tensors: weight_map{f'.{wrong}' * bool(wrong)} is no file name")
    strange = next((file for file in index.values() if file != Path(file).name), None)
    if strange is not None:
        raise BadInput(f"{path}: names {strange!r}, which is no file of this folder")
    return index


def check_index(folder: Path, stored: TensorFiles) -> None:
    """Add the contradictions between a folder's index, if it has one, and its files to the problems."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    try:
        index = read_weight_map(path)
    except BadInput as error:
        stored.problems.append(f"{error}".removeprefix(f"{path.parent}/"))
        return
    held = {name: file.name for name, file in stored.files.items()}
    missing = [file for file in sorted(set(index.values())) if not (folder / file).is_file()]
    moved = [name for name in sorted(index.keys() & held.keys()) if index[name] != held[name]]
    unheld = [name for name in sorted(index.keys() - held.keys()) if index[name] not in missing]
    problems = [f"names {file}, which is not there" for file in missing]
    problems += [f"has {name} in {index[name]}, it is in {held[name]}" for name in moved]
    problems += [f"lacks {name}, so engines do not load it" for name in sorted(held.keys() - index.keys())]
    problems += [f"names {name}, which {index[name]} does not hold" for name in unheld]
    stored.problems += [f"{path.name}: {problem}" for problem in problems]


def views_on_disk(state: dict[str, Tensor], where: Container[str]) -> dict[str, Tensor]:
    """Views of our tensors under the checkpoint's names: transformers keeps all experts of a layer in one tensor,
    checkpoints store one tensor per expert."""
    views: dict[str, Tensor] = {}
    for name, value in state.items():
        match = None if name in where else re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if match is None:
            views[name] = value
            continue
        stem, kind = match.groups()
        for i, expert in enumerate(value):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if kind == "gate_up" else [("down", expert)]
            views |= {f"{stem}.{i}.{part}_proj.weight": view for part, view in parts}
    return views
