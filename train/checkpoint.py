"""Checkpoints: weights and optimizer as safetensors, no pickle; each whole or not there at all."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..configs.errors import BadInput


def save_checkpoint(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, keep: int) -> Path:
    """Write FOLDER/step_N, through a temporary folder, and drop all but the newest `keep`.

    Args: step: optimizer steps done, N.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".step_{step:08d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(
        {name: p.detach().cpu().contiguous() for name, p in head.named_parameters()}, temporary / "head.safetensors"
    )
    state = {}
    for name, parameter in head.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}|{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    save_file(state, temporary / "optimizer.safetensors")
    (temporary / "trainer.json").write_text(json.dumps({"step": step}) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step_*"))


def load_checkpoint(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore weights and optimizer; returns the number of steps done. Raises BadInput on a damaged checkpoint."""
    try:
        weights, state = load_file(folder / "head.safetensors"), load_file(folder / "optimizer.safetensors")
        step = json.loads((folder / "trainer.json").read_text())["step"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"checkpoint {folder}: {str(error).splitlines()[0]}") from error
    parameters = dict(head.named_parameters())
    if weights.keys() != parameters.keys():
        raise BadInput(f"checkpoint {folder}: holds other tensors than this head")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    for name, value in state.items():
        name, _, key = name.rpartition("|")
        on_device = value if key == "step" else value.to(parameters[name].device)
        optimizer.state[parameters[name]][key] = on_device
    return step
