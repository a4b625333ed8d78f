"""Where a run's figures go: metrics.jsonl, the progress bar and, when asked for, Weights & Biases and TensorBoard."""

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..configs.errors import BadInput
from ..configs.files import write_text
from ..configs.jsonl import read_appended
from .config import RunConfig, TrainConfig


def check_trackers(config: TrainConfig) -> None:
    """Raises BadInput if a package that the run is to log with is missing."""
    wanted = (("wandb_project", "wandb", config.wandb_project), ("tensorboard", "tensorboard", config.tensorboard))
    for key, package, is_wanted in wanted:
        if is_wanted:
            try:
                import_module(package)
            except ImportError as error:
                raise BadInput(f"train.{key}: needs {package}: pip install {package}") from error


class Tracker:
    """Writes metrics in the main process; elsewhere every call is a no-op.

    metrics.jsonl has one row per logged training step (`step`, `loss`, ...) and one per validation (`step`,
    `validation`). `step` counts completed optimizer steps. On resume, rows beyond the checkpoint are dropped first, so
    that the curves of interrupted and uninterrupted runs are equal.
    """

    def __init__(self, folder: Path, *, num_steps: int, first_step: int, is_main: bool, console: Console):
        self.folder, self.first_step, self.is_main = folder, first_step, is_main
        self.wandb: Any = None
        self.board: Any = None
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
        is_shown = is_main and console.is_terminal
        self.progress = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not is_shown)
        self.task = self.progress.add_task("training", total=num_steps, completed=first_step, figures="")
        path = folder / "metrics.jsonl"
        if is_main:
            rows_before = [row for row in read_appended(path) if row["step"] <= first_step] if first_step else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows_before))
            self.file = path.open("a")

    def start(self, run: RunConfig) -> None:
        """Opens Weights & Biases and TensorBoard where the run asks for them."""
        if not self.is_main:
            return
        if run.train.wandb_project:
            import wandb

            mode = "online" if wandb.api.api_key else "offline"  # online with a key, else to files in the run folder
            project, name = run.train.wandb_project, self.folder.name
            self.wandb = wandb.init(project=project, name=name, dir=str(self.folder), config=asdict(run), mode=mode)
        if run.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # hides what an interrupted start logged after its last checkpoint
            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.first_step + 1)

    def log(self, row: dict[str, Any], *, figures: str = "") -> None:
        """Writes a row of metrics. figures: what the progress bar shows of it; empty: it stays as it is."""
        if not self.is_main:
            return
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if figures:
            self.progress.update(self.task, completed=row["step"], figures=figures)
        values = {key: value for key, value in flat(row).items() if key != "step" and value is not None}
        if self.wandb is not None:
            self.wandb.log(values, step=row["step"])
        if self.board is not None:
            for key, value in values.items():
                self.board.add_scalar(key, value, row["step"])

    def __enter__(self) -> "Tracker":
        self.progress.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()
        if self.is_main:
            self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if error is None else 1)


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1, 2]}} -> {"a/b/0": 1, "a/b/1": 2}."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
