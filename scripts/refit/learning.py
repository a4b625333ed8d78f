"""Continues training the head: one run of `headstart train` that starts from it, for the time available."""

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

from ...configs.errors import BadInput
from ...configs.files import write_text
from ...data_pipelines.storage.samples import Sample
from ...data_pipelines.traffic import Served, written
from ...data_pipelines.vocab import count_supervised, coverage, draft_vocabulary, worthwhile_size
from ...heads.base import DraftHead, HeadConfig
from ...heads.fit import row_share
from ...heads.registry import start_head
from ...heads.target import Target
from ..auto.candidates import TRAINING, find_candidates
from ..unattended.pace import measure_step
from .journal import Plan
from .session import Settings

LEAST_STEPS = 10
NUM_VALIDATIONS = 4  # validations of the training
PATIENCE = 2  # validations without improvement after which it ends
MOST_EPOCHS = 10  # passes over the rows, upper limit
WARMUP = 10  # steps
SAVE_SECONDS = 60.0  # between checkpoints
SAFETY = 0.9  # share of the available time that is planned for
RATE = 0.1  # learning rates, relative to a fresh head's: at those a trained head first loses much of what it knew


def training_of(config: HeadConfig) -> dict[str, object]:
    """The `train` section with which `headstart auto` trains heads of that family, with lower learning rates."""
    alike = (candidate.train for candidate in find_candidates() if candidate.head.type == config.type)
    section = next(alike, TRAINING)
    return {key: RATE * float(value) if key.endswith("learning_rate") else value for key, value in section.items()}


def grown_vocabulary(head: DraftHead, samples: Sequence[Sample]) -> Tensor | None:
    """[Vd] the draft vocabulary with which a head learns on: its own and, if the rows need them, more tokens.

    The size is that of `worthwhile_size`, where that is not more than half of the target's vocabulary.

    Args: samples: the training rows.
    Returns None if the head's own vocabulary is whole.
    """
    if head.vocabulary is None:
        return None
    target, kept = head.target, head.vocabulary.to_target.tolist()
    counts = count_supervised(samples, vocab_size=target.vocab_size)
    size, covered = worthwhile_size(counts, kept, row_share=row_share(target))
    needs_more = covered is not None and round(coverage(counts, torch.tensor(kept)), 4) < covered
    wider = max(size or 0, len(kept)) if needs_more else len(kept)
    return draft_vocabulary(counts, size=wider, always=kept)


def step_seconds(target: Target, config: HeadConfig, folder: str, row: list[int], ids: Tensor | None) -> float:
    """Seconds of an optimizer step.

    Args: folder: of the head. row: token ids of a row of typical length. ids: [Vd] the draft vocabulary; None: all.
    """
    head = start_head(config, target, folder, draft_token_ids=ids)
    return measure_step(target, head, training_of(config), row, row_length=len(row)).step


def planned_steps(
    seconds: float, *, step: float, start: float, validation_seconds: float, num_rows: int, batch_size: int
) -> int:
    """Optimizer steps of a training.

    Args:
        seconds: for the whole training.
        step: seconds of an optimizer step.
        start: seconds until the first step.
        validation_seconds: seconds of a validation.
        num_rows: training rows; they are read MOST_EPOCHS times at most.
        batch_size: rows per step.

    Raises: BadInput if there is no time for LEAST_STEPS steps.
    """
    steps = int((SAFETY * (seconds - NUM_VALIDATIONS * validation_seconds) - start) / step)
    if steps < LEAST_STEPS:
        missing = (LEAST_STEPS * step + start) / SAFETY + NUM_VALIDATIONS * validation_seconds - seconds
        raise BadInput(f"--budget: too short for this target here; {-(-missing // 60):.0f}m more are the least")
    return min(steps, max(MOST_EPOCHS * num_rows // batch_size, LEAST_STEPS))


def write_run(
    folder: Path,
    settings: Settings,
    config: HeadConfig,
    plan: Plan,
    *,
    train: list[Served],
    validation: list[Served],
) -> Path:
    """Writes the rows of the training and its config, whose path is returned; without validation rows, none is made."""
    write_text(folder / "data" / "train.jsonl", written(train))
    write_text(folder / "data" / "validation.jsonl", written(validation))
    validating = {
        "validate_every": max(plan.max_steps // NUM_VALIDATIONS, 1),
        "patience": PATIENCE,
        "decode_prompts": 0,
    }
    rows = {"train": str(folder / "data" / "train.jsonl"), "max_length": settings.max_length, "layout": "bucketed"}
    run = {
        "target": {"path": settings.target, "dtype": settings.dtype},
        "head": {**config.as_dict(), "draft_vocab_size": plan.draft_vocab_size},
        "data": rows | ({"validation": str(folder / "data" / "validation.jsonl")} if validation else {}),
        "train": {
            **training_of(config),
            "output_dir": str(folder / "training"),
            "start_from": settings.head,
            "max_steps": plan.max_steps,
            "warmup_steps": min(WARMUP, plan.max_steps - 1),
            "precision": "bf16" if settings.dtype == "bfloat16" else "fp32",
            "seed": settings.seed,
            "device": "cpu" if settings.device == "cpu" else None,
            "checkpoint_every": max(int(SAVE_SECONDS / plan.step_seconds), 1),
            "keep_checkpoints": 1,
            **(validating if validation else {}),
        },
    }
    return write_text(folder / "refit.yaml", yaml.safe_dump(run, sort_keys=False, allow_unicode=True))


def head_of(run: Path) -> str:
    """Folder of the best head of a run by its validations, else of its last one; empty if there is none."""
    return next((str(run / name) for name in ("best", "final") if (run / name).is_dir()), "")
