"""Initial weights of an EAGLE-3 layer: by regression on the first rows of training, or from the target's layers.

A randomly initialised EAGLE-3 layer reads the embedding of x_{t+1} only through attention that looks everywhere, and
needs many steps to find its own position. Here `fc` starts as the ridge regression of the target's last state on its
features; one query head of each group attends to its own position; values and output projection are the low-rank
regression of the change from that state to the next one on [embedding, state]. The regression inputs include the
layer's own predictions, to cover drafts further ahead. The MLP adds nothing at first.

Source: our own; measured in docs/LOG.md, 2026-11-22.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...configs.errors import BadInput, first_line
from ..target import Target
from .layers import Attention
from .start import ridge

NUM_DEPTHS = 3  # depths that the regression covers
NATS = 8.0  # by which the score of a query's own position exceeds that of any other
SCALE = 2.0  # size of the weights relative to a new nn.Linear; larger weights change relatively less per step
FARTHEST = 512  # largest distance in tokens for which this is checked
NUM_PROBED = 64  # tokens on which the size of features is measured


@torch.no_grad()
def start_from_target(target: Target, feature_layers: Sequence[int], fc: nn.Linear, first: Any) -> None:
    """Initialise a head to continue the target from its highest feature i: `fc` passes that feature on, and `first`, an
    EAGLE-3 layer, copies target layer i + 1, with small random weights for the embedding.

    `fc` also reads the other features with random weights, inversely proportional to each feature's size and weighted
    by channel like the target's own norms, so that a few huge channels do not dominate.

    Source: our own; measured in docs/LOG.md, 2026-11-22. Raises: BadInput if the target's layers lack the parts or the
    shapes of a Llama layer.
    """
    size, layers = target.hidden_size, list(feature_layers)
    behind: Any = target.layers[min(layers[-1] + 1, target.num_layers - 1)]
    ids = torch.arange(NUM_PROBED, device=target.device) * (target.vocab_size // NUM_PROBED)
    states = target.forward(ids[None], feature_layers=tuple(layers)).features[0].float()  # [T, L, D]
    typical = states.square().mean(-1).sqrt().median(0).values.cpu()  # [L] rms; the first token's may be huge
    try:
        norms = [cast(Any, target.layers[i]).input_layernorm.weight.float().cpu() for i in layers]
        scale = torch.cat([norm / size_of for norm, size_of in zip(norms, typical, strict=True)])  # [L * D]
        fc.weight.mul_(0.1 * typical[-1] * scale / scale.square().mean().sqrt())
        fc.weight[:, -size:] += torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(first.self_attn, name).weight  # [out, 2 D]: embedding, hidden
            weight[:, :size] *= 0.3
            weight[:, size:] = getattr(behind.self_attn, name).weight
        first.self_attn.o_proj.weight.copy_(behind.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(first.mlp, name).weight.copy_(getattr(behind.mlp, name).weight)
        first.hidden_norm.weight.copy_(behind.input_layernorm.weight)
        first.post_attention_layernorm.weight.copy_(behind.post_attention_layernorm.weight)
    except (AttributeError, RuntimeError) as error:
        raise BadInput(f"head.start target: not with the layers of {target.name}: {first_line(error)}") from error


@dataclass
class Positions:
    """n positions t of rows, in order. States are the target's post-norm states divided by the final norm's gain."""

    features: Tensor  # [n, L * D] at t
    embedded: Tensor  # [n, D] of x_{t+1}
    states: Tensor  # [n, D] at t
    following: Tensor  # [n, D] at t + 1
    goes_on: Tensor  # [n] bool: whether the next entry is t + 1 of the same row


def positions_of(batches: Iterable[Sequence[Tensor]]) -> Positions:
    """The positions t such that chains start at both t and t - 1.

    Args: batches: each loss_mask [B, T], features [B, T, L, D], embeddings [B, T, D] of x_t, states [B, T, D].
    """
    parts = list[list[Tensor]]()
    for loss_mask, features, embedded, states in batches:
        starts = loss_mask[:, 1:-1] & loss_mask[:, 2:]  # [B, T - 2]
        at = starts[:, 1:] & starts[:, :-1]  # [B, T - 3], of t = 1 on; the states at t and t + 1 are kept
        read = (
            features[:, 1:-2].flatten(2),
            embedded[:, 2:-1],
            states[:, 1:-2],
            states[:, 2:-1],
            F.pad(at[:, 1:], (0, 1)),
        )
        parts.append([tensor[at].cpu() for tensor in read])
    features, embedded, states, following, goes_on = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Positions(features.float(), embedded.float(), states.float(), following.float(), goes_on)


@torch.no_grad()
def fit_layer(
    fc: nn.Linear, attention: Attention, read: Callable[[Tensor, Tensor], Tensor], at: Positions, frequencies: Tensor
) -> Tensor:
    """Set `fc` and the attention's projections; returns the predictions [n, D] of the following states.

    Args: read: maps embeddings and hidden states [n, D] to the projections' input [n, 2D]. frequencies: [H / 2] of the
    rotary embedding, in radians per position.
    """
    sizes = at.features.square().mean(0).sqrt().clamp_min(1e-6)
    fused = ridge(at.features / sizes, at.states) / sizes[:, None]  # [L * D, D]
    hidden = at.features @ fused
    reads, missing = [read(at.embedded, hidden)], [at.following - hidden]
    look_at_itself(attention, ridge(reads[0], torch.ones(len(hidden), 1), strength=1e-3)[:, 0], frequencies)
    change, out, index = ridge(reads[0], missing[0]), hidden, torch.arange(len(hidden))
    for _ in range(NUM_DEPTHS - 1):
        goes_on = at.goes_on[index]
        out, index = (out + reads[-1] @ change)[goes_on], index[goes_on] + 1
        reads.append(read(at.embedded[index], out))
        missing.append(at.following[index] - out)
        change = ridge(torch.cat(reads), torch.cat(missing))
    rank = min(attention.v_proj.out_features, hidden.shape[1])
    changes = torch.cat(reads) @ change
    directions = torch.linalg.eigh((changes.T @ changes).double())[1][:, -rank:].float()  # [D, rank]
    values = change @ directions  # [2D, rank]
    larger, of_values = (fresh_size(linear) * SCALE for linear in (fc, attention.v_proj))
    larger, of_values = larger / rms(fused), of_values / rms(values)
    fc.weight.copy_(larger * fused.T)
    attention.v_proj.weight[:rank] = of_values * values.T
    group, channel = torch.arange(rank) // attention.head_dim, torch.arange(rank) % attention.head_dim
    first_heads = group * (attention.num_heads // attention.num_kv_heads) * attention.head_dim + channel
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, first_heads] = larger / of_values * directions
    return hidden + reads[0] @ values @ directions.T


def look_at_itself(attention: Attention, constant: Tensor, frequencies: Tensor) -> None:
    """Make the first query head of each group attend only to its own position, with the faster half of the channels.

    Its queries and keys are the same for all tokens, so only the rotation matters.
    Args: constant: [in] a linear map of the projections' input to about 1.
    """
    pairs = max(len(frequencies) // 2, min(len(frequencies), 8))
    sizes, angle = own_position(frequencies[:pairs])
    sizes = (sizes * math.sqrt(attention.head_dim)).sqrt()[:, None] * constant  # [pairs, in]
    low, high = torch.arange(pairs), torch.arange(pairs) + attention.head_dim // 2
    keys = attention.k_proj.weight.unflatten(0, (attention.num_kv_heads, -1))
    keys[:, low], keys[:, high] = sizes, 0.0
    queries = attention.q_proj.weight.unflatten(0, (attention.num_kv_heads, -1, attention.head_dim))[:, 0]
    queries.zero_()
    queries[:, low], queries[:, high] = math.cos(angle) * sizes, math.sin(angle) * sizes


def own_position(frequencies: Tensor) -> tuple[Tensor, float]:
    """Sizes [P] and an angle (radians) such that sum_f size * cos(f * distance + angle) is larger at distance 0 than at
    any distance up to FARTHEST, by NATS if possible. Args: frequencies: [P] radians per position."""
    distances, best = torch.arange(1, FARTHEST)[:, None] * frequencies, (0.0, frequencies, 0.0)
    for power in (0.0, 0.25, 0.5, 0.75, 1.0):
        for angle in (0.25, 0.5, 0.75, 1.0, 1.25):
            sizes = frequencies**power / (frequencies**power).sum()
            gap = float((sizes * (math.cos(angle) - torch.cos(distances + angle))).sum(1).min())
            best = max(best, (gap, sizes, angle), key=lambda found: found[0])
    gap, sizes, angle = best
    return NATS / max(gap, 0.05) * sizes, angle


def best_scale(logits: Tensor, probs: Tensor) -> float:
    """The factor in 0.1, 0.2, ..., 1 on logits [n, Vd] with the least cross entropy to probs [n, Vd]."""
    scales = [i / 10 for i in range(1, 11)]
    return min(scales, key=lambda scale: -float((probs * (scale * logits).log_softmax(-1)).sum()))


def fresh_size(linear: nn.Linear) -> float:
    """The root mean square of the weights of a newly created nn.Linear of this size."""
    return (3 * linear.in_features) ** -0.5


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt().clamp_min(1e-9))
