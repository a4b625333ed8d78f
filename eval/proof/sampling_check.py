"""Tests whether texts are the model's where drafts are drawn at random, by each token's quantile in its distribution.

Other sampled texts are proved token by token, as greedy ones are (`texts`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...targets.target import Target
from ..decoding.sampling import Sampling, target_probs
from .own_forward import own_logits

SMALLEST_P = 1e-4  # a lossless run falls below this once in ten thousand results
POWER = 0.95  # how surely a shift of `SamplingCheck.would_see` is found
CHUNK = 256  # positions whose distributions are held at a time


@dataclass(frozen=True)
class SamplingCheck:
    """Kolmogorov-Smirnov test of sampled tokens against the target's distribution."""

    num_tokens: int
    p_value: float | None  # None: too few tokens
    would_see: float | None = None  # the least share of wrong tokens that is found surely: see `share_seen`

    @property
    def holds(self) -> bool:
        """Whether the texts are compatible with the target's distribution."""
        return self.p_value is None or self.p_value >= SMALLEST_P


def check_sampling(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[Sequence[int]]],
    sampling: Sampling,
) -> SamplingCheck:
    """Test texts. sampled: for every prompt its texts' new tokens, sampled independently."""
    found = torch.cat([torch.empty(0), *quantiles(target, prompts, sampled, sampling)])
    return SamplingCheck(len(found), uniform_p_value(found), share_seen(len(found)))


@torch.no_grad()
def quantiles(
    target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[Sequence[int]]], sampling: Sampling
) -> Iterable[Tensor]:
    """For each text the quantiles [n] of its new tokens: the probability of all more probable tokens, plus a random
    fraction of its own.

    Tokens sampled from the target's distribution have independent uniform quantiles in [0, 1], whatever that
    distribution is (randomised probability integral transform: Brockwell 2007). A rule that accepts drafts too readily
    makes the quantiles of the drafter's preferred tokens too frequent.
    """
    source = torch.Generator().manual_seed(0)
    for prompt, several in zip(prompts, texts, strict=True):
        for new in several:
            tokens = torch.tensor(new, device=target.device)
            parts = zip(own_logits(target, prompt, new).split(CHUNK), tokens.split(CHUNK), strict=True)
            pairs = [above_and_own(target_probs(logits, sampling), part) for logits, part in parts]
            above, own = (torch.cat(values).double().cpu() for values in zip(*pairs, strict=True))
            yield (above + own * torch.rand(len(new), generator=source, dtype=torch.double)).clamp(max=1)


def above_and_own(probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """probs [n, V], tokens [n] -> [n] each: the probability of all tokens before a token in descending order of
    probability (ties by id), and its own."""
    own = probs.gather(1, tokens[:, None])  # [n, 1]
    ids = torch.arange(probs.shape[1], device=probs.device)
    comes_before = (probs > own) | ((probs == own) & (ids < tokens[:, None]))
    return (probs * comes_before).sum(1), own[:, 0]


def uniform_p_value(values: Tensor) -> float | None:
    """p-value of the Kolmogorov-Smirnov test that values [n] are uniform in [0, 1]; None if n < 20.

    With Stephens' correction for small n (1970).
    """
    size = len(values)
    if size < 20:
        return None
    from scipy.special import kolmogorov
    from scipy.stats import ks_1samp, uniform

    distance = ks_1samp(values.numpy(), uniform.cdf, method="asymp")[0]
    return float(kolmogorov((size**0.5 + 0.12 + 0.11 / size**0.5) * distance))


def share_seen(num_tokens: int) -> float | None:
    """By how much the quantiles' distribution must be shifted somewhere for the test to find it with probability POWER;
    None: too few tokens. No rule that gets a smaller share of the tokens wrong is surely found.

    The test alarms where the distance exceeds c / sqrt(n). At the place of a shift d the measured distance is d, less a
    normal deviation of at most 1 / (2 sqrt(n)).
    """
    if num_tokens < 20:
        return None
    from scipy.special import kolmogi
    from scipy.stats import norm

    return min(1.0, float(kolmogi(SMALLEST_P) + norm.ppf(POWER) / 2) / num_tokens**0.5)
