"""The ways of training a head for a target that fit on some GPUs, by the memory that they take: no weights are read."""

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..base.errors import BadInput
from ..configs.loader import PACKAGE_CONFIGS, build, read_config
from .heads_command import in_bytes

if TYPE_CHECKING:
    from ..heads.base import HeadConfig
    from ..heads.stored.fit import HeadSize, TargetSize
    from ..targets.target import Target

RUN = "runs/eagle3.yaml"  # whose head is counted
FREE = 0.1  # of a GPU's memory, left for activations and the framework
DISK_RATE = 1e9  # bytes that a common NVMe disk reads in a second
ROW = 1024  # tokens of the row whose stored states are counted


@dataclass(frozen=True)
class Way:
    """A way of training a head.

    needs: bytes on the fullest GPU, by stage. in_host: bytes of the machine's own memory that it takes as well.
    """

    name: str
    needs: dict[str, int]
    commands: list[str]
    in_host: int = 0


@dataclass(frozen=True)
class ServerSize:
    """Roughly the bytes that vLLM takes: of the weights, as stored, and of keys and values of the rows that it is asked
    for at once, both in parts on its GPUs; and of these rows' states, on the first."""

    weights: int
    keys: int
    states: int

    @classmethod
    def of(cls, skeleton: "Target", *, num_states: int) -> "ServerSize":
        """Args: num_states: that it gives of a token."""
        from ..data_pipelines.rows.config import DataConfig
        from ..data_pipelines.served.reading import AT_ONCE
        from ..eval.figures.bandwidth import cache_bytes
        from ..targets.weights.stored import stored_tensors

        weights = sum(parameter.nbytes for parameter in skeleton.model.parameters())
        if Path(skeleton.name).is_dir():
            with suppress(BadInput):  # a folder without weights
                weights = sum(tensor.num_bytes for tensor in stored_tensors(skeleton.name).values())
        keys = AT_ONCE * cache_bytes(skeleton, DataConfig.max_length)
        states = AT_ONCE * DataConfig.max_length * num_states * skeleton.hidden_size * skeleton.dtype.itemsize
        return cls(weights, keys, states)

    def on(self, num_gpus: int) -> int:
        """On the first of so many GPUs."""
        return (self.weights + self.keys) // num_gpus + self.states


@dataclass(frozen=True)
class Ways:
    """The ways of training a head for a target on the GPUs of a machine."""

    path: str  # of the target
    num_layers: int
    num_heads: int  # of attention; 0: any number of GPUs shares it out
    target: "TargetSize"
    head: "HeadSize"
    num_gpus: int
    memory: float  # bytes of a GPU
    server: ServerSize

    @property
    def usable(self) -> int:
        """Bytes of a GPU that weights and optimizer state may take."""
        return int((1 - FREE) * self.memory)

    def fits(self, way: Way) -> bool:
        return max(way.needs.values()) <= self.usable

    def all(self) -> list[Way]:
        """From the simplest to those for the largest targets."""
        needs = {"target and head": self.target.whole + self.head.memory_bytes}
        whole = Way("the whole target on each GPU", needs, [self.training()])
        return [whole, *[self.sharded()] * (self.num_gpus > 1), self.extracted(), self.served()]

    @property
    def without_layers(self) -> int:
        """Bytes of training where the target's states come from elsewhere."""
        return self.target.bare + self.head.memory_bytes

    @property
    def run(self) -> str:
        return f"{RUN} {shlex.quote(f'target.path={self.path}')} data.train=CHATS.jsonl"

    def training(self, key: str = "", *, num_processes: int | None = None) -> str:
        """The command that trains, with a further key of the run; by default in a process on each GPU."""
        start = started("train", self.num_gpus if num_processes is None else num_processes)
        return " ".join([start, self.run, *[key] * bool(key), "train.output_dir=runs/mine"])

    def sharded(self) -> Way:
        name, part = "the target's layers sharded over all GPUs, which all train", self.target.layers // self.num_gpus
        needs = {"its part and the head": part + 3 * self.target.largest_layer + self.without_layers}
        return Way(name, needs, [self.training("train.shard_target=true")])

    def extracted(self) -> Way:
        name, whole = "states extracted once, then training without the layers", self.target.whole
        extraction, in_host, extract = whole, 0, f"{started('data extract', self.num_gpus)} {self.run}"
        if whole > self.usable:  # layers go to all GPUs, and what these cannot hold to the host's memory
            part = whole // self.num_gpus + (self.num_gpus > 1) * self.target.largest_layer
            extraction, in_host = min(part, self.usable), max(whole - self.num_gpus * self.usable, 0)
            extract = f"{started('data extract', 1)} {self.run} target.device_map=auto"
        commands = [f"{extract} --output features/mine", self.training("data.features=features/mine")]
        return Way(name, {"extraction": extraction, "training": self.without_layers}, commands, in_host)

    def served(self) -> Way:
        """vLLM on the fewest GPUs that hold the target gives states, and the others train; of one GPU it has a part."""
        from ..data_pipelines.rows.config import DataConfig
        from ..data_pipelines.served.reading import AT_ONCE
        from ..data_pipelines.served.vllm_process import CONNECTOR, serving_flags

        num = self.num_gpus
        sizes = [size for size in range(1, max(num, 2)) if self.num_heads % size == 0]  # vLLM shares the heads out
        serving = next((size for size in sizes if self.server.on(size) <= self.usable), sizes[-1])
        left, part = num - serving, self.server.on(serving)
        flags = serving_flags(sorted({*self.head.feature_layers, self.num_layers}), Path("/dev/shm/states"))
        parallel = ["--tensor-parallel-size", str(serving), "--no-enable-prefix-caching"]
        parallel += [] if left else ["--gpu-memory-utilization", f"{min(part / self.memory + FREE / 2, 1):.2f}"]
        parallel += ["--max-num-seqs", str(AT_ONCE), "--max-model-len", str(DataConfig.max_length)]
        serve = (
            f"PYTHONPATH={shlex.quote(str(CONNECTOR))} {shlex.join(['vllm', 'serve', self.path, *parallel, *flags])}"
        )
        train = self.training("engine.name=vllm engine.server=http://localhost:8000", num_processes=max(left, 1))
        if not left:
            needs = {"vLLM and training": part + self.without_layers}
            return Way("vLLM gives states on the GPU that trains", needs, [serve, train])
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(serving, num)))}"
        name = f"vLLM on {serving} of the GPUs gives states while {left} train"
        return Way(name, {"vLLM's part": part, "training": self.without_layers}, [serve, f"{visible} {train}"])


def started(command: str, num_processes: int) -> str:
    """What runs `headstart train` or `headstart data extract` in so many processes."""
    if num_processes == 1:
        return f"headstart {command}"
    module = "headstart.train" if command == "train" else "headstart.scripts.data.extract"
    config = shlex.quote(str(PACKAGE_CONFIGS / "accelerate" / "ddp.yaml"))
    return f"accelerate launch --config_file {config} --num_processes {num_processes} -m {module}"


def show_ways(path: str, *, num_gpus: int, memory: float, console: Console) -> bool:
    """Print the bytes of a target by part, the ways, and the commands of those that fit; returns whether one does.

    Args: path: of the target. memory: bytes of a GPU.
    Raises: BadInput if there is no such target, or it cannot be built without weights.
    """
    from ..engines.heads import head_class
    from ..heads.stored.fit import head_size, target_size
    from ..targets.loading import TargetConfig, quantization
    from ..targets.skeleton import load_skeleton

    skeleton = load_skeleton(TargetConfig(path=path))
    raw = read_config(RUN)["head"]
    config = build(head_class(raw["type"]).config_class, raw, where=f"{RUN}: head")
    parts = target_size(skeleton)
    try:
        head = head_size(config, skeleton)
    except BadInput as error:
        raise BadInput(f"head of {RUN}: {error}") from error
    table = Table(f"part, in {str(skeleton.dtype).removeprefix('torch.')}", "bytes")
    table.add_row("embedding", in_bytes(parts.embedding))
    table.add_row(f"{skeleton.num_layers} layers", in_bytes(parts.layers))
    table.add_row("final norm, output layer", in_bytes(parts.output))
    table.add_row(f"head {config.type}, in training", in_bytes(head.memory_bytes))
    server = ServerSize.of(skeleton, num_states=len({*head.feature_layers, skeleton.num_layers}))
    table.add_row("vLLM, roughly: weights as stored", in_bytes(server.weights))
    table.add_row("  keys and values of its rows", in_bytes(server.keys))
    table.add_row("  states of its rows", in_bytes(server.states))
    console.print(table)
    if (method := quantization(skeleton.model.config)) is not None:
        console.print(f"stored quantised ({method}): counted as if it were not, but for vLLM")
    num_heads = getattr(skeleton.model.config.get_text_config(), "num_attention_heads", None)
    num_heads = num_heads if isinstance(num_heads, int) else 0  # of recurrent targets, and where layers differ
    ways = Ways(path, skeleton.num_layers, num_heads, parts, head, num_gpus, memory, server)
    table = Table(f"way, on {num_gpus} x {in_bytes(int(memory))}", "the fullest GPU holds", "fits")
    for way in ways.all():
        needs = "\n".join(f"{stage}: {in_bytes(size)}" for stage, size in way.needs.items())
        in_host = f", with {in_bytes(way.in_host)} of host memory, slowly" if way.in_host else ""
        table.add_row(way.name, needs, f"yes{in_host}" if ways.fits(way) else "no")
    console.print(table)
    fitting = [way for way in ways.all() if ways.fits(way)]
    lines = [line for way in fitting for line in (f"{way.name}:", *way.commands)]
    lines += stored_states_lines(config, skeleton)
    lines += [f"{FREE:.0%} of a GPU is left for activations; a head's other sizes: headstart heads --target {path}"]
    console.print(*lines, sep="\n", soft_wrap=True, highlight=False, markup=False)
    return bool(fitting)


def stored_states_lines(config: "HeadConfig", target: "Target") -> list[str]:
    """The bytes of a token's stored states, the tokens that this disk has room for, and when storing them pays.

    Extraction runs the target once and not in every epoch. From the second epoch on it thus pays where states are read
    from the disk sooner than the target computes them, with 2 FLOP for each of its parameters and tokens.
    """
    import numpy as np

    from ..data_pipelines.storage.extract import disk_free
    from ..data_pipelines.storage.features import Reads
    from ..data_pipelines.storage.quantise import STORAGE
    from ..heads.stored.fit import build_skeleton_head

    reads, row = Reads.of(build_skeleton_head(config, target)), np.ones(ROW, dtype=bool)
    sizes = {name: reads.row_bytes(row, hidden_size=target.hidden_size, storage_dtype=name) / ROW for name in STORAGE}
    smallest, free = min(sizes, key=lambda name: sizes[name]), disk_free(Path())
    rate = DISK_RATE / sizes[smallest]
    num_parameters = sum(parameter.numel() for parameter in target.model.parameters())
    told = ", ".join(f"{in_bytes(int(1e7 * size))} in {name}" for name, size in sizes.items())
    return [
        f"states stored by `headstart data extract` for {config.type}: "
        f"10,000 chats of 1,000 tokens to learn take {told}",
        f"{in_bytes(free)} of this disk are free, for {free / sizes[smallest]:,.0f} tokens in {smallest}",
        f"storing them pays from the second epoch on where the target reads fewer than {rate:,.0f} tokens a second "
        f"({2 * num_parameters * rate / 1e12:,.1f} TFLOP/s), as many as a disk of {in_bytes(int(DISK_RATE))}/s gives",
    ]
