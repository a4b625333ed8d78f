"""An EAGLE layer in closed form."""

import torch
from headstart.heads.eagle import EagleConfig
from headstart.heads.registry import build_head


def test_a_head_with_a_trained_bias_starts_as_one_without(target, batches):
    """The fit has no constant, and logits that are scaled down are scaled whole."""
    logits = []
    for bias in (False, True):
        head = build_head(EagleConfig(bias=bias), target, seed=1)
        head.begin_training(iter(batches[:-1]))
        with torch.no_grad():
            head.scale_outputs([0.5])
        logits.append(head.teacher_forced_logits(batches[-1])[1])
    torch.testing.assert_close(*logits)
