"""Where a run's figures go: metrics.jsonl, the progress bar and, when asked for, Weights & Biases."""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...base.doing import Doing, doing
from ...base.errors import BadInput
from ...base.files import write_text
from ...base.jsonl import read_appended
from ..inputs.config import RunConfig, TrainConfig


def check_trackers(config: TrainConfig) -> None:
    """Raises BadInput if the package that the run is to log with is missing."""
    if config.wandb_project:
        try:
            import_module("wandb")
        except ImportError as error:
            raise BadInput("train.wandb_project: needs wandb: pip install wandb") from error


class Tracker:
    """Writes metrics in the main process; elsewhere every call is a no-op.

    metrics.jsonl has one row per logged training step (`step`, `loss`, ...) and one per validation (`step`,
    `validation`). `step` counts completed optimizer steps. On resume, rows beyond the checkpoint are dropped first, so
    that the curves of interrupted and uninterrupted runs are equal.
    """

    def __init__(self, folder: Path, *, num_steps: int, first_step: int, is_main: bool, console: Console):
        self.folder, self.first_step, self.is_main = folder, first_step, is_main
        self.wandb: Any = None
        self.last_logged = 0  # to Weights & Biases; a step that is done again has the same figures
        self.last_written = 0  # the last step of which an earlier start has logged a row
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
        is_shown = is_main and console.is_terminal
        self.progress = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not is_shown)
        self.task = self.progress.add_task("training", total=num_steps, completed=first_step, figures="")
        what = f"training from step {first_step}" if first_step else "training"
        self.telling = doing(what, num_steps - first_step) if is_main and not is_shown else nullcontext()
        self.phase: Doing | None = None  # where there is no bar
        path = folder / "metrics.jsonl"
        if is_main:
            written = read_appended(path) if path.exists() else []
            self.last_written = max((row["step"] for row in written), default=0)
            rows_before = [row for row in written if row["step"] <= first_step] if first_step else []
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows_before))
            self.file = path.open("a")

    def start(self, run: RunConfig) -> None:
        """Opens Weights & Biases where the run asks for it."""
        if self.is_main and run.train.wandb_project:
            self._start_wandb(run, run.train.wandb_project)

    def _start_wandb(self, run: RunConfig, project: str) -> None:
        """One run of Weights & Biases per run folder, which every start goes on with: online if there is a key, else in
        files of the run folder."""
        import wandb

        file = self.folder / "wandb_id.txt"
        if file.is_file():
            self.last_logged = self.last_written
        else:
            write_text(file, uuid4().hex[:16])
        given: dict[str, Any] = {"id": file.read_text(), "resume": "allow", "dir": str(self.folder)}
        given["mode"] = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key(os.environ) else "offline")
        self.wandb = wandb.init(project=project, name=self.folder.name, config=asdict(run), **given)

    def log(self, row: dict[str, Any], *, figures: str = "") -> None:
        """Writes a row of metrics. figures: what the progress bar shows of it; empty: it stays as it is."""
        if not self.is_main:
            return
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if figures:
            self.progress.update(self.task, completed=row["step"], figures=figures)
            if self.phase is not None:
                self.phase.done = row["step"] - self.first_step
        if self.wandb is not None and row["step"] > self.last_logged:
            values = {key: value for key, value in flat(row).items() if key != "step" and value is not None}
            self.wandb.log(values, step=row["step"])

    def __enter__(self) -> "Tracker":
        self.progress.start()
        self.phase = self.telling.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.telling.__exit__(kind, error, trace)
        self.progress.stop()
        if self.is_main:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if error is None else 1)


def has_wandb_key(environ: Mapping[str, str]) -> bool:
    """Whether a key of Weights & Biases is in the environment or in the user's netrc."""
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return bool(environ.get("WANDB_API_KEY") or netrc(environ.get("NETRC")).authenticators(host))
    except (OSError, NetrcParseError):
        return False


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1, 2]}} -> {"a/b/0": 1, "a/b/1": 2}."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
