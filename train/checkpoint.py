"""Checkpoints: weights and optimizer as safetensors, no pickle; each whole or not there at all.

They hold whole tensors under the head's own names, whatever backend and however many processes trained: another backend
goes on from them.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..configs.errors import BadInput, first_line
from ..heads.base import DraftHead


def save_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Tensor],
    *,
    progress: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write FOLDER/step_N, through a temporary folder, and drop all but the newest `keep`.

    Args: weights: `head_tensors`. optimizer_state: `NAME|KEY` of each parameter. progress: where the run stands, kept
        as trainer.json; `step` is N, the optimizer steps done.
    """
    name = f"step_{progress['step']:08d}"
    final, temporary = folder / name, folder / f".{name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(dict(weights), temporary / "head.safetensors")
    save_file(dict(optimizer_state), temporary / "optimizer.safetensors")
    (temporary / "trainer.json").write_text(json.dumps(progress) + "\n")
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


def remove_partial(folder: Path) -> None:
    """Clear away what a kill left of a checkpoint that was being written."""
    for path in folder.glob(".step_*.partial"):
        shutil.rmtree(path)


def read_progress(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` was told of the run. Raises BadInput on a damaged checkpoint."""
    try:
        progress = json.loads((folder / "trainer.json").read_text())
        assert isinstance(progress["step"], int)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(f"checkpoint {folder}: {first_line(error)}") from error
    return progress


def load_checkpoint(folder: Path, head: DraftHead) -> dict[str, Tensor]:
    """Put the weights into the head; returns the optimizer's state, as `save_checkpoint` was given it.

    Raises: BadInput on a damaged checkpoint, on one of another head, and where the data now give another vocabulary.
    """
    try:
        weights, state = load_file(folder / "head.safetensors"), load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"checkpoint {folder}: {first_line(error)}") from error
    expected = head_tensors(head)
    if weights.keys() != expected.keys():
        raise BadInput(f"checkpoint {folder}: holds other tensors than this head")
    if "draft_token_ids" in weights and not torch.equal(weights["draft_token_ids"], expected["draft_token_ids"]):
        raise BadInput(f"checkpoint {folder}: data.train now gives another draft vocabulary than when it was written")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(weights[name])
    return state
