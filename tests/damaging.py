"""Faults in exported heads, folders and GGUF files: each changes a config and tensors, which are then written back."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Fault = Callable[[dict[str, Any], dict[str, Any]], Any]


def key(name: str, value: Any) -> Fault:
    """Sets config[name], dots going down unless it is there as it is; `...` takes it out."""

    def fault(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        *path, last = [name] if name in config else name.split(".")
        for part in path:
            config = config[part]
        config.pop(last) if value is ... else config.update({last: value})

    return fault


def drop(name: str) -> Fault:
    return lambda config, tensors: tensors.pop(name)


def put(name: str, change: Callable[[Any], Any]) -> Fault:
    """Changes a tensor, which is None where it is not there."""
    return lambda config, tensors: tensors.update({name: change(tensors.get(name))})


def at_first(value: Any) -> Callable[[Any], Any]:
    """Changes the first value of a tensor."""

    def change(tensor: Any) -> Any:
        tensor = copy.deepcopy(tensor)
        tensor.reshape(-1)[0] = value
        return tensor

    return change


def rewritten(folder: Path, fault: Fault, *, weights: str = "model.safetensors") -> Path:
    """The folder, with a fault in its config and in one of its files of tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: value.clone() for name, value in load_file(folder / weights).items()}  # no map of the file
    fault(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / weights)
    return folder
