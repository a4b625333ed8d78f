"""Measures how long an optimizer step of a head takes on this machine, to plan a run."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...configs.loader import build
from ...heads.base import DraftBatch, DraftHead
from ...heads.target import Target
from ...train.config import TrainConfig
from ...train.optim import build_optimizer
from ...train.speed import synchronize

ROWS = 2  # in the timed batch


def optimizer_step_seconds(
    target: Target, head: DraftHead, train: dict[str, Any], text: Sequence[int], *, row_length: int
) -> float:
    """Seconds of an optimizer step: the target's forward, the head's forward and backward, and the update.

    A batch of ROWS rows is timed and scaled to the configured batch size. The head's weights are changed.

    Args:
        train: the `train` section of a run config.
        text: token ids to fill the rows with, repeated as often as needed.
        row_length: tokens per row.
    """
    config = build(TrainConfig, {**train, "output_dir": "", "max_steps": 100})
    optimizer = build_optimizer(head, config)
    tokens = [text[i % len(text)] for i in range(ROWS * row_length)]
    rows = torch.tensor(tokens, device=target.device).view(ROWS, row_length)  # [B, T]
    forward_backward(target, head, rows[:1, : min(row_length, 16)])  # warm-up
    started = time.perf_counter()
    forward_backward(target, head, rows)
    batch_seconds = time.perf_counter() - started
    optimizer.step()  # the first one also allocates the optimizer's state
    started = time.perf_counter()
    optimizer.step()
    synchronize(target.device)
    return batch_seconds * config.batch_size / ROWS + time.perf_counter() - started


def forward_backward(target: Target, head: DraftHead, rows: torch.Tensor) -> None:
    """Runs target and head on rows of token ids [B, T], in which all but the first few tokens are supervised."""
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, : min(8, rows.shape[1] // 2)] = False
    head.train()
    batch = DraftBatch(rows, mask, target.forward(rows, feature_layers=head.feature_layers))
    in_bf16 = target.dtype == torch.bfloat16
    with torch.autocast(target.device.type, torch.bfloat16) if in_bf16 else nullcontext():
        loss = head.loss(replace(batch, starts=head.training_starts(mask))).loss
    loss.backward()
    synchronize(target.device)
