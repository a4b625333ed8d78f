"""The optimizer and its schedule, a pure function of the step."""

import math

import torch
from torch import nn

from .config import TrainConfig


def build_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in head.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=all(p.device.type in ("cpu", "cuda") for p in head.parameters()),
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of 0-based `step`: linear warm-up, then half a cosine down to min_lr_ratio of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
