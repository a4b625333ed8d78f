"""Checking that the backend and processes that were launched are those that run, since some launches fail silently."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs

from ...base.errors import BadInput, first_line
from ...configs.loader import find_config
from ...targets.cpu.build import multiplies_bf16
from ...targets.loading import say_unseen_gpu
from .config import TrainConfig

# variables that would change what a run computes behind its config, and the values that change nothing
DECIDED_BY_RUN = {
    "ACCELERATE_DYNAMO_BACKEND": ("no", "train.compile"),
    "ACCELERATE_TORCH_DEVICE": ("", "train.device"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "the launch config"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false", "train.context_parallel"),
    "ACCELERATE_USE_SAGEMAKER": ("false", "the launch config"),
}
# and such that a user may want, so that a line says they are set
SAID = {
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"),
    *("FSDP_OFFLOAD_PARAMS", "ACCELERATE_DEBUG_MODE", "ACCELERATE_BYPASS_DEVICE_MAP", "DS_ACCELERATOR"),
}
OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # how many processes they started


@dataclass(frozen=True)
class Launch:
    """A backend and its processes."""

    backend: str  # single, ddp, deepspeed or fsdp2
    num_processes: int  # on all nodes

    def __str__(self) -> str:
        return f"{self.backend} on {self.num_processes} process" + "es" * (self.num_processes > 1)


def is_on(environ: Mapping[str, str], key: str) -> bool:
    return environ.get(key, "").lower() in ("1", "true", "yes")


def check_environment(environ: Mapping[str, str]) -> str | None:
    """A line on the variables that change how a run computes; None: there are none. Raises BadInput if one is set that
    would overrule the run's config, which Accelerate would let it do without a word."""
    for key, (nothing, decides) in DECIDED_BY_RUN.items():
        if environ.get(key, nothing).lower() not in (nothing, "", "0"):
            raise BadInput(f"{key} is {environ[key]}: {decides} decides that, so unset it")
    said = [f"{key}={environ[key]}" for key in sorted(SAID & environ.keys())]
    return f"set in the environment: {', '.join(said)}" if said else None


def requested_launch(environ: Mapping[str, str]) -> Launch:
    """What a launcher's environment variables ask for. Raises BadInput if that would not run."""
    num_processes = int(environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in environ:
        for key in OTHER_LAUNCHERS:
            if int(environ.get(key, "1")) > 1:
                alone = f"{key} is {environ[key]} but WORLD_SIZE is not set: each process would train alone"
                raise BadInput(f"{alone}; start them with accelerate launch")
        if "MASTER_ADDR" in environ and "ACCELERATE_MIXED_PRECISION" in environ:
            problem = "accelerate launch was asked for several processes and started one, as --cpu and MULTI_CPU do"
            raise BadInput(f"{problem}; launch with configs/accelerate/ddp.yaml, which runs on CPUs too")
    elif num_processes > 1 and not {"RANK", "LOCAL_RANK"} <= environ.keys():
        raise BadInput(f"WORLD_SIZE is {num_processes} but RANK or LOCAL_RANK is not set; start with accelerate launch")
    is_deepspeed, is_fsdp = is_on(environ, "ACCELERATE_USE_DEEPSPEED"), is_on(environ, "ACCELERATE_USE_FSDP")
    if (is_deepspeed or is_fsdp) and is_on(environ, "ACCELERATE_USE_CPU"):
        name = "deepspeed" if is_deepspeed else "fsdp2"
        raise BadInput(f"{name}: ACCELERATE_USE_CPU would turn it off; unset it, without GPUs it is not needed either")
    if is_deepspeed:
        return Launch("deepspeed", num_processes)
    if is_fsdp:
        if environ.get("FSDP_VERSION", "1") != "2":
            raise BadInput("the launch config asks for FSDP 1: set fsdp_version: 2, as configs/accelerate/fsdp2.yaml")
        if is_on(environ, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            problem = "fsdp_cpu_ram_efficient_loading would leave models empty in all processes but the first"
            raise BadInput(f"{problem}: set it to false")
        return Launch("fsdp2", num_processes)
    return Launch("ddp" if num_processes > 1 else "single", num_processes)


def actual_launch(accelerator: Accelerator) -> Launch:
    """What Accelerate runs."""
    kind = accelerator.distributed_type
    backend = {DistributedType.NO: "single", DistributedType.DEEPSPEED: "deepspeed"}.get(kind, "ddp")
    if kind == DistributedType.FSDP:
        backend = "fsdp2" if accelerator.is_fsdp2 else "fsdp1"
    return Launch(backend, accelerator.num_processes)


@dataclass(frozen=True)
class RankPlace:
    """Which rows a process reads, and which part of their chains it learns (`train.context_parallel`)."""

    num_groups: int  # of processes; each group has rows of its own
    group: int
    num_parts: int  # processes of a group
    part: int

    @classmethod
    def of(cls, accelerator: Accelerator, config: TrainConfig) -> "RankPlace":
        """Raises BadInput if the processes do not make whole groups."""
        num, size = accelerator.num_processes, config.context_parallel
        if num % size:
            raise BadInput(f"train.context_parallel {size}: {num} processes are no multiple of it")
        return cls(num // size, accelerator.process_index // size, size, accelerator.process_index % size)


def runs_on_cpu(config: TrainConfig) -> bool:
    """Whether the run, or the launch, asks for CPUs, or there are no GPUs."""
    return config.device == "cpu" or is_on(os.environ, "ACCELERATE_USE_CPU") or not torch.cuda.is_available()


def product_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of matrix products: the run's precision, but fp32 on a CPU that would emulate bf16, several times
    slower."""
    is_emulated = runs_on_cpu(config) and not multiplies_bf16()
    return torch.bfloat16 if config.precision == "bf16" and not is_emulated else torch.float32


def start_accelerator(config: TrainConfig) -> Accelerator:
    """Accelerate as launched. Raises BadInput if something else than the launch asked for would run."""
    requested = requested_launch(os.environ)
    check_environment(os.environ)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", config.precision):
        problem = f"the launch config asks for mixed_precision {precision}, the run for train.precision"
        raise BadInput(f"{problem} {config.precision}: the run decides, so leave `no` in the launch config")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("train.device cuda: no CUDA device here")
    on_cpu = runs_on_cpu(config)
    if config.device is None and not is_on(os.environ, "ACCELERATE_USE_CPU"):
        say_unseen_gpu()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_cpu and num_local > torch.cuda.device_count():
        raise BadInput(f"launched {num_local} processes on a machine of {torch.cuda.device_count()} GPUs: one each")
    is_sharded = requested.backend in ("deepspeed", "fsdp2")
    if is_sharded and on_cpu and torch.cuda.is_available():
        raise BadInput(f"{requested.backend} on the CPUs of a machine with GPUs: hide them, with CUDA_VISIBLE_DEVICES=")
    if is_sharded and "LOCAL_RANK" not in os.environ:
        raise BadInput(f"{requested.backend} was asked for but LOCAL_RANK is not set; start with accelerate launch")
    # collectives outlast the watchdog, whose message says more than theirs
    patience = timedelta(minutes=max(30.0, config.watchdog_minutes + 5))
    try:
        if is_sharded and on_cpu:
            # otherwise Accelerate finds no GPU and silently takes each process for the only one
            state = PartialState(backend="gloo", timeout=patience)
            if requested.backend == "fsdp2":
                state.distributed_type = DistributedType.MULTI_GPU
        accelerator = Accelerator(
            cpu=on_cpu and not is_sharded,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=patience)],
            mixed_precision="no",  # `Backend` casts, in the same way under all of them
            # the loop accumulates; left out, ACCELERATE_GRADIENT_ACCUMULATION_STEPS would divide gradients once more
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            deepspeed_plugin=deepspeed_plugin(config) if requested.backend == "deepspeed" else None,
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise error if isinstance(error, BadInput) else BadInput(f"{requested}: {first_line(error)}") from error
    actual = actual_launch(accelerator)
    if actual != requested:
        lost = ": each process would train alone" if actual.num_processes < requested.num_processes else ""
        raise BadInput(f"launched as {requested}, but {actual} came up{lost}")
    if actual.backend == "deepspeed":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # under ZeRO-3, Transformers would load every later model in parts
    return accelerator


def deepspeed_plugin(config: TrainConfig) -> DeepSpeedPlugin:
    """DeepSpeed of the launch config, but with the batches, clipping, precision and optimizer of the run."""
    name = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    plugin = DeepSpeedPlugin(hf_ds_config=None if name == "none" else read_deepspeed(name))
    settings = plugin.deepspeed_config
    for key in ("optimizer", "scheduler", "fp16", "bf16", "amp"):
        if settings.pop(key, None) is not None:
            raise BadInput(f"the DeepSpeed config has {key!r}, which the run decides (train.*): take it out")
    settings |= {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": 1,  # the loop marks the last backward pass of a step
        "gradient_clipping": config.max_grad_norm,
        "zero_force_ds_cpu_optimizer": False,  # ours is torch's
    }
    settings.pop("train_batch_size", None)
    return plugin


def read_deepspeed(name: str) -> dict[str, Any]:
    """A DeepSpeed JSON file, here or in the package. Raises BadInput."""
    try:
        return json.loads(find_config(Path(name)).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"DeepSpeed config {name}: {first_line(error)}") from error
