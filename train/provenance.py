"""Where a run comes from: code, packages, machine, target and data, as RUN/run.json has it."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..heads.target import Target
from .data import TrainingData

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "safetensors", "numpy")


def origin(target: Target, data: TrainingData, *, num_processes: int) -> dict[str, Any]:
    """What config.yaml does not say of a run."""
    manifest = data.samples.manifest
    totals = ("num_rows", "num_tokens", "num_supervised_tokens")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "headstart": __version__,
        "git": git_state(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "device": device_name(),
        "num_processes": num_processes,
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "data": {**{key: getattr(manifest, key) for key in totals}, "sha256": [one.sha256 for one in manifest.shards]},
    }


def write_provenance(folder: Path, entry: dict[str, Any]) -> None:
    """Adds a start to RUN/run.json, a list: an interrupted run has several."""
    path = folder / "run.json"
    starts = json.loads(path.read_text()) if path.is_file() else []
    path.write_text(json.dumps([*starts, entry], indent=2) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that the code is of, and whether it was changed since; None outside a checkout."""

    def said(*arguments: str) -> str:
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        return subprocess.run(["git", "-C", str(folder), *arguments], **how).stdout.strip()

    try:
        return {"commit": said("rev-parse", "HEAD"), "changed": bool(said("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return platform.processor() or platform.machine()
