"""Attention heads that copy: they find where the token just read stood before, and pass on what followed it there.

A layer that reads [embedding of x_{t+1}, hidden state of x_0..x_t] can do this in one step: the query is a code of
x_{t+1} and x_t, the key at position s the code of x_s and x_{s-1}, read from the target's states, and the value the
embedding of x_{s+1} (otherwise that takes two layers, an induction head: Olsson et al. 2022). Queries and keys use the
slowest channels of the rotary embedding, where the distance hardly matters.

Source: our own; measured in docs/log/training_losses.md, 2026-11-24.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn.layers import Attention

FAR = 256  # tokens back
TURNED = 0.5  # radians by which a slow channel may turn over that distance
LEAST_CHANNELS = 8  # with fewer slow channels too many tokens look alike
NATS = 12.0  # by which the score of an equal token exceeds that of an unrelated one,
NATS_BEFORE = 8.0  # and that of an equal token before it
BEFORE = 0.35  # share of the channels for the token before
SIZE = 0.35  # of a token's code in a hidden state, relative to the state
SHARE = 0.4  # of a key head's value channels, where it serves several query heads; else of the key heads
WHITENED = 0.1  # of the mean variance, added to that of each direction of embeddings,
QUIET = 1e-2  # and of states


@dataclass
class Role:
    """The query heads of an attention that do one thing, and the channels in which values reach the output."""

    heads: Tensor  # [g] query heads, one of each key head
    values: Tensor  # [R] channels of v_proj's output
    outputs: Tensor  # [R] the channels of o_proj's input in which these arrive

    def key_heads(self, attention: Attention) -> Tensor:
        """[g]."""
        return self.heads // (attention.num_heads // attention.num_kv_heads)


def roles_of(attention: Attention, *, copies: bool) -> list[Role]:
    """The role of looking at the own position and, if `copies`, that of copying.

    The first two query heads of a key head share its value channels; where it has but one, each key head has one role.
    """
    per_key, size, all_keys = attention.num_heads // attention.num_kv_heads, attention.head_dim, attention.num_kv_heads

    def role(keys: range, query: int, channels: range) -> Role:
        key_head, at = torch.tensor([*keys])[:, None], torch.tensor([*channels])
        heads = key_head * per_key + query
        return Role(heads[:, 0], (key_head * size + at).flatten(), (heads * size + at).flatten())

    if not copies:
        return [role(range(all_keys), 0, range(size))]
    if per_key > 1:
        own = size - round(SHARE * size)
        return [role(range(all_keys), 0, range(own)), role(range(all_keys), 1, range(own, size))]
    own = max(1, all_keys - round(SHARE * all_keys))
    return [role(range(own), 0, range(size)), role(range(own, all_keys), 0, range(size))]


@dataclass
class TokenCode:
    """How queries and keys tell tokens apart: m numbers for a token, the first b of them for the token before it."""

    of_embedding: Tensor  # [D, m] the code of a token is its normalised embedding times this; about of norm 1
    place: Tensor  # [D, m] orthonormal: the part of a hidden state at t that holds the code of x_t, `size` times
    place_before: Tensor  # [D, b] orthonormal, and to `place`: the part that holds the code of x_{t-1}
    channels: Tensor  # [m + b] the channels of each query and key head that hold both

    @property
    def size(self) -> float:
        return SIZE * math.sqrt(len(self.place))

    @property
    def before(self) -> float:
        """What scales the first b numbers to the norm of all."""
        return math.sqrt(self.place.shape[1] / self.place_before.shape[1])

    def held(self, current: Tensor, before: Tensor) -> Tensor:
        """[n, D] what hidden states hold of tokens with these normalised embeddings [n, D]."""
        num = self.place_before.shape[1]
        first = before @ self.of_embedding[:, :num] * self.before
        return self.size * (current @ self.of_embedding @ self.place.T + first @ self.place_before.T)

    def cleared(self, states: Tensor) -> Tensor:
        """States [n, D] without what they hold of tokens."""
        return states - states @ self.place @ self.place.T - states @ self.place_before @ self.place_before.T

    def missing(self, following: Tensor, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[n, D] the difference that turns hidden states at t into the states at t + 1: their first b numbers become
        those of x_{t+1}, whose normalised embeddings [n, D] are given, and the others stay as they are."""
        num = self.place_before.shape[1]
        place, code = self.place[:, :num], self.of_embedding[:, :num]
        return self.cleared(following - hidden) + (self.size * embedded @ code - hidden @ place) @ place.T


def slow_channels(attention: Attention, frequencies: Tensor) -> Tensor:
    """The channels of a head, in the slower half of its rotary embedding, that turn little over FAR tokens."""
    half = len(frequencies)
    slow = [i for i in range(half // 2, half) if float(frequencies[i]) * FAR <= TURNED]
    return torch.tensor([*slow, *(i + attention.head_dim // 2 for i in slow)], dtype=torch.long)


def token_code(attention: Attention, frequencies: Tensor, embedded: Tensor, states: Tensor) -> TokenCode | None:
    """A code of the tokens; None where heads have too few slow channels, or none is left for another role.

    A random projection of whitened embeddings, so that any two tokens differ about equally; its place are random
    directions, turned to where states vary least.

    Args: embedded: [v, D] normalised embeddings of the tokens that occur. states: [n, D].
    """
    channels = slow_channels(attention, frequencies)
    both, size = len(channels), states.shape[1]
    num = both - int(BEFORE * both)
    if both < LEAST_CHANNELS or 2 * both > size or attention.num_heads < 2:
        return None
    mean = embedded.mean(0)
    variance, directions = torch.linalg.eigh(((embedded - mean).T @ (embedded - mean)).double() / len(embedded))
    whitening = (directions * (variance.clamp_min(0) + WHITENED * variance.mean()).rsqrt()) @ directions.T
    drawn = torch.randn(size, num + both, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    projection = (whitening @ drawn[:, :num]).float()  # [D, m]
    projection -= torch.outer(mean, mean @ projection) / mean.square().sum()  # the mean embedding has code 0
    projection /= (embedded @ projection).norm(dim=1).mean()
    squares = (states.T @ states).double() / len(states)
    squares += QUIET * squares.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    place = torch.linalg.qr(torch.linalg.solve(squares, drawn[:, num:]))[0].float()  # [D, m + b]
    return TokenCode(projection, place[:, :num], place[:, num:], channels)


def find_tokens(attention: Attention, role: Role, code: TokenCode) -> None:
    """Set queries and keys: a query head of `role` attends to the positions whose token is the one that it reads."""
    size, (num, num_before) = len(code.place), (code.place.shape[1], code.place_before.shape[1])
    keys = attention.k_proj.weight.unflatten(0, (attention.num_kv_heads, -1))  # [Nkv, H, 2D]
    queries = attention.q_proj.weight.unflatten(0, (attention.num_heads, -1))
    strength, before = (math.sqrt(nats * math.sqrt(attention.head_dim)) for nats in (NATS, NATS_BEFORE))
    current, behind = code.channels[:num], code.channels[num:]
    for head, key_head in zip(role.heads.tolist(), role.key_heads(attention).tolist(), strict=True):
        queries[head] = 0.0
        queries[head, current, :size] = strength * code.of_embedding.T
        queries[head, behind, size:] = before * code.before / code.size * code.place[:, :num_before].T
        keys[key_head, code.channels] = 0.0
        keys[key_head, current, size:] = strength / code.size * code.place.T
        keys[key_head, behind, size:] = before / code.size * code.place_before.T


def attended(attention: Attention, role: Role, read: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """[B, T, D] the mean of the embeddings at the positions that the first query head of `role` attends to.

    Args: read: [B, T, 2D] the projections' input, embeddings first. mask: [B, 1, T, T] additive.
    """
    query = attention.queries(read, rotary)[:, role.heads[0]]  # [B, T, H]
    key = attention.keys_values(read, rotary)[0][:, role.key_heads(attention)[0]]
    scores = query @ key.transpose(-1, -2) / math.sqrt(attention.head_dim) + mask[:, 0]
    return scores.softmax(-1) @ read[..., : read.shape[-1] // 2]
