"""How long an optimizer step of a head takes here, measured before a run is planned."""

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

ROWS = 2  # of the batch on which a step is timed


def learning_seconds(
    target: Target, head: DraftHead, train: dict[str, Any], text: Sequence[int], *, length: int
) -> float:
    """An optimizer step as training takes it: the target reads, the head learns, the weights move.

    Args: train: of a run's `train`. text: tokens, which are repeated. length: of a row.
    """
    config = build(TrainConfig, {**train, "output_dir": "", "max_steps": 100})
    optimizer = build_optimizer(head, config)
    tokens = [text[i % len(text)] for i in range(ROWS * length)]
    rows = torch.tensor(tokens, device=target.device).view(ROWS, length)  # [B, T]
    learn(target, head, rows[:1, : min(length, 16)])
    began = time.perf_counter()
    learn(target, head, rows)
    reading = time.perf_counter() - began
    optimizer.step()  # makes its state
    began = time.perf_counter()
    optimizer.step()
    synchronised(target)
    return reading * config.batch_size / ROWS + time.perf_counter() - began


def learn(target: Target, head: DraftHead, rows: torch.Tensor) -> None:
    """Forward and backward on rows of token ids [B, T], of which all but the first few are supervised."""
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, : min(8, rows.shape[1] // 2)] = False
    head.train()
    batch = DraftBatch(rows, mask, target.forward(rows, feature_layers=head.feature_layers))
    is_narrow = target.dtype == torch.bfloat16
    with torch.autocast(target.device.type, torch.bfloat16) if is_narrow else nullcontext():
        loss = head.loss(replace(batch, starts=head.training_starts(mask))).loss
    loss.backward()
    synchronised(target)


def synchronised(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
