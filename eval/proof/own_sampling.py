"""Sampled tokens held against logits: would the noise have chosen them, but for rounding?"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.sampling import BLOCK, Sampling, block_clocks


@dataclass(frozen=True)
class NoiseOfText:
    """What sampled the n tokens of a text. keys: [n], as `noise_keys` gives them."""

    sampling: Sampling
    keys: Tensor

    def may_choose(self, logits: Tensor, tokens: Tensor, slack: Tensor) -> Tensor:
        """[n] whether the noise chooses these tokens [n] where two logits may be wrong by slack [n] against each other.

        As `sample` does, first the token's block must win and then the token in it. Both are asked of two sets of
        tokens: the token must be in the widest one that top-k and top-p may leave, and beat the narrowest.

        Args: logits: [n, V] fp32, raw.
        """
        scaled, slack = logits / self.sampling.temperature, (slack / self.sampling.temperature)[:, None]
        own, others = (blocked(self.left(scaled, by)) for by in (slack, -slack))  # [n, N, BLOCK]
        block, token = block_clocks(self.keys, own.shape[1])
        at = (tokens // BLOCK)[:, None]  # [n, 1]
        wins = self._wins(own.logsumexp(-1), others.logsumexp(-1), block, at, slack)
        inside = at[..., None].expand(-1, 1, BLOCK)
        own, others = (part.gather(1, inside).squeeze(1) for part in (own, others))  # [n, BLOCK]
        return wins & self._wins(own, others, token(at), (tokens % BLOCK)[:, None], slack)

    @staticmethod
    def _wins(own: Tensor, others: Tensor, clock: Tensor, at: Tensor, slack: Tensor) -> Tensor:
        noise = -clock.log()  # Gumbel
        return ((own + noise).gather(1, at) >= (others + noise).amax(-1, keepdim=True) - slack)[:, 0]

    def left(self, scaled: Tensor, slack: Tensor) -> Tensor:
        """The logits [n, V] that top-k and top-p leave, -inf elsewhere: the widest set that logits wrong by slack
        [n, 1] may leave or, if it is negative, the narrowest."""
        sampling, most = self.sampling, scaled.amax(-1, keepdim=True)
        if sampling.top_k:
            least = scaled.topk(min(sampling.top_k, scaled.shape[-1]))[0][:, -1:]
            scaled = scaled.masked_fill(scaled < torch.minimum(least - slack, most), -math.inf)
        if sampling.top_p < 1:
            falling = scaled.sort(dim=-1, descending=True)[0]
            behind = falling.flip(-1).softmax(-1).cumsum(-1).flip(-1)  # the probability of a token and all behind it
            kept = behind > (1 - sampling.top_p) * (-slack).exp()
            least = falling.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
            scaled = scaled.masked_fill(scaled < torch.minimum(least - slack, most), -math.inf)
        return scaled


def blocked(logits: Tensor) -> Tensor:
    """[n, V] -> [n, N, BLOCK], padded with -inf."""
    return F.pad(logits, (0, -logits.shape[-1] % BLOCK), value=-math.inf).unflatten(-1, (-1, BLOCK))
