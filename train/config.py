"""One run's config: target, head, data, train; YAML below, `key=value` on the command line above."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..configs.errors import BadInput
from ..configs.loader import build, read_config
from ..data_pipelines.config import DataConfig
from ..heads.base import HeadConfig
from ..heads.loading import TargetConfig
from ..heads.registry import head_class


@dataclass(kw_only=True)
class TrainConfig:
    """How to train.

    output_dir: the run folder. batch_size: rows per process and forward. accumulation: forwards per optimizer step.
    max_steps: optimizer steps. learning_rate: the peak, reached after warmup_steps, then cosine to min_lr_ratio of it.
    optimizer: `adamw`, or `muon`: Muon for the matrices, AdamW for vectors and output layers. matrix_learning_rate: the
    peak for Muon's matrices; None: learning_rate. beta1, beta2: AdamW's; Muon's momentum is 0.95.
    precision: fp32 or bf16 (autocast; master weights stay fp32). compile: torch.compile fuses the passes over logits
    and over scores of attention; the first step takes longer, and results differ by rounding.
    validate_every, checkpoint_every: steps; 0: at the end only, or never. decode_prompts, decode_tokens: a validation
    also decodes answers of so many tokens to the prompts of the first validation rows; 0 prompts: it does not.
    patience: end the run after so many validations in a row without a better acceptance_length; 0: never. stop_at_step:
    leave after this step as if interrupted, the schedule unchanged; the same command without it goes on.
    wandb_project: also log to Weights & Biases, offline where there is no key.
    tensorboard: also log to OUTPUT_DIR/tensorboard.
    start_from: a head of the same family and shapes to go on from, with its draft vocabulary: RUN/final, the folder of
    an exported or published head, or its hub id; None: a fresh head. lora_rank: above 0, train low-rank adapters of
    that head's linear layers and nothing else, scaled by lora_alpha / lora_rank; they are merged when it is saved.
    """

    output_dir: str
    max_steps: int
    batch_size: int = 8
    accumulation: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 4e-4
    matrix_learning_rate: float | None = None
    warmup_steps: int = 50
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    log_every: int = 1
    validate_every: int = 0
    decode_prompts: int = 8
    decode_tokens: int = 64
    patience: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    stop_at_step: int | None = None
    start_from: str | None = None
    lora_rank: int = 0
    lora_alpha: float = 32.0
    wandb_project: str | None = None
    tensorboard: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "accumulation", "log_every", "keep_checkpoints", "decode_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")
        if self.stop_at_step is not None and self.stop_at_step < 1:
            raise BadInput(f"stop_at_step {self.stop_at_step}: expected at least 1")
        for name in ("decode_prompts", "patience"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} {getattr(self, name)}: expected 0 or more")
        if self.patience and not self.validate_every:
            raise BadInput(f"patience {self.patience}: counts validations, so validate_every must be above 0")
        if self.lora_rank < 0:
            raise BadInput(f"lora_rank {self.lora_rank}: expected 0, for none, or more")
        if self.lora_rank and self.start_from is None:
            raise BadInput(f"lora_rank {self.lora_rank}: adapters need a trained head, so train.start_from is required")
        if self.lora_alpha <= 0:
            raise BadInput(f"lora_alpha {self.lora_alpha}: expected more than 0")
        if self.device not in (None, "cpu", "cuda"):
            raise BadInput(f"device {self.device!r}: expected cpu or cuda; which GPUs, CUDA_VISIBLE_DEVICES says")
        if self.precision not in ("fp32", "bf16"):
            raise BadInput(f"precision {self.precision!r}: expected fp32 or bf16")
        if self.optimizer not in ("adamw", "muon"):
            raise BadInput(f"optimizer {self.optimizer!r}: expected adamw or muon")
        if self.matrix_learning_rate is not None and self.optimizer != "muon":
            raise BadInput(f"matrix_learning_rate {self.matrix_learning_rate}: only with optimizer muon")
        for name in ("learning_rate", "matrix_learning_rate"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise BadInput(f"{name} {getattr(self, name)}: expected more than 0")


@dataclass(kw_only=True)
class Inputs:
    """What goes into training: all that the `headstart data` commands need of a run."""

    target: TargetConfig
    head: HeadConfig
    data: DataConfig


@dataclass(kw_only=True)
class RunConfig(Inputs):
    """Everything that a run depends on; written to OUTPUT_DIR/config.yaml, which repeats the run."""

    train: TrainConfig


@dataclass(kw_only=True)
class Outline:
    """The sections of a run config, before the head's family is known."""

    target: dict[str, Any]
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
        head=build(head_class(outline.head["type"]).config_class, outline.head, where="head"),
        data=build(DataConfig, outline.data, where="data"),
    )


def differing_key(run: RunConfig, other: dict[str, Any]) -> str | None:
    """The first key in which a resolved config differs from a written one, but for those that change no result."""
    for section, values in asdict(run).items():
        for key, value in values.items():
            if key not in ("stop_at_step", "num_workers") and (other.get(section) or {}).get(key) != value:
                return f"{section}.{key}"
    return None
