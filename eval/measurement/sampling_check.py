"""Are sampled texts the target's? Where each token lies in the target's own distribution behind the same prefix."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.target import Target
from ..sampling import Sampling, target_probs

SMALLEST_P = 1e-6  # a lossless run falls below it once in a million results
CHUNK = 256  # positions whose distributions are held at a time


@dataclass(frozen=True)
class SamplingCheck:
    """Kolmogorov-Smirnov test of sampled tokens against the target's distribution."""

    num_tokens: int  # sampled with drafts
    p_value: float | None  # how often chance alone gives as large a deviation
    baseline_p_value: float | None  # the same of texts sampled without drafts

    @property
    def holds(self) -> bool:
        """Whether the texts may have been drawn from the target's distribution."""
        return self.p_value is None or self.p_value >= SMALLEST_P


def check_sampling(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[Sequence[int]]],
    baseline: Sequence[Sequence[Sequence[int]]],
    sampling: Sampling,
) -> SamplingCheck:
    """Args: sampled, baseline: the new tokens of every prompt, several texts of it, each drawn with other numbers."""
    ours, theirs = (
        torch.cat([torch.empty(0), *quantiles(target, prompts, texts, sampling)]) for texts in (sampled, baseline)
    )
    return SamplingCheck(len(ours), uniform_p_value(ours), uniform_p_value(theirs))


@torch.no_grad()
def quantiles(
    target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[Sequence[int]]], sampling: Sampling
) -> Iterable[Tensor]:
    """Of each text the quantile of every new token, [n]: the probability of all more probable tokens, and a random part
    of its own.

    Tokens that are draws from the target's distribution have independent quantiles, uniform in [0, 1], whatever that
    distribution is (probability integral transform, randomised as for a discrete one: Brockwell 2007). A rule that
    keeps drafts too readily piles them up where the drafter's favourites lie.
    """
    source = torch.Generator().manual_seed(0)
    for prompt, several in zip(prompts, texts, strict=True):
        for new in several:
            ids = torch.tensor([[*prompt, *new]], device=target.device)  # [1, T]
            hidden = target.forward(ids).post_norm[0, len(prompt) - 1 : -1]  # [n, D]
            parts = zip(hidden.split(CHUNK), ids[0, len(prompt) :].split(CHUNK), strict=True)
            pairs = [above_and_own(target_probs(target.logits(part), sampling), tokens) for part, tokens in parts]
            above, own = (torch.cat(values).double().cpu() for values in zip(*pairs, strict=True))
            yield (above + own * torch.rand(len(new), generator=source, dtype=torch.double)).clamp(max=1)


def above_and_own(probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[n, V], [n] -> [n] each: the probability of all that come before a token, and its own; the most probable comes
    first, of equals the lowest id."""
    own = probs.gather(1, tokens[:, None])  # [n, 1]
    ids = torch.arange(probs.shape[1], device=probs.device)
    comes_before = (probs > own) | ((probs == own) & (ids < tokens[:, None]))
    return (probs * comes_before).sum(1), own[:, 0]


def uniform_p_value(values: Tensor) -> float | None:
    """The chance that as many uniform draws deviate from uniform by as much as these [n]; None of fewer than 20.

    Kolmogorov-Smirnov, with Stephens' correction for few (1970).
    """
    size = len(values)
    if size < 20:
        return None
    from scipy.special import kolmogorov
    from scipy.stats import ks_1samp, uniform

    distance = ks_1samp(values.numpy(), uniform.cdf, method="asymp")[0]
    return float(kolmogorov((size**0.5 + 0.12 + 0.11 / size**0.5) * distance))
