"""Heads as if trained, and heads that train on one batch, for tests of several folders."""

from collections.abc import Iterable
from typing import Any

import torch
from headstart.engines.heads import build_head, head_class
from torch import Tensor


@torch.no_grad()
def perturb(head: Any, scale: float, *, seed: int) -> Any:
    """The head, every weight moved away from its start, so that no zero or copied one hides a fault."""
    source = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=source))
    return head


def perturbed(family: str, target: Any, *, scale: float = 0.1, ids: Tensor | None = None, **options: Any) -> Any:
    """Such a head, in training. Args: ids: its draft vocabulary. options: of its config."""
    config = head_class(family).config_class(draft_vocab_size=None if ids is None else len(ids), **options)
    return perturb(build_head(config, target, draft_token_ids=ids, seed=2), scale, seed=4)


def losses_on(head: Any, batch: Any, *, lr: float, num_steps: int, parameters: Iterable[Tensor] = ()) -> list[float]:
    """The losses of steps on one batch. Args: parameters: that learn; none: all of the head's."""
    optimizer, losses = torch.optim.AdamW(list(parameters) or head.parameters(), lr=lr), []
    for _ in range(num_steps):
        loss = head.loss(batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
