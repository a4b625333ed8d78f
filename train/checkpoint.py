"""Checkpoints: weights and optimizer state as safetensors (no pickle), in folders that are written atomically.

They hold whole tensors under the head's own names, so that a run can resume with another backend or number of
processes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..base.errors import BadInput, first_line
from ..base.files import remove, replacing_folder, write_json
from ..heads.base import DraftHead
from .watching.trend import Trend


@dataclass
class Best:
    """The best validation of a run so far."""

    step: int = 0
    acceptance_length: float = 0.0  # teacher-forced
    best_due: float = 0.0  # acceptance length of the best that was due
    waited: int = 0  # number of validations since that one that were due

    def take(self, step: int, acceptance_length: float | None, *, is_due: bool = True) -> bool:
        """Record a validation; returns whether it is the best so far. Those that are not due change nothing in the wait
        for a better one, so that a run in slices ends as one at once."""
        length = acceptance_length or 0.0
        if is_due:
            self.waited = 0 if length > self.best_due else self.waited + 1
            self.best_due = max(self.best_due, length)
        if length <= self.acceptance_length:
            return False
        self.step, self.acceptance_length = step, length
        return True


@dataclass(frozen=True)
class Progress:
    """trainer.json of a checkpoint."""

    step: int  # optimizer steps done
    num_processes: int  # that trained it
    best: Best
    trend: Trend
    num_empty: int = 0  # steps' worth of batches that were left out so far, as they had no position to learn


def save_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Tensor],
    *,
    progress: Progress,
    keep: int,
) -> None:
    """Write FOLDER/step_N and remove all checkpoints but the newest `keep`, and those from before the loss diverged.

    Args: weights: `head_tensors`. optimizer_state: by `NAME|KEY`.
    """
    path = folder / f"step_{progress.step:08d}"
    with replacing_folder(path) as temporary:
        save_file(dict(weights), temporary / "head.safetensors")
        save_file(dict(optimizer_state), temporary / "optimizer.safetensors")
        write_json(temporary / "trainer.json", asdict(progress), indent=None)
    first = f"step_{progress.trend.diverges_since:08d}"
    for old in [path for path in checkpoints(folder) if path.name >= first][:-keep]:
        remove(old)


def head_tensors(head: DraftHead) -> dict[str, Tensor]:
    """The trained parameters on the CPU, and the token ids of a cut draft vocabulary."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in head.named_parameters()}
    return tensors if head.vocabulary is None else {**tensors, "draft_token_ids": head.vocabulary.to_target.cpu()}


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob(f"step_{'[0-9]' * 8}"))  # exact, to skip copies that a user made


def read_progress(folder: Path) -> Progress:
    """Raises BadInput on a damaged checkpoint."""
    try:
        raw = json.loads((folder / "trainer.json").read_text())
        best, trend = Best(**raw.get("best", {})), Trend(**raw.get("trend", {}))
        return Progress(int(raw["step"]), int(raw["num_processes"]), best, trend, int(raw.get("num_empty", 0)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"checkpoint {folder}: {first_line(error)}") from error


def load_checkpoint(folder: Path, head: DraftHead) -> dict[str, Tensor]:
    """Load the weights into the head; returns the optimizer's state as passed to `save_checkpoint`.

    Raises: BadInput if the checkpoint is damaged or of another head, or the data now give another draft vocabulary.
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
