"""Initial weights of an EAGLE-3 layer, by regression on the first rows of training.

A randomly initialised EAGLE-3 layer reads the embedding of x_{t+1} only through attention that looks everywhere, and
needs many steps to find its own position. Here `fc` starts as the ridge regression of the target's last state on its
features; one query head of each group attends to its own position; values and output projection are the low-rank
regression of the change from that state to the next one on [embedding, state]. The regression inputs include the
layer's own predictions, to cover drafts further ahead. The MLP adds nothing at first.

Source: our own; measured in docs/log/training_losses.md, 2026-11-22.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...targets.caches.masks import visibility_mask
from ...targets.target import Target
from ..nn.batch import DraftBatch
from ..nn.layers import Attention
from .closed_form import (
    FARTHEST,
    FITTED_DEPTHS,
    NUM_JUDGED,
    OUTPUT_GAIN,
    SCALE,
    best_scale,
    final_gain,
    fresh_size,
    ridge,
    rms,
    sensitivity,
    too_few,
)
from .copying import Role, TokenCode, attended, find_tokens, roles_of, token_code

NATS = 8.0  # by which the score of a query's own position exceeds that of any other


def fit_start(head: Any, batches: Sequence[DraftBatch]) -> str | None:
    """Initialise an EAGLE-3 head, which is on the CPU, by `fit_layer`, and scale its logits to the least cross entropy.
    Returns a line that says why, if there are too few positions and the head stays as it is."""
    target, first = head.target, head.decoder_layers[0]
    gain, divisor = final_gain(target)
    positions = positions_of(target, batches, divisor=divisor)
    if line := too_few(len(positions.states), target.hidden_size):
        return line
    ids = torch.cat([b.input_ids.flatten() for b in batches]).unique()
    embedded = first.input_layernorm(target.embed(ids).cpu().float())
    code = token_code(first.self_attn, head.rotary.frequencies, embedded, positions.states)
    predicted = fit_layer(head, batches, positions, code=code)
    if code is not None:
        rows = head.lm_head.weight * gain.cpu()
        head.lm_head.weight.sub_((rows - code.cleared(rows)) / divisor.cpu())
    first.mlp.down_proj.weight.zero_()
    judged = torch.linspace(0, len(predicted) - 1, NUM_JUDGED).long()
    probs = head.target_probs(positions.following[judged].to(gain) * gain).cpu()
    head.norm.weight.mul_(OUTPUT_GAIN * best_scale(head.draft_logits(predicted[judged], 0), probs))
    head.lm_head.weight.div_(OUTPUT_GAIN)
    return None


def copied_by(head: Any, role: Role, batch: DraftBatch) -> Tensor:
    """[n, D] the `attended` embeddings at the `fitted_positions` of rows, by the weights that the head has by now."""
    first, num = head.decoder_layers[0], batch.input_ids.shape[1]
    hidden = head.fused(batch.output.features.cpu().float())  # [B, T, D]
    embedded = head.target.embed(batch.input_ids).cpu().to(hidden.dtype).roll(-1, 1)
    rotary = head.rotary(batch.positions.cpu(), like=hidden, num_positions=num)
    mask = visibility_mask(batch.positions.cpu(), extent=num, dtype=hidden.dtype, window=head.window)
    found = attended(first.self_attn, role, first.both(embedded, hidden), rotary, mask)
    return found[fitted_positions(batch.loss_mask).cpu()]


@dataclass
class Positions:
    """n positions t of rows, in order. States are the target's post-norm states divided by the final norm's gain."""

    features: Tensor  # [n, L * D] at t
    before: Tensor  # [n, D] embedding of x_{t-1}
    current: Tensor  # [n, D] of x_t
    embedded: Tensor  # [n, D] of x_{t+1}
    states: Tensor  # [n, D] at t
    following: Tensor  # [n, D] at t + 1
    goes_on: Tensor  # [n] bool: whether the next entry is t + 1 of the same row


def fitted_positions(loss_mask: Tensor) -> Tensor:
    """loss_mask [B, T] -> [B, T] bool, the positions t such that chains start at both t and t - 1."""
    starts = loss_mask.roll(-1, 1) & loss_mask.roll(-2, 1)
    starts[:, -2:] = False
    at = starts & starts.roll(1, 1)
    at[:, 0] = False
    return at


def positions_of(target: Target, batches: Iterable[DraftBatch], *, divisor: Tensor) -> Positions:
    """The `fitted_positions` of batches. Args: divisor: [D] of post-norm states."""
    parts = list[list[Tensor]]()
    for batch in batches:
        at = fitted_positions(batch.loss_mask)
        after = at.roll(1, 1)  # the positions t + 1
        embedded, states = target.embed(batch.input_ids), batch.output.post_norm / divisor
        tokens = embedded[at.roll(-1, 1)], embedded[at], embedded[after]
        parts.append([x.cpu() for x in (batch.output.features[at].flatten(1), *tokens, states[at], states[after])])
        parts[-1].append(at.roll(-1, 1)[at].cpu())
    joined = [torch.cat(lists) for lists in zip(*parts, strict=True)]
    features, before, current, embedded, states, following = (x.float() for x in joined[:-1])
    return Positions(features, before, current, embedded, states, following, goes_on=joined[-1])


@torch.no_grad()
def fit_layer(head: Any, batches: Sequence[DraftBatch], at: Positions, *, code: TokenCode | None) -> Tensor:
    """Set `fc` and the projections of the first layer's attention; returns the predictions [n, D] of the following
    states. Args: at: of the batches. code: for heads that copy; None: none do."""
    fc: nn.Linear = head.fc
    attention, read, sizes = head.decoder_layers[0].self_attn, head.decoder_layers[0].both, head.input_sizes.cpu()
    # `fc`: the states at t, and the codes of tokens where heads copy
    features, size = at.features / sizes, at.states.shape[1]
    fused = ridge(features, at.states)  # [L * D, D]
    # normalised embeddings of x_{t-1}, x_t and x_{t+1}, [n, D] each
    before, current, embedded = (read(x, at.states)[:, :size] for x in (at.before, at.current, at.embedded))
    if code is not None:
        fused = code.cleared(fused) + ridge(features, code.held(current, before))
    hidden, larger = features @ fused, fresh_size(fc) * SCALE / rms(fused)
    fc.weight.copy_(larger * fused.T / sizes)

    # queries and keys: where each role of heads looks
    own, *copying = roles_of(attention, copies=code is not None)
    constant = ridge(read(at.embedded, hidden), torch.ones(len(hidden), 1), strength=1e-3)[:, 0]
    look_at_itself(attention, constant, head.rotary.frequencies, key_heads=own.key_heads(attention))
    if code is not None:
        find_tokens(attention, copying[0], code)
    copied = [torch.cat([copied_by(head, role, batch) for batch in batches]) for role in copying]

    # values and output projection: from what the roles read to what is missing of the following states
    def missing_of(index: Tensor, hidden: Tensor) -> Tensor:
        """[n, D] what is to be added to predicted states for those at `index`."""
        if code is None:
            return at.following[index] - hidden
        return code.missing(at.following[index], hidden, embedded[index])

    def inputs_at(index: Tensor, hidden: Tensor) -> Tensor:
        """[n, in] what the roles read at `index`: 2D channels, then D of the copied embeddings if heads copy."""
        return torch.cat([read(at.embedded[index], hidden), *(tokens[index] for tokens in copied)], 1)

    inputs, change = regressed_along_chains(hidden, at.goes_on, inputs_at, missing_of)
    attention.o_proj.weight.zero_()
    weights = sensitivity(head.target).cpu()
    weights, predicted, start = weights / weights.median(), hidden, 0
    for role, num in zip([own, *copying], (2 * size, size), strict=False):
        part = slice(start, start := start + num)
        values, directions = low_rank(inputs[:, part], change[part], len(role.values), of_outputs=weights)
        of_values = fresh_size(attention.v_proj) * SCALE / rms(values)
        used = slice(values.shape[1])
        attention.v_proj.weight[role.values[used]] = F.pad(of_values * values.T, (0, 2 * size - num))
        attention.o_proj.weight[:, role.outputs[used]] = larger / of_values * directions
        predicted = predicted + inputs[: len(hidden), part] @ values @ directions.T
    return predicted


Entries = Callable[[Tensor, Tensor], Tensor]  # indices [n] and predicted states there [n, D] -> [n, ...]


def regressed_along_chains(
    hidden: Tensor, goes_on: Tensor, inputs_at: Entries, missing_of: Entries
) -> tuple[Tensor, Tensor]:
    """The map [in, D] from a layer's inputs to what it is to add, over FITTED_DEPTHS depths of chains: each depth reads
    the states that the map fitted to the depths before it predicts.

    Args: hidden: [n, D] states that depth 0 reads. goes_on: [n] whether the next entry follows in the same row.
    Returns: the inputs [m, in] of all depths, the n of depth 0 first, and the map.
    """
    index = torch.arange(len(hidden))
    inputs, missing = [inputs_at(index, hidden)], [missing_of(index, hidden)]
    change = ridge(inputs[0], missing[0])
    for _ in range(FITTED_DEPTHS - 1):
        follows = goes_on[index]
        hidden, index = (hidden + inputs[-1] @ change)[follows], index[follows] + 1
        inputs.append(inputs_at(index, hidden))
        missing.append(missing_of(index, hidden))
        change = ridge(torch.cat(inputs), torch.cat(missing))
    return torch.cat(inputs), change


def low_rank(x: Tensor, weight: Tensor, rank: int, *, of_outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [in, rank] and [out, rank] of a map [in, out], such that outputs for x [n, in] change least, with their
    channels weighted by `of_outputs` [out]."""
    outputs = x @ (weight * of_outputs)
    directions = torch.linalg.eigh((outputs.T @ outputs).double())[1][:, -rank:].float()
    return (weight * of_outputs) @ directions, directions / of_outputs[:, None]


def look_at_itself(attention: Attention, constant: Tensor, frequencies: Tensor, *, key_heads: Tensor) -> None:
    """Make the first query head of each of these key heads attend only to its own position, with the faster channels.

    Its queries and keys are the same for all tokens, so only the rotation matters.
    Args: constant: [in] a linear map of the projections' input to about 1.
    """
    pairs = max(len(frequencies) // 2, min(len(frequencies), 8))
    sizes, angle = own_position(frequencies[:pairs])
    sizes = (sizes * math.sqrt(attention.head_dim)).sqrt()[:, None] * constant  # [pairs, in]
    low, high = torch.arange(pairs), torch.arange(pairs) + attention.head_dim // 2
    keys = attention.k_proj.weight.unflatten(0, (attention.num_kv_heads, -1))
    queries = attention.q_proj.weight.unflatten(0, (attention.num_kv_heads, -1, attention.head_dim))[:, 0]
    for i in key_heads.tolist():
        keys[i, low], keys[i, high] = sizes, 0.0
        queries[i] = 0.0
        queries[i, low], queries[i, high] = math.cos(angle) * sizes, math.sin(angle) * sizes


def own_position(frequencies: Tensor) -> tuple[Tensor, float]:
    """Sizes [P] and an angle (radians) such that sum_f size * cos(f * distance + angle) is larger at distance 0 than at
    any distance up to FARTHEST, by NATS if possible. Args: frequencies: [P] radians per position."""
    distances, best = torch.arange(1, FARTHEST)[:, None] * frequencies, (0.0, frequencies, 0.0)
    for power in (0.0, 0.25, 0.5, 0.75, 1.0):
        for angle in (0.25, 0.5, 0.75, 1.0, 1.25):
            sizes = frequencies**power / (frequencies**power).sum()
            gap = float((sizes * (math.cos(angle) - torch.cos(distances + angle))).sum(1).min())
            best = max(best, (gap, sizes, angle), key=lambda candidate: candidate[0])
    gap, sizes, angle = best
    return NATS / max(gap, 0.05) * sizes, angle
