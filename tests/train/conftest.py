"""A tiny run: a saved target, text that it wrote, and training on it from a config, in this process or in two."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from headstart.base.children import free_port
from headstart.base.errors import BadInput
from headstart.base.jsonl import read_appended
from headstart.configs.loader import PACKAGE_CONFIGS
from headstart.scripts.data.extract import extract
from headstart.train import trainer
from headstart.train.inputs.config import load_run

BY_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def world(saved_target) -> Path:
    """The folder with `target` and `rows.jsonl`."""
    return saved_target.parent


def write_config(path: Path, world: Path, head_type: str, **sections: Any) -> Path:
    """A config of a head of that type on the rows of the world, with further sections."""
    config = {
        "target": {"path": str(world / "target")},
        "head": {"type": head_type, "num_depths": 3},
        "data": {"train": str(world / "rows.jsonl")},
    }
    path.write_text(yaml.safe_dump({**config, **sections}))
    return path


@pytest.fixture
def run(world, tmp_path):
    """run(head_type, name, "key=value", ...): trains into tmp_path/name and returns that folder."""

    def start(head_type, name, *overrides):
        train = {"max_steps": 6, "batch_size": 2, "warmup_steps": 2, "learning_rate": 3e-3, "device": "cpu"}
        train |= {"output_dir": str(tmp_path / name), "decode_tokens": 16}
        path = write_config(tmp_path / f"{name}.yaml", world, head_type, train=train)
        trainer.train_head(load_run(path, overrides))
        return tmp_path / name

    return start


@pytest.fixture
def refused(run):
    """refused(head_type, name, "key=value", ...): the line with which a run is refused."""

    def start(*arguments):
        with pytest.raises(BadInput) as caught:
            run(*arguments)
        return str(caught.value)

    return start


@pytest.fixture
def features(world, tmp_path):
    """features(head_type, name, "key=value", ...): extracts float32 states for a head into tmp_path/name."""

    def make(head_type, name, *overrides):
        path = write_config(tmp_path / f"{name}.yaml", world, head_type)
        extract(str(path), tmp_path / name, list(overrides), storage_dtype="float32", device="cpu")
        return tmp_path / name

    return make


class Launching:
    """The same run by two processes on CPUs, launched or forked, or by this one.

    A forked run has the environment that `accelerate launch` gave to a process of its kind, but not its long start.
    """

    def __init__(self, world: Path, folder: Path):
        self.world, self.folder = world, folder
        self.environs: dict[Any, list[dict[str, str]]] = {}
        self.server: subprocess.Popen[str] | None = None
        # parameters this small would otherwise all be kept whole
        zero3 = json.loads((PACKAGE_CONFIGS / "deepspeed" / "zero3.json").read_text())
        zero3["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        (folder / "zero3.json").write_text(json.dumps(zero3))

    def write(self, folder: Path, *, batch_size: int) -> Path:
        """The config of a run into `folder`, beside it."""
        train = {"max_steps": 20, "warmup_steps": 2, "learning_rate": 3e-3, "device": "cpu", "validate_every": 8}
        train |= {"decode_tokens": 12}
        config = {
            "target": {"path": str(self.world / "target")},
            "head": {"type": "eagle3", "num_depths": 3, "start": "random"},
            "data": {"train": str(self.world / "rows.jsonl"), "validation": str(self.world / "rows.jsonl")},
            "train": {**train, "output_dir": str(folder), "batch_size": batch_size},
        }
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config))
        return path

    def alone(self, folder: Path, *overrides: str) -> Path:
        """By this process, with two rows a batch."""
        trainer.train_head(load_run(self.write(folder, batch_size=2), overrides))
        return folder

    def command(self, backend: str, *what: str, flags: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
        """The command line that launches two processes of `what`, and its environment."""
        how = ["--config_file", str(PACKAGE_CONFIGS / "accelerate" / f"{backend}.yaml"), "--num_processes", "2"]
        how += ["--deepspeed_config_file", str(self.folder / "zero3.json")] * (backend == "zero3")
        how += ["--main_process_port", str(free_port()), *flags]
        inherited = {key: value for key, value in os.environ.items() if key not in BY_LAUNCHER}
        env = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # ninja is there
        return [sys.executable, "-m", "accelerate.commands.launch", *how, *what], env

    def environ_of(self, backend: str, flags: tuple[str, ...], env: dict[str, str]) -> list[dict[str, str]]:
        """The environment of each process that such a launch starts."""
        key = (backend, flags, *env.items())
        if key not in self.environs:
            folder = self.folder / f"launch{len(self.environs)}"
            folder.mkdir()
            line, variables = self.command(backend, "--no_python", "sh", "-c", 'env -0 > "rank$RANK"', flags=flags)
            subprocess.run(line, env={**variables, **env}, cwd=folder, check=True, capture_output=True)
            texts = [path.read_text().split("\0") for path in sorted(folder.iterdir())]
            self.environs[key] = [dict(entry.split("=", 1) for entry in text if entry) for text in texts]
        return self.environs[key]

    def ask(self, *message: Any) -> int:
        if self.server is None:
            line = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}  # what a fork sets comes too late: OpenMP read it at import
            self.server = subprocess.Popen(
                line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(json.dumps(message) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(
        self,
        backend: str,
        folder: Path,
        *overrides: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> list[int]:
        """Fork the processes of a run; returns their ids. They write into FOLDER.log."""
        path, meeting = self.write(folder, batch_size=1), {"MASTER_PORT": str(free_port())}
        meeting["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher that kept it is gone
        log = str(folder.with_suffix(".log"))
        return [
            self.ask("start", {**environ, **meeting}, [str(path), *overrides], log)
            for environ in self.environ_of(backend, flags, env or {})
        ]

    def wait(self, processes: Sequence[int]) -> list[int]:
        """Their exit codes, minus the signal where one ended them."""
        return [self.ask("wait", process) for process in processes]

    def finish(self, backend: str, folder: Path, *overrides: str) -> Path:
        """Fork a run and see it end well."""
        codes = self.wait(self.start(backend, folder, *overrides))
        assert codes == [0, 0], folder.with_suffix(".log").read_text()[-3000:]
        return folder

    def wait_for_rows(self, folder: Path, count: int, *, seconds: float = 120) -> None:
        """Until a run has logged as many rows."""
        end = time.monotonic() + seconds
        while len(read_appended(folder / "metrics.jsonl")) < count:
            assert time.monotonic() < end, f"{folder} has fewer than {count} rows after {seconds} s"
            time.sleep(0.02)

    def close(self) -> None:
        """Ends what it started, also what hangs."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()


@pytest.fixture(scope="session")
def launching(world, tmp_path_factory) -> Iterator[Launching]:
    started = Launching(world, tmp_path_factory.mktemp("launching"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def by_one(launching, tmp_path_factory):
    """by_one(override, ...): the folder of the run by one process, which no backend has a part in; made once."""
    return cache(lambda *how: launching.alone(tmp_path_factory.mktemp("alone") / "one", *how))


@pytest.fixture(scope="session")
def shared_memory_op() -> None:
    """DeepSpeed's one compiled operation, built beforehand: a minute or two on a fresh machine."""
    build = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", build], env=env, check=True, capture_output=True, timeout=1500)
