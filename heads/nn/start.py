"""Where a fresh head starts: linear maps in closed form, and logits no louder than even guessing deserves.

A copied output layer gives logits of a size that only states which know the next token deserve, so a fresh head can
begin far above the loss of guessing evenly. Its families regress their linear maps onto the target's next states over
the first rows of training (`DraftHead.fit`); what is loud all the same is scaled down (`DraftHead.scale_outputs`).

Source: our own; measured in docs/LOG.md, 2026-11-22.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..target import Target
from .batch import DraftBatch

NUM_FITTED = 16_384  # positions that a start is made of, about
FITTED_DEPTHS = 3  # drafts ahead that a recurrent head's start covers
NUM_JUDGED = 128  # positions at each depth on which the loss is measured
FACTORS = [0.5 ** (i / 2) for i in range(26)]  # on logits
SLACK = 0.01  # nats above the least loss
STRENGTH = 1e-2  # of the regression, relative to the mean square of what is read


def first_rows(batches: Iterable[DraftBatch]) -> tuple[list[DraftBatch], DraftBatch]:
    """About NUM_FITTED supervised tokens to start from, and a batch behind them to judge by; of one batch, both."""
    rows, found = list[DraftBatch](), 0
    for batch in batches:
        rows.append(batch)
        if found >= NUM_FITTED:
            break
        found += int(batch.loss_mask.sum())
    return rows[:-1] or rows, rows[-1]


def linear_map(x: Tensor, y: Tensor, *, keeps_size: bool = False) -> Tensor | None:
    """x [n, in], y [n, out] -> [in, out] the regularised least-squares map of normalised channels; None: n is less than
    two for each channel of y. keeps_size: what it maps to is as large as y, which regression makes smaller."""
    if len(x) < 2 * y.shape[1]:
        return None
    x, y = x.float(), y.float()
    sizes = x.square().mean(0).sqrt().clamp_min(1e-6)
    weight = ridge(x / sizes, y, strength=STRENGTH) / sizes[:, None]
    return weight * (y.norm() / (x @ weight).norm().clamp_min(1e-9) if keeps_size else 1.0)


def ridge(x: Tensor, y: Tensor, *, strength: float = STRENGTH) -> Tensor:
    """x [n, in], y [n, out] -> [in, out] the regularised least-squares map. strength: relative to the mean of x^2."""
    is_wide = x.shape[1] > len(x)  # then the same by the kernel, which is smaller
    squares = (x @ x.T if is_wide else x.T @ x).double()
    squares.diagonal().add_(strength * squares.trace() / x.shape[1])
    if is_wide:
        return x.T @ torch.linalg.solve(squares, y.double()).float()
    return torch.linalg.solve(squares, (x.T @ y).double()).float()


def spread(valid: Tensor) -> Tensor:
    """Of [B, S] bool, at most NUM_JUDGED, evenly spread over all that are True."""
    where = valid.flatten().nonzero()[:, 0]
    where = where[:: max(1, -(-len(where) // NUM_JUDGED))]
    return torch.zeros_like(valid.flatten()).index_fill(0, where, True).view_as(valid)


def losses_by_factor(logits: Tensor, probs: Tensor) -> Tensor:
    """[G] cross entropy of logits [n, Vd], times each of FACTORS, to the target's probs [n, Vd]."""
    return torch.stack([-(probs * (factor * logits).log_softmax(-1)).sum(-1).mean() for factor in FACTORS])


def quieter(losses: Tensor, num_drafted: int) -> float:
    """Of `losses_by_factor` [K, G] over all depths, the largest factor of about the least loss: what is scaled down to
    nothing learns slowly. 1 where the loss is not above even guessing's as it is."""
    mean = losses.nanmean(0)  # rows may be too short for the last depths
    if not mean[0] > math.log(num_drafted):
        return 1.0
    return FACTORS[int((mean <= mean.min() + SLACK).int().argmax())]


def copy_layers(ours: Target, target: Target) -> None:
    """Has a shallower model of the target's architecture start as the target's first layers, its last one, where that
    is of the same kind, and its final norm."""
    last, kinds = ours.num_layers - 1, target.layer_types or [""] * target.num_layers
    for i, layer in enumerate(ours.layers):
        source = -1 if i == last and kinds[-1] == kinds[i] else i
        theirs = target.layers[source].state_dict()
        if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in layer.state_dict().items()}:
            layer.load_state_dict(theirs)
    if ours.final_norm is not None and target.final_norm is not None:
        ours.final_norm.load_state_dict(target.final_norm.state_dict())


def scale_norm(norm: nn.Module, factor: float) -> None:
    """Multiplies what a norm returns, also where its gain is stored as 1 + w."""
    if "RMSNorm" not in type(norm).__name__:
        for parameter in norm.parameters():
            parameter.mul_(factor)
        return
    weight = norm.get_parameter("weight")
    weight.add_((factor - 1) * norm(torch.ones_like(weight)[None])[0])  # the all-ones vector is mapped onto the gain
