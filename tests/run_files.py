"""What training left in a run folder, and what is in any folder, as tests of several folders read it."""

from pathlib import Path
from typing import Any

from headstart.base.jsonl import read_appended
from headstart.targets.weights.stored import indexed_tensors
from headstart.train.watching.speed import StepSpeed
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


def metrics(folder: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl but for how long they took. Args: keys: of these alone, if any."""
    speed, rows = StepSpeed.__dataclass_fields__, read_appended(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in speed and (not keys or k in keys)} for row in rows]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder) if "loss" in row]


def validations(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, figures) of each."""
    return [(row["step"], row["validation"]) for row in metrics(folder) if "validation" in row]


def final(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the head, its adapter's too."""
    return {name: t for path in sorted((folder / "final").glob("*.safetensors")) for name, t in load_file(path).items()}


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model's folder."""
    found = {}
    for name, tensor in indexed_tensors(folder).items():
        with safe_open(tensor.file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def contents(folder: Path, *, but: str = "") -> dict[str, bytes]:
    """Every file below a folder by its name there. Args: but: a file name that is left out."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != but]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
