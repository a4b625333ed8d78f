"""Rows that starts in closed form are fitted to."""

import pytest
import torch
from headstart.heads.base import DraftBatch


@pytest.fixture
def batches(target):
    """Twelve batches of four rows of 40 tokens, in which each token decides the next one."""
    source, made = torch.Generator().manual_seed(3), []
    for _ in range(12):
        ids = torch.randint(3, target.vocab_size, (4, 40), generator=source)
        mask = torch.arange(40).expand(4, -1) >= 3
        made.append(DraftBatch(ids, mask, target.forward(ids, feature_layers=(1, 2))))
    return made


@pytest.fixture
def signed(target):
    """Real targets have a few channels of negative gain."""
    gain = target.final_norm.weight
    before = gain.detach().clone()
    with torch.no_grad():
        gain[::7] *= -1.5
    yield
    with torch.no_grad():
        gain.copy_(before)
