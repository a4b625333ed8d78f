"""Calibrating a confidence head: its logits become those of the share of drafts that held-out rows accept.

A line through the logits by logistic regression (Platt 1999); with its shift left out it would be temperature scaling
(Guo et al. 2017, arXiv 1706.04599). One line for all slots goes into the head's tensors, as those are all that serving
engines load. What each slot needs besides stays in the head's config, where our own engine reads it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT, NUM_BINS = 16.0, 1024  # logits are counted in bins from -LIMIT to LIMIT: counts of several ranks can be added
NUM_NEWTON = 30  # steps of the fit, which converges in fewer
# how far a slot's scale (from 1) and shift (from 0) are expected to be from the line of all slots, in standard
# deviations: few drafts move a slot's line little
SPREAD_OF_SLOTS = (0.1, 0.2)
SPREAD_OF_ALL = (10.0, 10.0)


@dataclass(frozen=True)
class Line:
    """logit -> scale * logit + shift."""

    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class ConfidenceLines:
    """What calibrates a confidence head: `common` to all slots, and then by slot."""

    common: Line
    by_slot: list[Line]  # [K]


def count_accepted(logits: Tensor, valid: Tensor, hits: Tensor) -> Tensor:
    """[2, K, NUM_BINS] drafts that were reached, and of these the accepted ones, by slot and logit.

    Args: logits, valid, hits: [B, S, K] teacher-forced, of chains; a draft is reached if all before it are hits.
    """
    before = torch.cat([torch.ones_like(hits[..., :1]), hits[..., :-1]], -1)
    reached = (before.long().cumprod(-1) > 0) & valid
    bins = ((logits.float() / LIMIT + 1) / 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    counts = [
        torch.stack([bins[..., k][some[..., k]].bincount(minlength=NUM_BINS) for k in range(logits.shape[-1])])
        for some in (reached, reached & hits)
    ]
    return torch.stack(counts)


def fit_confidence(counts: Tensor) -> ConfidenceLines | None:
    """The lines for the drafts of `count_accepted`; None if there are none."""
    tried, taken = counts.cpu().double()  # [K, NUM_BINS] each
    if not tried.any():
        return None
    logits = ((torch.arange(NUM_BINS).double() + 0.5) / NUM_BINS * 2 - 1) * LIMIT
    common = fitted(logits, tried.sum(0), taken.sum(0), spread=SPREAD_OF_ALL)
    moved = common.scale * logits + common.shift
    slots = [fitted(moved, *of_slot, spread=SPREAD_OF_SLOTS) for of_slot in zip(tried, taken, strict=True)]
    return ConfidenceLines(common, slots)


def fitted(logits: Tensor, tried: Tensor, taken: Tensor, *, spread: tuple[float, float]) -> Line:
    """The line that makes what was accepted likeliest, by Newton's method; a normal prior around scale 1 and shift 0.

    Args: logits, tried, taken: [n] double. spread: standard deviations of the prior.
    """
    start = torch.tensor([1.0, 0.0], dtype=torch.double)
    precision = torch.diag(torch.tensor(spread, dtype=torch.double) ** -2)
    inputs, line = torch.stack([logits, torch.ones_like(logits)]), start  # [2, n]
    for _ in range(NUM_NEWTON):
        chance = (line @ inputs).sigmoid()
        slope = inputs @ (taken - tried * chance) - precision @ (line - start)
        curvature = (inputs * (tried * chance * (1 - chance))) @ inputs.T + precision
        line = line + torch.linalg.solve(curvature, slope).clamp(-1, 1)  # a full step may overshoot far from the end
    return Line(*(round(float(value), 5) for value in line))
