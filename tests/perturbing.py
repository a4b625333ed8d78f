"""Heads as if trained, for tests of several folders."""

from typing import Any

import torch


@torch.no_grad()
def perturb(head: Any, scale: float, *, seed: int) -> Any:
    """The head, every weight moved away from its start, so that no zero or copied one hides a fault."""
    source = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=source))
    return head
