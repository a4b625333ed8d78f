"""Initial weights of a block drafter, by regression on the first rows of training.

The Markov head starts as the low-rank map from a token to the mean deviation of the target's states there. `fc` starts
as the ridge regression of the target's last state on its features. In the first layer one query head of each group
attends to the end of the context and to no slot; values are the directions of the context that best predict the states
ahead; the output projection is the regression, over all slots, of what the Markov head does not explain of these states
on the attention's output. MLPs and further layers add nothing at first.

Source: our own; measured in docs/log/block_heads.md, 2026-11-22.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from .block_network import BlockNetwork
from .loss.chains import ChainStarts
from .nn.batch import DraftBatch
from .nn.block_layer import MarkovHead
from .nn.layers import Attention
from .start.closed_form import (
    FARTHEST,
    OUTPUT_GAIN,
    SCALE,
    best_scale,
    final_gain,
    fresh_size,
    ridge,
    ridge_of,
    rms,
    too_few,
)

SHRINKS = 4.0  # occurrences of a token at which its estimate is shrunk by half
LARGER = 16.0  # least size of the output projection's result relative to the layer's input
MOST_GAIN = 2.0  # gain of the norms of queries and keys
ANGLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
Known = Callable[[Tensor], Tensor]  # token ids [n] -> [n, D] the Markov head's estimate of the states' deviation there


@torch.no_grad()
def fit_block(head: BlockNetwork, batches: Iterable[DraftBatch]) -> str | None:
    """Initialise a head from the first batches. Returns a line that says why, if they have too few supervised tokens
    and the head stays as it is."""
    (gain, by), chosen = final_gain(head.target), chosen_blocks(head, batches)
    states = torch.cat([taken(batch, batch.output.post_norm, 1) for batch in chosen]).float() / by  # [n, D] at t + 1
    if line := too_few(len(states), head.target.hidden_size):
        return line
    rows = head.output_rows().float() * gain  # [Vd, D]
    tokens = torch.cat([taken(batch, batch.input_ids, 1) for batch in chosen])
    known = fit_markov(head.markov_head, tokens, states, rows)
    features = torch.cat([taken(batch, batch.output.features, 0) for batch in chosen]).float().flatten(1)  # [n, L * D]
    last = torch.cat([taken(batch, batch.output.post_norm, 0) for batch in chosen]).float() / by  # at t
    is_stored = torch.cat([taken(batch, batch.loss_mask, 0) for batch in chosen])  # no state of a prompt's end is
    sizes = cast(Tensor, head.input_sizes)
    head.fc.weight.copy_((ridge((features / sizes)[is_stored], last[is_stored]) / sizes[:, None]).T)
    head.fc.weight.mul_(SCALE * fresh_size(head.fc) / rms(head.fc.weight))
    fit_values(head, head.hidden_norm(head.fc(features)), tokens, states - known(tokens))
    for i, layer in enumerate(head.decoder_layers):
        layer.mlp.down_proj.weight.zero_()
        if i:
            layer.self_attn.o_proj.weight.zero_()
    fit_output(head, chosen, known, by)
    scale_logits(head, chosen[-1])
    return None


def chosen_blocks(head: BlockNetwork, batches: Iterable[DraftBatch]) -> list[DraftBatch]:
    """The batches, each with the blocks that a step would draw from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [replace(batch, starts=head.training_starts(batch.loss_mask)) for batch in batches]


def taken(batch: DraftBatch, values: Tensor, offset: int) -> Tensor:
    """[n, ...] values [B, T, ...] at t + offset of the blocks whose depth max(0, offset - 1) is supervised."""
    starts = cast(ChainStarts, batch.starts)
    return starts.take(values, offset=offset)[starts.valid[..., max(0, offset - 1)]]


def fit_markov(markov: MarkovHead | None, tokens: Tensor, states: Tensor, rows: Tensor) -> Known:
    """Fit the low-rank map from tokens [n] to the states [n, D] there, with the least error in the logits that the
    output layer `rows` [Vd, D] makes of them."""
    if markov is None:
        return lambda ids: states.new_zeros(1)
    seen, index, counts = tokens.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(seen), states.shape[1], device=states.device).index_add_(0, index, states - states.mean(0))
    mean /= (counts + SHRINKS)[:, None]
    rows = rows - rows.mean(0)
    squares = (rows.T @ rows).double()
    squares.diagonal().add_(1e-4 * squares.trace() / len(squares))
    metric = torch.linalg.cholesky(squares)  # [D, D] |x @ metric| is the norm of the logits rows @ x
    logits = mean.double() @ metric  # [u, D] these logits in an orthonormal basis
    weighted = logits * counts.sqrt()[:, None]
    rank = min(markov.markov_w2.in_features, states.shape[1])
    directions = torch.linalg.eigh(weighted.T @ weighted)[1][:, -rank:]  # [D, rank]
    decoded = torch.linalg.solve_triangular(metric.T, directions, upper=True).float()  # [D, rank]
    codes, out = (logits @ directions).float(), rows @ decoded
    size = (rms(out) / rms(codes)) ** 0.5  # both factors equally large
    markov.markov_w1.weight[:, :rank] = 0.0  # unseen tokens add nothing
    markov.markov_w1.weight[seen, :rank] = size * codes
    markov.markov_w2.weight[:, :rank] = out / size
    return lambda ids: markov.markov_w1(ids)[..., :rank] @ decoded.T / size


def fit_values(head: BlockNetwork, context: Tensor, anchors: Tensor, ahead: Tensor) -> None:
    """Set queries, keys and values of the first layer from context [n, D], the anchors [n] that follow, and the states
    ahead [n, D]."""
    layer, size = head.decoder_layers[0], context.shape[1]
    attention = layer.self_attn
    masks = torch.full_like(anchors, head.mask_token)
    slots = torch.cat([head.target.embed(ids[:, None])[:, 0].float() for ids in (anchors, masks)])  # [2n, D]
    slots = layer.input_layernorm(slots)
    sides = torch.ones(len(context) + len(slots), 1, device=context.device)
    of_slots = ridge(slots, sides[: len(slots)], strength=1e-3)[:, 0]  # [D]
    sides[len(context) :] = -1.0
    of_context = ridge(torch.cat([context, slots]), sides, strength=1e-3)[:, 0]
    look_at_context(attention, of_slots, of_context, head.rotary.frequencies, num_slots=head.num_depths)
    squares = (context.T @ context / len(context)).double()
    squares.diagonal().add_(1e-4 * squares.trace() / size)
    root = torch.linalg.cholesky(squares)
    change = root.T @ ridge(context, ahead).double()  # [D, D] of white context
    rank = min(attention.v_proj.out_features, size)
    directions = torch.linalg.eigh(change @ change.T)[1][:, -rank:]
    values = torch.linalg.solve_triangular(root.T, directions, upper=True).float()  # [D, rank]
    attention.v_proj.weight[:rank] = SCALE * fresh_size(attention.v_proj) / rms(values) * values.T


def look_at_context(
    attention: Attention, of_slots: Tensor, of_context: Tensor, frequencies: Tensor, *, num_slots: int
) -> None:
    """Make the first query head of each group attend, from all slots of a block, to the last position before it.

    Args: of_slots: [D] linear map of slots to about 1. of_context: [D] linear map of context to 1 and slots to -1.
    """
    largest = MOST_GAIN**2 * math.sqrt(attention.head_dim)  # largest score of normalised queries and keys
    sizes, angle = nearest_position(frequencies, num_slots, amplitude=largest)
    for norm in (attention.q_norm, attention.k_norm):  # which keep only the direction of queries and keys
        nn.init.constant_(cast(Tensor, norm.weight), MOST_GAIN)
    low, high = torch.arange(len(sizes)), torch.arange(len(sizes)) + attention.head_dim // 2
    sizes = sizes.sqrt()[:, None].to(of_slots)
    keys = attention.k_proj.weight.unflatten(0, (attention.num_kv_heads, -1))
    keys[:, low], keys[:, high] = sizes * of_context, 0.0
    queries = attention.q_proj.weight.unflatten(0, (attention.num_kv_heads, -1, attention.head_dim))[:, 0]
    queries[:, low], queries[:, high] = math.cos(angle) * sizes * of_slots, math.sin(angle) * sizes * of_slots


def nearest_position(frequencies: Tensor, num_slots: int, *, amplitude: float) -> tuple[Tensor, float]:
    """Sizes [P] and an angle (radians) with which the scores amplitude * sum_f size * cos(f * distance + angle) give
    the largest share of attention to the nearest context position, on average over `num_slots` slots."""
    distances, best = torch.arange(1, FARTHEST)[:, None] * frequencies, (0.0, frequencies, 0.0)
    for power, angle, fastest in itertools.product((-0.5, -0.25, 0.0, 0.25, 0.5, 1.0), ANGLES, (4.0, 0.5, 0.25, 0.12)):
        sizes = torch.where(frequencies <= fastest, frequencies**power, 0.0)
        sizes = sizes / sizes.sum().clamp_min(1e-9)
        scores = amplitude * (sizes * torch.cos(distances + angle)).sum(1)
        share = sum(float(scores[nearest:].softmax(0)[0]) for nearest in range(num_slots)) / num_slots
        best = max(best, (share, sizes, angle), key=lambda candidate: candidate[0])
    return best[1:]


def fit_output(head: BlockNetwork, batches: Iterable[DraftBatch], known: Known, by: Tensor) -> None:
    """Fit the first layer's output projection: the regression of states on its attention's output, over all slots."""
    projection, mixed = head.decoder_layers[0].self_attn.o_proj, list[Tensor]()
    squares = wanted = present = torch.zeros((), device=projection.weight.device)
    size = 0.0  # rms of the slots' embeddings relative to that of the states
    hook = projection.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))
    for batch in batches:
        starts = cast(ChainStarts, batch.starts)
        for _ in head.unroll(batch, starts):
            break
        slots = head.slots(starts.take(batch.input_ids, offset=1), starts.num_depths)
        at = [part.unflatten(1, (-1, starts.positions.shape[1])) for part in (mixed.pop(), slots)]  # [B, W, S, ...]
        for depth in range(starts.num_depths):
            x, entering = (part[:, depth + head.first_slot][starts.valid[..., depth]].float() for part in at)
            states = taken(batch, batch.output.post_norm, depth + 1).float() / by
            states = states - known(taken(batch, batch.input_ids, depth + 1))
            size = max(size, rms(entering) / rms(states))
            squares, wanted, present = squares + x.T @ x, wanted + x.T @ states, present + x.T @ entering
    hook.remove()
    larger = max(SCALE * fresh_size(projection) / rms(ridge_of(squares, wanted)), LARGER * size)
    projection.weight.copy_(ridge_of(squares, larger * wanted - present).T)


def scale_logits(head: BlockNetwork, batch: DraftBatch) -> None:
    """Scale logits to the least cross entropy with the target's distribution."""
    starts = cast(ChainStarts, batch.starts)
    drafted, probs = list[Tensor](), list[Tensor]()
    for depth, hidden in enumerate(head.unroll(batch, starts)):
        valid = starts.valid[..., depth]
        if not valid.any():  # of short answers, for the last depths
            continue
        some = torch.linspace(0, int(valid.sum()) - 1, 64, device=valid.device).long()
        drafted.append(head.slot_logits(hidden[valid][some]).float())
        probs.append(head.target_probs(taken(batch, batch.output.post_norm, depth + 1)[some]))
    head.norm.weight.mul_(scale := best_scale(torch.cat(drafted), torch.cat(probs)))
    if head.markov_head is not None:
        head.markov_head.markov_w2.weight.mul_(scale)
    if (rows := head.output_rows()).requires_grad:
        head.norm.weight.mul_(OUTPUT_GAIN)
        rows.div_(OUTPUT_GAIN)
