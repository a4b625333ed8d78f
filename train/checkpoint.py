"""Checkpoints: weights and optimizer as safetensors, no pickle; each whole or not there at all."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..configs.errors import BadInput, first_line
from ..heads.base import DraftHead


def save_checkpoint(folder: Path, head: DraftHead, optimizer: torch.optim.Optimizer, *, step: int, keep: int) -> Path:
    """Write FOLDER/step_N, through a temporary folder, and drop all but the newest `keep`.

    Args: step: optimizer steps done, N.
    """
    final = folder / f"step_{step:08d}"
    temporary = folder / f".step_{step:08d}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(head_tensors(head), temporary / "head.safetensors")
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


def head_tensors(head: DraftHead) -> dict[str, Tensor]:
    """The trained parameters on the CPU, and which tokens a cut draft vocabulary holds."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in head.named_parameters()}
    return tensors if head.vocabulary is None else {**tensors, "draft_token_ids": head.vocabulary.to_target.cpu()}


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step_*"))


def load_checkpoint(folder: Path, head: DraftHead, optimizer: torch.optim.Optimizer) -> int:
    """Restore weights and optimizer; returns the number of steps done.

    Raises: BadInput on a damaged checkpoint, on one of another head, and where the data now give another vocabulary.
    """
    try:
        weights, state = load_file(folder / "head.safetensors"), load_file(folder / "optimizer.safetensors")
        step = json.loads((folder / "trainer.json").read_text())["step"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"checkpoint {folder}: {first_line(error)}") from error
    expected = head_tensors(head)
    if weights.keys() != expected.keys():
        raise BadInput(f"checkpoint {folder}: holds other tensors than this head")
    if "draft_token_ids" in weights and not torch.equal(weights["draft_token_ids"], expected["draft_token_ids"]):
        raise BadInput(f"checkpoint {folder}: data.train now gives another draft vocabulary than when it was written")
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    # a fused optimizer counts its steps on the device
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, value in state.items():
        name, _, key = name.rpartition("|")
        on_device = value.to(parameters[name].device) if fused or key != "step" else value
        optimizer.state[parameters[name]][key] = on_device
    return step
