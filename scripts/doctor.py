"""`headstart doctor`: what this machine has, and which launch configs can run on it; with --target, which ways of
training a head fit on its GPUs.
"""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import BadInput
from ..configs.loader import read_config, shipped
from .evaluating.engine_options import check_numbers

USUAL = 80e9  # bytes of a GPU, where none is here or named
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
SHARDING = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP2", "MULTI_GPU": "DDP", "NO": "one process"}


def doctor(
    config: Annotated[str, typer.Argument(metavar="[CONFIG]", help="A YAML of configs/accelerate; else all.")] = "",
    num_processes: Annotated[int | None, typer.Option(help="On all nodes, instead of the config's.", min=1)] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="As it would run on CPUs, over gloo.")] = False,
    target: Annotated[str, typer.Option(help="Instead: which ways of training fit this model.")] = "",
    gpus: Annotated[
        int, typer.Option(help="With --target: GPUs of a machine.", min=0, max=1024, show_default="this one's, or 1")
    ] = 0,
    memory: Annotated[
        float, typer.Option(help="With --target: GB of each.", min=0, max=1e6, show_default="this one's, or 80")
    ] = 0.0,
) -> None:
    """Show what this machine can launch, and what is missing; or what training for a target takes.

    Prints the command that launches a run by each config, from any folder.

    \b
    Examples:
      headstart doctor
      headstart doctor configs/accelerate/ddp.yaml --num-processes 2
      headstart doctor zero2 --cpu --num-processes 2
      headstart doctor --target MODEL --gpus 8 --memory 80

    With CONFIG, a file or the name of a shipped one, the exit code is 0 where it can run here and 1 where not. Of
    several nodes, this one is checked. With --target no weights are read, and the exit code is 0 where a way fits.
    """
    from .training_ways import show_ways

    check_numbers(memory=memory)
    console, machine = Console(), this_machine()
    if target:
        num, size = gpus or len(machine.gpus) or 1, memory * 1e9 or min((gpu for _, gpu in machine.gpus), default=USUAL)
        if not machine.gpus and not (gpus and memory):
            console.print(f"no GPU here: counted for {num} of {size / 1e9:.0f} GB; --gpus and --memory name others")
        can_run = show_ways(target, num_gpus=num, memory=size, console=console)
    elif gpus or memory:
        raise BadInput("--gpus and --memory go with --target")
    else:
        paths = [find(config)] if config else shipped("accelerate/*.yaml")
        can_run = show_launches(paths, machine, num_processes=num_processes, cpu=cpu, console=console) or not config
    if not can_run:
        raise typer.Exit(1)


# What can be launched here


@dataclass(frozen=True)
class LocalMachine:
    """The hardware and software that launching a run depends on."""

    num_cores: int
    memory: int  # bytes
    gpus: tuple[tuple[str, int], ...]  # name and bytes of each
    cuda: str | None  # version that torch was built with, as of nccl
    nccl: str | None
    gloo: bool
    compiler: str | None  # path, as of ninja
    ninja: str | None
    versions: dict[str, str | None]  # of packages; None: not installed


@dataclass(frozen=True)
class LaunchConfig:
    """A YAML of configs/accelerate."""

    path: Path
    kind: str  # a key of SHARDING
    num_processes: int  # on all nodes
    num_nodes: int
    use_cpu: bool


def show_launches(
    paths: list[Path], machine: LocalMachine, *, num_processes: int | None, cpu: bool, console: Console
) -> bool:
    """Print the machine, what each launch config lacks on it, and the commands; returns whether all can run."""
    console.print(facts_table(machine))
    table, can_run = Table("launch config", "what", "processes", "runs here", "missing"), True
    launches = [read_launch(path) for path in paths]
    for launch in launches:
        problems = missing(launch, machine, num_processes=num_processes, cpu=cpu)
        nodes = f" on {launch.num_nodes} nodes" if launch.num_nodes > 1 else ""
        processes = f"{num_processes or launch.num_processes}{nodes}"
        can_run = can_run and not problems
        runs = "no" if problems else "yes"
        table.add_row(launch.path.stem, SHARDING[launch.kind], processes, runs, "\n".join(problems))
    console.print(table)
    for path in [launch.path for launch in launches]:  # the whole one, by which accelerate finds it from any folder
        command = f"accelerate launch --config_file {shlex.quote(str(path))} -m headstart.train CONFIG"
        console.print(f"{path.stem}: {command}", soft_wrap=True, highlight=False, markup=False)
    return can_run


def find(name: str) -> Path:
    """The whole path of a launch config, named by a path, here or in the package, or by name. Raises BadInput."""
    known = shipped("accelerate/*.yaml")
    for path in [Path(name), *known]:
        if path.is_file() and (path == Path(name) or path.stem == name or path.as_posix().endswith(f"/{name}")):
            return path.absolute()
    raise BadInput(f"{name}: no such launch config; shipped are {', '.join(path.stem for path in known)}")


def read_launch(path: Path) -> LaunchConfig:
    """Raises BadInput if the file is no launch config."""
    raw = read_config(path)
    kind = raw.get("distributed_type")
    if kind not in SHARDING:
        raise BadInput(f"{path}: distributed_type {kind!r}: expected one of {list(SHARDING)}")
    num_processes, num_nodes = raw.get("num_processes", 1), raw.get("num_machines", 1)
    return LaunchConfig(path, kind, num_processes, num_nodes, bool(raw.get("use_cpu")))


def missing(
    launch: LaunchConfig, machine: LocalMachine, *, num_processes: int | None = None, cpu: bool = False
) -> list[str]:
    """The requirements of a launch config that this machine does not meet; empty if it can run."""
    on_cpu, num_local = cpu or launch.use_cpu, (num_processes or launch.num_processes) // launch.num_nodes
    problems = [f"{name} is not installed" for name in ("torch", "accelerate") if machine.versions[name] is None]
    cores, num_gpus, is_many = machine.num_cores, len(machine.gpus), num_local > 1
    is_zero = launch.kind == "DEEPSPEED"
    compiles = is_zero and on_cpu  # an operation at the first start; none on GPUs
    no_nccl = machine.cuda is not None and machine.nccl is None
    checks = [
        (on_cpu and num_local > cores, f"{num_local} processes on {cores} cores: --num-processes {cores}"),
        (on_cpu and is_many and not machine.gloo, "torch is built without gloo"),
        (not on_cpu and num_gpus < num_local, f"{num_local} GPU{'s' * is_many}, here are {num_gpus}"),
        (not on_cpu and machine.cuda is None, "torch is built without CUDA"),
        (not on_cpu and is_many and no_nccl, "torch is built without NCCL"),
        (is_zero and not machine.versions["deepspeed"], "deepspeed is not installed: pip install deepspeed"),
        (compiles and not machine.compiler, "no C++ compiler on PATH: g++ 9 or newer"),
        (compiles and not machine.ninja, "no ninja on PATH: pip install ninja, with its folder on PATH"),
    ]
    return problems + [problem for is_missing, problem in checks if is_missing]


def this_machine() -> LocalMachine:
    import torch
    from torch import distributed as dist
    from torch.cuda import nccl as cuda_nccl

    from ..train.inputs.provenance import version

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl = dist.is_available() and dist.is_nccl_available()
    return LocalMachine(
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple((gpu.name, gpu.total_memory) for gpu in gpus),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, cuda_nccl.version())) if nccl else None,
        gloo=dist.is_available() and dist.is_gloo_available(),
        compiler=shutil.which("g++") or shutil.which("c++"),
        ninja=shutil.which("ninja"),
        versions={name: version(name) for name in PACKAGES},
    )


def facts_table(machine: LocalMachine) -> Table:
    gpus = [f"{name}, {size / 2**30:.0f} GiB" for name, size in machine.gpus]
    facts = {
        "cores": str(machine.num_cores),
        "memory": f"{machine.memory / 2**30:.0f} GiB",
        "GPUs": "\n".join(gpus) or "none",
        "CUDA": machine.cuda or "torch is built without it",
        "NCCL (GPUs)": machine.nccl or "no",
        "gloo (CPUs)": "yes" if machine.gloo else "no",
        "C++ compiler": machine.compiler or "none on PATH",
        "ninja": machine.ninja or "none on PATH",
        **{name: number or "not installed" for name, number in machine.versions.items()},
    }
    table = Table("this machine", "")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
