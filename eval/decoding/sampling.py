"""How the target chooses tokens from logits: in fp32, on the device, without copies to the host.

The same sampling applies to drafted tokens, the bonus token, and every token of the baseline. A sampled token follows
from its distribution and from noise that depends on nothing but a seed, the row and the token's position. So baseline
and speculation, given the same seed, write the same text, and a sampled text can be proved as a greedy one is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import BadInput

BLOCK = 128  # tokens whose probabilities are summed at once when a token is sampled
LEAST_TEMPERATURE = 1e-6  # above 0; logits divided by far less are not finite
GOLDEN, MULTIPLIERS = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's, as int64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters as transformers defines them. Raises BadInput on a value out of range."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off

    @property
    def takes_best(self) -> bool:
        """Whether the choice is the argmax of the logits."""
        return self.temperature == 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise BadInput(f"temperature {self.temperature}: expected 0 (greedy), or {LEAST_TEMPERATURE} or more")
        if not self.top_k >= 0 or self.top_k != int(self.top_k):
            raise BadInput(f"top_k {self.top_k}: expected a whole number, 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that the target samples from: temperature, top-k, top-p, in transformers' order.

    Ties: top-k keeps all that equal the k-th, top-p keeps the lowest ids, temperature 0 is one-hot at the lowest id.

    Args: logits: [..., V]. Returns: [..., V] fp32, summing to 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]))[0][..., -1:]  # [..., 1]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        falling, order = logits.sort(dim=-1, descending=True, stable=True)  # the lowest id first of those that tie
        dropped = (falling.flip(-1).softmax(-1).cumsum(-1) <= 1 - sampling.top_p).flip(-1)
        dropped[..., :1].fill_(False)
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
    return logits.softmax(-1)


def noise_keys(seed: Tensor, positions: Tensor) -> Tensor:
    """[B, Q] the keys of the noise by which the tokens at these positions are chosen: a hash of seed, row and position.

    Args: seed: [1] int64. positions: [B, Q] of each token to choose in its text, the prompt included.
    """
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    return mixed(mixed(mixed(seed) + rows) + positions)


def random_keys(shape: Sequence[int], device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Keys of that shape, drawn at random."""
    return torch.randint(-(2**62), 2**62, tuple(shape), device=device, generator=generator)


def mixed(keys: Tensor) -> Tensor:
    """int64 keys to hashes in which each bit depends on all bits of the key: one step of SplitMix64 (Steele et al.
    2014). Counter-based, so that no state is kept and a recorded step draws what an eager one does."""
    keys = keys + GOLDEN
    keys = (keys ^ (keys >> 30 & 2**34 - 1)) * MULTIPLIERS[0]  # `>>` copies the sign: its copies are masked out
    keys = (keys ^ (keys >> 27 & 2**37 - 1)) * MULTIPLIERS[1]
    return keys ^ (keys >> 31 & 2**33 - 1)


def clocks(keys: Tensor, indices: Tensor) -> Tensor:
    """[..., n] numbers from the exponential distribution, fp32, for the n alternatives of that index [..., n] under
    keys [...]."""
    bits = mixed(keys[..., None] + indices * GOLDEN) >> 12 & 2**52 - 1
    return -((bits.double() + 0.5) * 2.0**-52).log().float()


def sample(probs: Tensor, keys: Tensor) -> Tensor:
    """The token that the noise under keys [...] chooses from each distribution [..., V], which need not sum to 1.

    Over random keys it is a sample; one of probability 0 is never chosen. First a block of tokens wins, then a token in
    it, each the one whose probability over its exponential noise is largest (the Gumbel-max trick). So noise is needed
    for V / BLOCK + BLOCK alternatives rather than V, which on a CPU would take as long as the forward; and where
    rounding moves probabilities a little, it changes the choice as rarely as that of an argmax.
    """
    num_tokens = probs.shape[-1]
    if missing := -num_tokens % BLOCK:
        probs = F.pad(probs, (0, missing))
    blocks = probs.unflatten(-1, (-1, BLOCK))  # [..., N, BLOCK]
    block, token = block_clocks(keys, blocks.shape[-2])
    best = (blocks.sum(-1) / block).argmax(-1, keepdim=True)  # [..., 1]
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, BLOCK)).squeeze(-2)  # [..., BLOCK]
    chosen = best * BLOCK + (inside / token(best)).argmax(-1, keepdim=True)
    return chosen.squeeze(-1).clamp_max(num_tokens - 1)  # if all probabilities are 0


def block_clocks(keys: Tensor, num_blocks: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The noise of the blocks [..., N], and what gives that of the tokens [..., BLOCK] in block [..., 1]."""
    numbers = torch.arange(num_blocks, device=keys.device)
    inside = torch.arange(BLOCK, device=keys.device)
    return clocks(keys, numbers), lambda block: clocks(keys, num_blocks + block * BLOCK + inside)


def choose_tokens(logits: Tensor, sampling: Sampling, *, keys: Tensor | None = None) -> Tensor:
    """The token that the target itself emits at each position: its argmax, or at temperature > 0 the one that the noise
    chooses.

    Used for every token of every run, the baseline's and the bonus token included, so that ties break the same way.

    Args: logits: [..., V]. keys: [...] from `noise_keys`; needed at temperature > 0 alone.

    Returns: [...] token ids.
    """
    if sampling.temperature == 0:
        return logits.float().argmax(-1)
    assert keys is not None, "a sampled token needs the key of its noise"
    return sample(target_probs(logits, sampling), keys)
