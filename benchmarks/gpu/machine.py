"""What a GPU machine is: versions, what is missing, rates of copying and of matrix products, and whether it compiles.

python -m headstart.benchmarks.gpu.machine --output machine.json
"""

import argparse
import os
import platform
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...eval.figures.bandwidth import copy_bandwidth
from ...eval.figures.environment import device_name
from ...targets.cpu.joined_decoder import compiled_ahead
from ...targets.loading import default_device
from ..operations import matmul_rate
from ..store import BenchedCell, CellStore, Figures

PACKAGES = "transformers accelerate triton safetensors pydantic gguf peft datasets wandb deepspeed openai".split()
COMPILERS = ("gcc", "g++", "nvcc", "ptxas")


def software(device: torch.device) -> Figures:
    """Versions and places; null: not there."""

    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    known = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {**known, **{name: found(name) for name in PACKAGES}, **{name: shutil.which(name) for name in COMPILERS}}


def rates(device: torch.device) -> Figures:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        "num_cores": os.cpu_count(),
        "copy_gigabytes_per_second": round(copy_bandwidth(device) / 1e9, 1),
        "product_teraflops": round(matmul_rate(device, dtype) / 1e12, 2),
    }


def compilation(device: torch.device) -> Figures:
    """Seconds of a first compilation, and of one ahead of time, as decoding does it; both compute what is written."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x, seconds = torch.arange(8.0, device=device), []
    for compiled in (lambda: torch.compile(plain, fullgraph=True), lambda: compiled_ahead(plain, (x,))):
        started = time.perf_counter()
        torch.testing.assert_close(compiled()(x), plain(x))
        seconds.append(round(time.perf_counter() - started, 2))
    return {"first_compile_seconds": seconds[0], "ahead_seconds": seconds[1]}


PARTS = {"software": software, "rates": rates, "compilation": compilation}


def main() -> int:
    """Returns the exit code: 1 where something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    device = torch.device(default_device())
    store = CellStore[BenchedCell](parser.parse_args().output, {"device": device_name(device)}, is_new=True)
    return store.run([BenchedCell(name=name) for name in PARTS], lambda cell: PARTS[cell.name](device))


if __name__ == "__main__":
    sys.exit(main())
