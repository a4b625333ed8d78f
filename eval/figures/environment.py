"""The environment of a measurement: versions, machine and target, for reports and plans."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from ... import __version__
from ...targets.loading import quantization
from ...targets.target import Target
from ...targets.weights.served_adapter import AdapterInfo
from .bandwidth import copy_bandwidth


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and machine. Optional fields are None in reports of older versions."""

    headstart: str
    torch: str
    transformers: str | None = None
    python: str | None = None
    platform: str | None = None
    device: str  # the name of the GPU or the CPU
    num_threads: int | None = None
    num_cpus: int | None = None
    copy_gigabytes_per_second: float  # memory bandwidth, read and written: `copy_bandwidth`

    @classmethod
    def of(cls, target: Target) -> "Environment":
        """The environment of this process and the target's device. Measures the copy bandwidth, in under a second."""
        return cls(
            headstart=__version__,
            torch=torch.__version__,
            transformers=transformers.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            device=device_name(target.device),
            num_threads=torch.get_num_threads(),
            num_cpus=os.cpu_count(),
            copy_gigabytes_per_second=round(copy_bandwidth(target.device) / 1e9, 2),
        )


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The measured target, and how it was loaded."""

    name: str
    fingerprint: str  # of the stored weights, and of the adapter
    adapter: AdapterInfo | None = None  # that was merged into it
    is_adapted: bool = False  # whether it computed with the measured head's own adapters
    architecture: str | None = None
    num_parameters: int | None = None
    dtype: str | None = None
    quantization: str | None = None  # the method; None: not quantised
    device: str | None = None
    # the instruction set of the kernels that decoded it on a CPU, and whether all layers or products only; None: none
    kernels: str | None = None

    @property
    def computed(self) -> str:
        """The dtype, and whose kernels, in words."""
        if self.kernels is None:
            return f"{self.dtype}, no kernels" if self.device == "cpu" else str(self.dtype)
        return f"{self.dtype}, kernels for {self.kernels}"

    @classmethod
    def of(cls, target: Target) -> "TargetInfo":
        return cls(
            name=target.name,
            fingerprint=target.fingerprint,
            adapter=None if target.adapter is None else target.adapter.info,
            is_adapted=target.is_adapted,
            architecture=type(target.model).__name__,
            num_parameters=sum(p.numel() for p in target.model.parameters()),
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=quantization(target.model.config),
            device=str(target.device),
            kernels=target.kernels,
        )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else (processor_name() or "cpu")


def processor_name() -> str:
    """The CPU's name; empty if the system does not provide one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
