"""The config of a run: a YAML with the sections target, head, data and train, and `key=value` overrides of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from ...base.differing import is_same
from ...base.errors import BadInput
from ...base.files import LocalPath
from ...configs.loader import build, read_config
from ...data_pipelines.rows.config import DataConfig
from ...engines.heads import head_class
from ...engines.servers.setting import OURS, EngineSetting
from ...heads.base import HeadConfig
from ...targets.loading import TargetConfig

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
WARMUP = 50  # steps


@dataclass(kw_only=True)
class TrainConfig:
    """How to train, in optimizer steps: each reads batch_size x accumulation rows per process."""

    output_dir: LocalPath  # the run folder
    max_steps: PositiveInt
    batch_size: PositiveInt = 8  # rows per process and forward
    accumulation: PositiveInt = 1  # forwards per step
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; vectors and output layers stay with AdamW
    learning_rate: Rate = 4e-4  # the peak, after warmup_steps; then a cosine down to min_lr_ratio of it
    matrix_learning_rate: Rate | None = None  # the peak for Muon's matrices; None: learning_rate
    # Muon needs whole matrices, and in zero2, zero3 and fsdp2 ranks have parts: then AdamW, at this peak; None: refused
    adamw_learning_rate: Rate | None = None
    # of these max_steps - 1 at most are taken; not given: 50, or a tenth of max_steps if that is at most 50
    warmup_steps: NonNegativeInt = -1
    min_lr_ratio: Share = 0.0
    weight_decay: Amount = 0.0  # of matrices
    max_grad_norm: Amount = 1.0  # 0: gradients are not clipped
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast; master weights stay fp32
    # torch.compile fuses passes over logits and attention scores; results differ by rounding. None: on a GPU, for 500
    # steps or more
    compile: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: PositiveInt = 1
    validate_every: NonNegativeInt = 0  # 0: at the end only
    # a validation also decodes answers to this many of the rows' prompts; 0: none. None: 8, or none where training and
    # validation read extracted features or the target is sharded, as decoding takes the target's layers
    decode_prompts: NonNegativeInt | None = None
    decode_tokens: PositiveInt = 64  # length of those answers
    decode_window: str = ""  # with which the head drafts them, as --draft-window, in quotes: "512:4"; empty: none
    patience: NonNegativeInt = 0  # end after this many validations without a better acceptance_length; 0: never
    checkpoint_every: NonNegativeInt = 0  # 0: only when interrupted
    keep_checkpoints: PositiveInt = 2
    stop_at_step: PositiveInt | None = None  # stop there as if interrupted; the same command without it resumes
    stop_after: Amount = 0.0  # seconds after which to validate and stop as if interrupted, loading included; 0: never
    start_from: LocalPath | None = None  # a head of this family and shapes, or of fewer draft tokens: folder or hub id
    # where head.draft_vocab_size is not given and the target's vocabulary is large: draft the fewest tokens that cover
    # this share of the supervised ones; a head that starts from another one drafts what that one does. 0: all
    draft_coverage: Share = 0.0
    lora_rank: NonNegativeInt = 0  # above 0: train only adapters on that head's linear layers, merged on saving
    lora_alpha: Rate = 32.0  # adapters are scaled by lora_alpha / lora_rank
    wandb_project: str | None = None  # also log to Weights & Biases, offline if there is no key
    # each of several processes holds a share of every layer of the target, gathered while the layer runs; nothing is
    # decoded then. docs/large_targets.md
    shard_target: bool = False
    # so many neighbouring processes read the same rows, each learning a part of their chains: for rows too long for one
    # process; 1: each has rows of its own
    context_parallel: PositiveInt = 1
    device: Literal["cpu", "cuda"] | None = None  # None: cuda if there is one; CUDA_VISIBLE_DEVICES selects GPUs

    watchdog_minutes: Amount = 20.0  # end the process after this time without progress, see stopping.py; 0: never

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            self.warmup_steps = WARMUP if self.max_steps > WARMUP else self.max_steps // 10
        if self.patience and not self.validate_every:
            raise BadInput(f"patience {self.patience}: counts validations, so validate_every must be above 0")
        if self.lora_rank and self.start_from is None:
            raise BadInput(f"lora_rank {self.lora_rank}: adapters need a trained head, so train.start_from is required")
        if self.matrix_learning_rate is not None and self.optimizer != "muon":
            raise BadInput(f"matrix_learning_rate {self.matrix_learning_rate}: only with optimizer muon")

    @property
    def warm_up(self) -> int:
        """The steps of warm-up that are taken."""
        return min(self.warmup_steps, self.max_steps - 1)


@dataclass(frozen=True, kw_only=True)
class StatesEngine(EngineSetting):
    """What gives the target's states: this process, or vLLM's server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_name(OURS, "vllm")


@dataclass(kw_only=True)
class Inputs:
    """What goes into training: all that the `headstart data` commands need of a run."""

    target: TargetConfig
    engine: StatesEngine = field(default_factory=StatesEngine)
    head: HeadConfig
    data: DataConfig


@dataclass(kw_only=True)
class RunConfig(Inputs):
    """Everything that a run depends on; written to OUTPUT_DIR/config.yaml, which repeats the run."""

    train: TrainConfig

    def __post_init__(self) -> None:
        if not self.engine.is_ours and self.data.features is not None:
            features = f"states come from data.features {self.data.features} already"
            raise BadInput(f"engine.name {self.engine.name}: {features}: leave one out")


@dataclass(kw_only=True)
class Outline:
    """The sections of a run config, before the head's family is known."""

    target: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run config. Raises BadInput naming the file or the key at fault."""
    outline = build(Outline, read_config(path, overrides))
    return RunConfig(**vars(inputs_of(outline, path)), train=build(TrainConfig, outline.train, where="train"))


def load_inputs(path: str | Path, overrides: Sequence[str] = ()) -> Inputs:
    """A run config without its `train` section, which may be missing or incomplete. Raises BadInput as `load_run`."""
    return inputs_of(build(Outline, {"train": {}, **read_config(path, overrides)}), path)


def inputs_of(outline: Outline, path: str | Path) -> Inputs:
    if "type" not in outline.head:
        raise BadInput(f"{path}: head.type is missing: the family of head to train")
    return Inputs(
        target=build(TargetConfig, outline.target, where="target"),
        engine=build(StatesEngine, outline.engine, where="engine"),
        head=build(head_class(outline.head["type"]).config_class, outline.head, where="head"),
        data=build(DataConfig, outline.data, where="data"),
    )


WITHOUT_EFFECT = {  # keys that do not change the losses; target and rows are compared by their contents
    "target": {"path", "device_map", "adapter", "revision", "trust_remote_code"},
    "engine": {"name", "python", "args", "server"},
    "head": set[str](),
    "data": {"train", "features", "validation", "num_workers"},
    "train": {"output_dir", "stop_at_step", "stop_after", "device", "log_every", "validate_every", "decode_prompts"}
    | {"decode_tokens", "decode_window", "patience", "checkpoint_every", "keep_checkpoints", "wandb_project"}
    | {"watchdog_minutes", "shard_target"},
}


def differing_key(run: RunConfig, other: dict[str, Any]) -> str | None:
    """The first key in which a resolved config differs from a written one, of those that change the losses."""
    for section, values in asdict(run).items():
        before = other.get(section) or {}
        for key, value in values.items():
            if key not in WITHOUT_EFFECT[section] and not is_same(before.get(key), value):
                return f"{section}.{key}"
    return None
