"""Cross entropies with gradients in closed form: no autograd graph and few passes over the logits."""

import torch
from torch import Tensor

from .functions import EXPONENT, Rows
from .fusing import Fusable

CLOSED = ("hard_ce", "greedy_gce", "soft_ce", "restricted_ce", "kl")


def closed_mix(rows: Rows, logits: Tensor, scale: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor]:
    """The mix [n] of losses in CLOSED, as `LOSSES` defines them, and the most probable tokens [n].

    Args: logits: [n, Vd] in the output layer's dtype. scale: scalar or [n]. out: [n, Vd] receives scale times the
    gradients of the logits.
    """
    mix, n = rows.spec.mix, len(logits)
    labels = {
        name: rows.target.best[rows.at] if name == "greedy_gce" else rows.draft_labels
        for name in CLOSED[:2]
        if name in mix
    }
    probs, covered, soft = distribution_of(rows)
    constant = mix["kl"] * rows.target.negative_entropy[rows.at] if "kl" in mix else None
    shares = {name: float(mix[name]) for name in labels}
    scale = scale.expand(n)
    values, ids = cross_entropies(logits, out, scale, labels, probs, covered, soft, shares=shares)
    return values if constant is None else values + constant, ids


def distribution_of(rows: Rows) -> tuple[Tensor | None, Tensor | None, float]:
    """The distribution [n, Vd] whose cross entropy the mix has, its sum [n], and its weight; None, None, 0: none."""
    mix, target, at = rows.spec.mix, rows.target, rows.at
    whole, restricted = float(mix.get("soft_ce", 0.0) + mix.get("kl", 0.0)), float(mix.get("restricted_ce", 0.0))
    if not restricted:
        return (target.probs[at], target.covered[at], whole) if whole else (None, None, 0.0)
    known = (rows.draft_labels >= 0).float()
    probs = target.renormalised[at] * known[:, None]
    if not whole:
        return probs, known, restricted
    return restricted * probs + whole * target.probs[at], restricted * known + whole * target.covered[at], 1.0


@Fusable
def cross_entropies(
    logits: Tensor,
    out: Tensor,
    scale: Tensor,
    labels: dict[str, Tensor],
    probs: Tensor | None,
    covered: Tensor | None,
    soft: float,
    *,
    shares: dict[str, float],
) -> tuple[Tensor, Tensor]:
    """`closed_mix` on plain tensors. labels: by loss name, draft ids [n]; `shares` are their weights in the mix. probs
    [n, Vd], covered [n], soft: as `distribution_of` gives them."""
    given, logits = logits, logits.float()
    scores, ids = logits.max(-1, keepdim=True)  # [n, 1]
    grads = torch.softmax(logits, -1, out=out if given.dtype == out.dtype == logits.dtype else None)
    normaliser = scores[:, 0] - grads.gather(-1, ids)[:, 0].log()  # [n] log of the sum of exp(logits)
    values = torch.zeros_like(normaliser)
    # the gradient is of_probs [n] times draft_probs, minus the shares [n] at the labels in `singles`
    of_probs, singles = torch.zeros_like(normaliser), []
    for name, label in labels.items():
        known, label = (label >= 0).float(), label.clamp(min=0)[:, None]
        loss = (normaliser - logits.gather(-1, label)[:, 0]) * known
        share = known * shares[name]
        if name == "hard_ce":
            values += shares[name] * loss
        else:  # (1 - exp(-g loss)) / g
            values -= shares[name] * torch.expm1(-EXPONENT * loss) / EXPONENT
            share = share * torch.exp(-EXPONENT * loss)
        of_probs += share
        singles.append((label, share))
    if probs is not None and covered is not None:
        values += soft * (covered * normaliser - (probs * logits).sum(-1))
        of_probs += soft * covered
    grads.mul_((of_probs * scale)[:, None])
    if probs is not None:
        grads.addcmul_(probs, (scale * soft).expand_as(values)[:, None], value=-1)
    for label, share in singles:
        grads.scatter_add_(-1, label, -(share * scale)[:, None])
    if grads is not out:
        out.copy_(grads)
    return values, ids[:, 0]
