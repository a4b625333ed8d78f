"""Initialising a fresh head: linear maps in closed form, and logits scaled to a loss no worse than a uniform guess.

A copied output layer makes logits that are too large for states which do not predict the next token, so a fresh head's
loss can start far above that of a uniform guess. Families fit their linear maps to the target's next states on the
first rows of training (`DraftHead.fit`); logits that are still too large are scaled down (`DraftHead.scale_outputs`).

Source: our own; measured in docs/log/training_losses.md, 2026-11-22.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...targets.target import Target
from ..loss.chains import chain_starts
from ..nn.batch import DraftBatch

LEAST_FITTED = 8192  # supervised tokens to fit on, about,
FITTED_PER_CHANNEL = 4  # or for wide targets as many as this times their hidden size
FITTED_DEPTHS = 3  # depths that the fit of a recurrent head covers
NUM_MEASURED = 2048  # positions by which a head knows the sizes of its inputs
NUM_JUDGED = 256  # positions per depth on which the loss is measured
FACTORS = [0.5 ** (i / 2) for i in range(34)]  # candidates for scaling logits
SLACK = 0.01  # nats above the least loss that a factor may have
MARGIN = 0.25  # nats by which the loss of other rows may exceed the measured one
STRENGTH = 1e-2  # of the ridge penalty, relative to the mean square of the inputs
SCALE = 2.0  # size of fitted weights relative to a new nn.Linear; larger weights change relatively less per step
FARTHEST = 512  # largest distance in tokens for which queries that look at one position are checked
# an output norm's gain is multiplied by this and a trained output layer divided by it: the logits are the same, and the
# layer's smaller rows learn faster
OUTPUT_GAIN = 3.0


def num_fitted(hidden_size: int) -> int:
    """About how many supervised tokens a fresh head of a target with D channels is fitted on."""
    return max(LEAST_FITTED, FITTED_PER_CHANNEL * hidden_size)


def too_few(num_positions: int, hidden_size: int) -> str | None:
    """A line if a head cannot be fitted on so many supervised positions, of which it needs two per channel."""
    if num_positions >= 2 * hidden_size:
        return None
    counted = f"{num_positions:,} supervised tokens of the {2 * hidden_size:,} that a fit takes"
    return f"head.start: {counted}, so the head starts from random weights"


def first_rows(batches: Iterable[DraftBatch], num_tokens: int) -> tuple[list[DraftBatch], DraftBatch]:
    """Batches with about that many supervised tokens to fit on, and the next batch to measure the loss on.

    A single batch serves as both."""
    rows, num_supervised = list[DraftBatch](), 0
    for batch in batches:
        rows.append(batch)
        if num_supervised >= num_tokens:
            break
        num_supervised += int(batch.loss_mask.sum())
    return rows[:-1] or rows, rows[-1]


def linear_map(x: Tensor, y: Tensor, *, keeps_size: bool = False) -> Tensor | None:
    """x [n, in], y [n, out] -> [in, out] the ridge regression of y on x with normalised channels; None if n < 2 * out.

    Args: keeps_size: scale the map so that its outputs have the norm of y, which regression shrinks."""
    if len(x) < 2 * y.shape[1]:
        return None
    x, y = x.float(), y.float()
    sizes = x.square().mean(0).sqrt().clamp_min(1e-6)
    weight = ridge(x / sizes, y, strength=STRENGTH) / sizes[:, None]
    return weight * (y.norm() / (x @ weight).norm().clamp_min(1e-9) if keeps_size else 1.0)


def next_state_map(target: Target, batches: Sequence[DraftBatch]) -> tuple[Tensor, Tensor] | None:
    """[2D, D] the map of the embedding beside the previous state, the target's or the map's own estimate, onto the
    target's next state, and [n, D] what it gives on these rows; None if they are too few."""
    chains = [chain_starts(batch.loss_mask, FITTED_DEPTHS) for batch in batches]
    hidden = [starts.take(b.output.post_norm).float() for b, starts in zip(batches, chains, strict=True)]
    reads, wanted, weight = list[Tensor](), list[Tensor](), None  # of all depths so far, [n, 2D] and [n, D] of a batch
    for depth in range(FITTED_DEPTHS):
        inputs = list[Tensor]()  # [B, S, 2D]
        for batch, starts, before in zip(batches, chains, hidden, strict=True):
            embedded = target.embed(starts.take(batch.input_ids, offset=depth + 1)).float()
            inputs.append(torch.cat([embedded, before], -1))
            at = starts.valid[..., depth]
            reads.append(inputs[-1][at])
            wanted.append(starts.take(batch.output.post_norm, offset=depth + 1)[at])
        weight = linear_map(torch.cat(reads), torch.cat(wanted))
        if weight is None:
            return None
        hidden = [x @ weight for x in inputs]
    assert weight is not None
    return weight, torch.cat(reads) @ weight


def ridge(x: Tensor, y: Tensor, *, strength: float = STRENGTH) -> Tensor:
    """x [n, in], y [n, out] -> [in, out] the ridge regression of y on x. strength: relative to the mean of x^2."""
    if x.shape[1] <= len(x):
        return ridge_of(x.T @ x, x.T @ y, strength=strength)
    squares = (x @ x.T).double()  # the dual form: [n, n] is smaller than [in, in]
    squares.diagonal().add_(strength * squares.trace() / x.shape[1])
    return x.T @ torch.linalg.solve(squares, y.double()).float()


def ridge_of(squares: Tensor, products: Tensor, *, strength: float = STRENGTH) -> Tensor:
    """`ridge`, given x^T x [in, in] and x^T y [in, out]."""
    squares = squares.double()
    squares.diagonal().add_(strength * squares.trace() / len(squares))
    return torch.linalg.solve(squares, products.double()).float()


def evenly_spread(valid: Tensor) -> Tensor:
    """A [B, S] bool with at most NUM_JUDGED of the True entries of `valid` [B, S], evenly spread."""
    where = valid.flatten().nonzero()[:, 0]
    where = where[:: max(1, -(-len(where) // NUM_JUDGED))]
    return torch.zeros_like(valid.flatten()).index_fill(0, where, True).view_as(valid)


def losses_by_factor(logits: Tensor, probs: Tensor) -> Tensor:
    """[G] cross entropy to the target's probs [n, Vd] of logits [n, Vd] scaled by each of the G FACTORS."""
    return torch.stack([-(probs * (factor * logits).log_softmax(-1)).sum(-1).mean() for factor in FACTORS])


def quieter(losses: Tensor, num_drafted: int) -> float:
    """The largest factor whose mean loss over depths is within SLACK of the least, as tiny logits learn slowly.

    1 if the unscaled loss is below that of a uniform guess by MARGIN. Args: losses: [K, G], see `losses_by_factor`."""
    mean = losses.nanmean(0)  # rows may be too short for the last depths
    if not mean[0] > math.log(num_drafted) - MARGIN:
        return 1.0
    return FACTORS[int((mean <= mean.min() + SLACK).int().argmax())]


def copy_layers(ours: Target, target: Target) -> None:
    """Initialise a shallower model of the target's architecture from the target's first layers, its last layer (if that
    is of the same kind) and its final norm. Layers of other shapes stay as they are."""
    last, kinds = ours.num_layers - 1, target.layer_types or [""] * target.num_layers
    for i, layer in enumerate(ours.layers):
        source = -1 if i == last and kinds[-1] == kinds[i] else i
        theirs = target.layers[source].state_dict()
        if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in layer.state_dict().items()}:
            layer.load_state_dict(theirs)
    if ours.final_norm is not None and target.final_norm is not None:
        ours.final_norm.load_state_dict(target.final_norm.state_dict())


def scale_norm(norm: nn.Module, factor: float) -> None:
    """Scale a norm's output in place, whether its gain is stored as w or as 1 + w."""
    if "RMSNorm" not in type(norm).__name__:
        for parameter in norm.parameters():
            parameter.mul_(factor)
        return
    weight: Tensor | None = getattr(norm, "weight", None)
    if weight is None:  # as OLMo's, which has no gain
        return
    weight.add_((factor - 1) * norm(torch.ones_like(weight)[None])[0])  # a norm maps the all-ones vector to its gain


def final_gain(target: Target) -> tuple[Tensor, Tensor]:
    """[D] twice, fp32: the gain of the final norm; and what post-norm states are divided by to be without it, infinite
    where it nearly removes a channel."""
    gain = target.final_norm_scale()
    return gain, gain.where(gain.abs() > 1e-3, torch.inf)


def sensitivity(target: Target) -> Tensor:
    """[D] fp32: how far logits move with each channel of the states that the final norm's gain multiplies, as the root
    mean square over tokens. Gemma 3's are up to thirty times the median, in channels that its states hardly use."""
    rows, total = target.output_layer.weight, torch.zeros(2, target.hidden_size, device=target.device)
    for part in rows.split(8192):  # all of a large vocabulary in fp32 would take gigabytes
        total += torch.stack([part.float().sum(0), part.float().square().sum(0)])
    mean, squares = (total / len(rows)).double()
    return target.final_norm_scale().abs() * (squares - mean.square()).clamp_min(0).sqrt().float().clamp_min(1e-6)


@torch.no_grad()
def channel_sizes(batches: Iterable[DraftBatch], read: Callable[[Tensor], Tensor]) -> Tensor:
    """[in] root mean squares of what a map reads of features, over the first NUM_MEASURED positions where chains start;
    of channels that are hardly used a thousandth of the mean; 1 if no chain starts.

    Args: read: [B, T, L, D] -> [B, T, in]."""
    squares, count = torch.zeros(()), 0
    for batch in batches:
        starts = chain_starts(batch.loss_mask, 1)
        inputs = starts.take(read(batch.output.features))[starts.valid[..., 0]].float()
        squares, count = squares.to(inputs.device) + inputs.square().sum(0), count + len(inputs)
        if count >= NUM_MEASURED:
            break
    sizes = (squares / count).sqrt().nan_to_num(1.0)
    return sizes.clamp_min(max(1e-3 * float(sizes.mean()), 1e-6))


def input_scales(linear: nn.Linear, sizes: Tensor) -> Tensor:
    """[in] factors for `DraftHead.matrix_scales`, given the sizes [in] of a map's inputs: relative to its weights, a
    step changes it as much as a fitted map of inputs of size 1. States are of any size: Gemma 3's are up to a thousand
    times Qwen's."""
    weight = linear.weight.detach().float()
    return rms(weight * sizes) / (SCALE * fresh_size(linear)) / sizes


def best_scale(logits: Tensor, probs: Tensor) -> float:
    """The factor in 0.1, 0.2, ..., 1 on logits [n, Vd] with the least cross entropy to probs [n, Vd]."""
    scales = [i / 10 for i in range(1, 11)]
    return min(scales, key=lambda scale: -float((probs * (scale * logits).log_softmax(-1)).sum()))


def fresh_size(linear: nn.Linear) -> float:
    """The root mean square of the weights of a newly created nn.Linear of this size."""
    return (3 * linear.in_features) ** -0.5


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt().clamp_min(1e-9))
