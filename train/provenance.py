"""What config.yaml does not say of a run: code, packages, machine, target and data of each start, in RUN/run.json."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__
from ..configs.files import write_json
from ..heads.target import Target
from .data import TrainingData

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "safetensors", "numpy")


@dataclass(frozen=True)
class GitState:
    """The commit that the code is of, and whether it was changed since."""

    commit: str
    changed: bool


@dataclass(frozen=True)
class Provenance:
    """An entry of run.json: one start of a run."""

    started: str  # UTC
    headstart: str
    git: GitState | None  # None: not a checkout
    python: str
    packages: dict[str, str | None]  # versions; None: not installed
    device: str
    num_processes: int
    target: dict[str, str]  # name and fingerprint
    data: dict[str, int | list[str]]  # sizes, and the checksum of each shard

    @classmethod
    def of(cls, target: Target, data: TrainingData, *, num_processes: int) -> "Provenance":
        manifest = data.samples.manifest
        sizes = {key: getattr(manifest, key) for key in ("num_rows", "num_tokens", "num_supervised_tokens")}
        return cls(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            headstart=__version__,
            git=git_state(Path(__file__).parent),
            python=platform.python_version(),
            packages={name: version(name) for name in PACKAGES},
            device=device_name(),
            num_processes=num_processes,
            target={"name": target.name, "fingerprint": target.fingerprint},
            data={**sizes, "sha256": [shard.sha256 for shard in manifest.shards]},
        )

    def append_to(self, path: Path) -> None:
        """Adds it to run.json, a list: an interrupted run has several starts."""
        starts = json.loads(path.read_text()) if path.is_file() else []
        write_json(path, [*starts, asdict(self)])


def git_state(folder: Path) -> GitState | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return GitState(git("rev-parse", "HEAD"), changed=bool(git("status", "--porcelain", "-uno")))
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
