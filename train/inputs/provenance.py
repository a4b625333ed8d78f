"""RUN/run.json: code version, packages, machine, target and data of each start, which config.yaml does not have."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...base.errors import BadInput, first_line
from ...base.files import write_json
from ...data_pipelines.served.reading import fields_of_served
from ...targets.target import Target
from .data import TrainingData

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "safetensors", "numpy")


def record_start(path: Path, target: Target, data: TrainingData, *, num_processes: int) -> None:
    """Append a start to run.json, a list, as an interrupted run has several."""
    manifest = data.samples.manifest
    sizes = {key: getattr(manifest, key) for key in ("num_rows", "num_tokens", "num_supervised_tokens")}
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "headstart": __version__,
        "git": git_state(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},  # None: not installed
        "device": training_devices(),
        "num_processes": num_processes,
        "target": {"name": target.full_name, "fingerprint": target.fingerprint},
        "data": {**sizes, "sha256": [shard.sha256 for shard in manifest.shards], "states": states_record(data)},
    }
    write_json(path, [*read_starts(path), start])


def states_record(data: TrainingData) -> dict[str, Any] | None:
    """What gives the states of a run with a server; None: it has none."""
    return None if data.reader is None else fields_of_served(data.reader.served)


def read_starts(path: Path) -> list[dict[str, Any]]:
    """run.json; empty where there is none. Raises BadInput if it is damaged."""
    try:
        starts = json.loads(path.read_text()) if path.is_file() else []
        for start in starts:
            _ = start["target"]["fingerprint"], start["data"]["sha256"]
        return starts
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: damaged ({first_line(error)}); the run goes on where it is removed") from error


def git_state(folder: Path) -> dict[str, str | bool] | None:
    """The code's commit, and whether there are uncommitted changes; None: not a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def training_devices() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return platform.processor() or platform.machine()
