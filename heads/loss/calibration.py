"""Calibrating a confidence head: its logits become those of the share of drafts that held-out rows accept.

A line through the logits by logistic regression (Platt 1999); with its shift left out it would be temperature scaling
(Guo et al. 2017, arXiv 1706.04599). It goes into the head's own tensors, which are all that serving engines load, so it
is the same for all slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT, NUM_BINS = 16.0, 1024  # logits are counted in bins from -LIMIT to LIMIT: counts of several ranks can be added
NUM_NEWTON = 30  # steps of the fit, which converges in fewer
SPREAD = 10.0  # standard deviation of the prior on scale - 1 and shift: keeps the fit finite where all are accepted


@dataclass(frozen=True)
class ConfidenceLine:
    """logit -> scale * logit + shift."""

    scale: float
    shift: float


def count_accepted(logits: Tensor, valid: Tensor, hits: Tensor) -> Tensor:
    """[2, NUM_BINS] drafts that were reached, and of these the accepted ones, by logit.

    Args: logits, valid, hits: [B, S, K] teacher-forced, of chains; a draft is reached if all before it are hits.
    """
    before = torch.cat([torch.ones_like(hits[..., :1]), hits[..., :-1]], -1)
    reached = (before.long().cumprod(-1) > 0) & valid
    bins = ((logits.float() / LIMIT + 1) / 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    return torch.stack([bins[some].bincount(minlength=NUM_BINS) for some in (reached, reached & hits)])


def fit_confidence(counts: Tensor) -> ConfidenceLine | None:
    """The line that makes what was accepted likeliest, by Newton's method; None without drafts.

    Args: counts: of `count_accepted`.
    """
    tried, taken = counts.cpu().double()  # [NUM_BINS] each
    if not tried.any():
        return None
    logits = ((torch.arange(NUM_BINS).double() + 0.5) / NUM_BINS * 2 - 1) * LIMIT
    inputs = torch.stack([logits, torch.ones_like(logits)])  # [2, NUM_BINS]
    line = start = torch.tensor([1.0, 0.0], dtype=torch.double)
    precision = torch.eye(2, dtype=torch.double) / SPREAD**2
    for _ in range(NUM_NEWTON):
        chance = (line @ inputs).sigmoid()
        slope = inputs @ (taken - tried * chance) - precision @ (line - start)
        curvature = (inputs * (tried * chance * (1 - chance))) @ inputs.T + precision
        line = line + torch.linalg.solve(curvature, slope).clamp(-1, 1)  # a full step may overshoot far from the end
    scale, shift = line.tolist()
    return ConfidenceLine(round(scale, 5), round(shift, 5))
