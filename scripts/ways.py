"""Which ways of training a head fit on given GPUs: the bytes of a target by part, from its config alone."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..configs.errors import BadInput
from ..configs.loader import build, read_config
from ..data_pipelines.served.vllm_process import CONNECTOR, serving_flags
from ..heads.loading import TargetConfig, quantization
from ..heads.registry import head_class
from ..heads.targets.fit import HeadSize, TargetSize, head_size, target_size
from ..heads.targets.skeleton import load_skeleton
from .heads_command import in_bytes

RUN = "runs/eagle3.yaml"  # whose head is counted
FREE = 0.1  # of a GPU's memory, left for activations and the framework


@dataclass(frozen=True)
class Way:
    """A way of training a head for a target, and what it takes on the fullest GPU."""

    name: str
    needs: dict[str, int]  # bytes by what takes them, of each stage alone
    commands: list[str]
    in_host: int = 0  # bytes of the machine's own memory that it takes too

    def fits(self, memory: float) -> bool:
        """memory: bytes of a GPU."""
        return max(self.needs.values()) <= (1 - FREE) * memory


def ways_of(
    target: TargetSize, head: HeadSize, *, path: str, num_layers: int, num_gpus: int, memory: float
) -> list[Way]:
    """All ways there are, from the simplest to those for the largest targets.

    Args: num_layers: of the target. memory: bytes of a GPU.
    """
    trained, spread = head.memory_bytes, target.whole // num_gpus + (num_gpus > 1) * target.largest_layer
    usable = int((1 - FREE) * memory)
    run = f"{RUN} target.path={path} data.train=CHATS.jsonl"
    launch = f"accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes {num_gpus} -m"
    train = "headstart train" if num_gpus == 1 else f"{launch} headstart.train"
    alone = target.whole <= usable
    extract = "headstart data extract" if num_gpus == 1 or not alone else f"{launch} headstart.scripts.data.extract"
    over = "" if alone else " target.device_map=auto"
    extraction = target.whole if alone else min(spread, usable)  # device_map puts the others into host memory
    sharded = Way(
        "the target's layers sharded over all GPUs, which all train",
        {"its part and the head": target.bare + target.layers // num_gpus + 3 * target.largest_layer + trained},
        [f"{train} {run} train.shard_target=true train.output_dir=runs/mine"],
    )
    return [
        Way(
            "the whole target on each GPU",
            {"target and head": target.whole + trained},
            [f"{train} {run} train.output_dir=runs/mine"],
        ),
        *[sharded] * (num_gpus > 1),
        Way(
            "one process, the target's layers spread over all GPUs",
            {"its part and the head": spread + trained},
            [f"headstart train {run} target.device_map=auto train.output_dir=runs/mine"],
        ),
        Way(
            "states extracted once, then training without the layers",
            {"extraction": extraction, "training": target.bare + trained},
            [
                f"{extract} {run}{over} --output features/mine",
                f"{train} {run} data.features=features/mine train.output_dir=runs/mine",
            ],
            in_host=0 if alone else max(0, target.whole - num_gpus * usable),
        ),
        served_way(target, head, path=path, num_layers=num_layers, num_gpus=num_gpus, usable=usable, run=run),
    ]


def served_way(
    target: TargetSize, head: HeadSize, *, path: str, num_layers: int, num_gpus: int, usable: int, run: str
) -> Way:
    """vLLM on some of the GPUs, or on other machines, gives states while the others train. usable: bytes of a GPU."""
    serving = next((n for n in range(1, num_gpus) if target.whole // n <= usable), max(1, num_gpus - 1))
    training, part = target.bare + head.memory_bytes, target.whole // serving
    needs = {"vLLM's part": part, "training": training} if num_gpus > 1 else {"vLLM and training": part + training}
    flags = serving_flags(sorted({*head.feature_layers, num_layers}), Path("/dev/shm/states"))
    words = ["vllm", "serve", path, "--tensor-parallel-size", str(serving), "--no-enable-prefix-caching", *flags]
    left, launch = max(1, num_gpus - serving), "accelerate launch --config_file configs/accelerate/ddp.yaml"
    several = f"{launch} --num_processes {left} -m headstart.train"
    visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(num_gpus - left, num_gpus)))} " if num_gpus > 1 else ""
    return Way(
        f"vLLM on {serving} of the GPUs gives states while {left} train",
        needs,
        [
            f"PYTHONPATH={CONNECTOR} {shlex.join(words)}",
            f"{visible}{'headstart train' if left == 1 else several} {run} data.server=http://localhost:8000 "
            "train.output_dir=runs/mine",
        ],
    )


def show_ways(path: str, *, num_gpus: int, memory: float, console: Console) -> bool:
    """Print the parts of a target and the ways; returns whether one fits.

    Args: memory: bytes of a GPU. Raises: BadInput if there is no such target, or it cannot be built without weights.
    """
    skeleton = load_skeleton(TargetConfig(path=path))
    raw = read_config(RUN)["head"]
    config = build(head_class(raw["type"]).config_class, raw, where=f"{RUN}: head")
    parts = target_size(skeleton)
    try:
        head = head_size(config, skeleton)
    except BadInput as error:
        raise BadInput(f"head of {RUN}: {error}") from error
    dtype = str(skeleton.dtype).removeprefix("torch.")
    table = Table(f"part, in {dtype}", "bytes")
    table.add_row("embedding", in_bytes(parts.embedding))
    table.add_row(f"{skeleton.num_layers} layers", in_bytes(parts.layers))
    table.add_row("final norm, output layer", in_bytes(parts.output))
    table.add_row(f"head {config.type}, in training", in_bytes(head.memory_bytes))
    console.print(table)
    if (method := quantization(skeleton.model.config)) is not None:
        console.print(f"stored quantised ({method}): counted as if it were not")
    table = Table(f"way, on {num_gpus} x {in_bytes(int(memory))}", "the fullest GPU holds", "fits")
    ways = ways_of(parts, head, path=path, num_layers=skeleton.num_layers, num_gpus=num_gpus, memory=memory)
    for way in ways:
        needs = "\n".join(f"{what}: {in_bytes(size)}" for what, size in way.needs.items())
        in_host = f", with {in_bytes(way.in_host)} of host memory, slowly" if way.in_host else ""
        table.add_row(way.name, needs, f"yes{in_host}" if way.fits(memory) else "no")
    console.print(table)
    fitting = [way for way in ways if way.fits(memory)]
    for way in fitting:
        console.print(*(f"{way.name}:", *way.commands), sep="\n", soft_wrap=True, highlight=False, markup=False)
    console.print(f"{FREE:.0%} of a GPU is left for activations; a head's other sizes: headstart heads --target {path}")
    return bool(fitting)
