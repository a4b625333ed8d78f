"""Measures how long training steps of a head take on this machine, to plan a run."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...configs.loader import build
from ...heads.base import DraftBatch, DraftHead
from ...heads.decoders.cpu.build import multiplies_bf16
from ...heads.decoders.cpu.products import pack_linears
from ...heads.target import Target
from ...train.config import TrainConfig
from ...train.optim import build_optimizer
from ...train.speed import synchronize

ROWS = 2  # in the timed batch


@dataclass(frozen=True)
class StepSeconds:
    """What training takes on this machine."""

    step: float  # seconds of an optimizer step: the target's forward, the head's forward and backward, and the update
    token: float  # seconds of the target's forward, per token


def measure_step(
    target: Target, head: DraftHead, train: dict[str, Any], text: Sequence[int], *, row_length: int
) -> StepSeconds:
    """Times an optimizer step of a head, and the target's forward in it.

    A batch of ROWS rows is timed and scaled to the configured batch size. The head's weights are changed.

    Args:
        train: the `train` section of a run config.
        text: token ids to fill the rows with, repeated as often as needed.
        row_length: tokens per row.
    """
    pack_linears(target.base)  # as training does
    config = build(TrainConfig, {**train, "output_dir": "", "max_steps": 100})
    optimizer = build_optimizer(head, config)
    tokens = [text[i % len(text)] for i in range(ROWS * row_length)]
    rows = torch.tensor(tokens, device=target.device).view(ROWS, row_length)  # [B, T]
    forward_backward(target, head, rows[:1, : min(row_length, 16)])  # warm-up
    started = time.perf_counter()
    reading = forward_backward(target, head, rows)
    batch_seconds = time.perf_counter() - started
    optimizer.step()  # the first one also allocates the optimizer's state
    started = time.perf_counter()
    optimizer.step()
    synchronize(target.device)
    step = batch_seconds * config.batch_size / ROWS + time.perf_counter() - started
    return StepSeconds(step, reading / rows.numel())


def forward_backward(target: Target, head: DraftHead, rows: torch.Tensor) -> float:
    """Runs target and head on rows of token ids [B, T], in which all but the first few tokens are supervised.

    Returns the seconds of the target's forward.
    """
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, : min(8, rows.shape[1] // 2)] = False
    head.train()
    started = time.perf_counter()
    batch = DraftBatch(rows, mask, target.read_texts(rows, feature_layers=head.feature_layers))
    synchronize(target.device)
    seconds = time.perf_counter() - started
    in_bf16 = target.dtype == torch.bfloat16 and (target.device.type != "cpu" or multiplies_bf16())
    with torch.autocast(target.device.type, torch.bfloat16) if in_bf16 else nullcontext():
        loss = head.loss(replace(batch, starts=head.training_starts(mask))).loss
    loss.backward()
    synchronize(target.device)
    return seconds
