"""Is the speculative text the target's own? Token by token, and where it is not, whether rounding explains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...heads.target import Target

MAX_ULPS = 4  # two logits this close may swap when the same sum is taken in another order


@dataclass(frozen=True)
class Divergence:
    """A text that differs: of which prompt, where it first differs, and how far the two tokens' logits lie apart."""

    prompt: int
    position: int | None  # None: one text is the start of the other
    gap_ulp: float | None

    @property
    def is_explained(self) -> bool:
        """Whether the two tokens' logits lie so close that rounding may swap them."""
        return self.gap_ulp is not None and self.gap_ulp <= MAX_ULPS


@dataclass(frozen=True)
class LosslessReport:
    """checked texts = identical + explained + unexplained; divergences: of the texts that differ."""

    checked: int = 0
    identical: int = 0
    explained: int = 0
    unexplained: int = 0
    divergences: list[Divergence] = field(default_factory=list)


def ulp(value: float, dtype: torch.dtype) -> float:
    """The spacing of a dtype's numbers at |value|."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))


@torch.no_grad()
def gap_in_ulps(target: Target, prefix: Sequence[int], pair: tuple[int, int]) -> float:
    """How far the worse of two tokens lies below the best logit after a prefix, in ulp of the target's dtype.

    The smaller gap of two ways to compute it: one forward over the prefix, and its last token over a cache, as
    decoding does.
    """
    ids = torch.tensor([list(prefix)], device=target.device)  # [1, T]
    hidden = [target.forward(ids).post_norm[:, -1]]  # [1, D]
    if len(prefix) > 1:
        cache, positions = target.new_cache(len(prefix)), torch.arange(len(prefix), device=target.device)[None]
        target.forward(ids[:, :-1], cache=cache, positions=positions[:, :-1], extent=len(prefix))
        step = target.forward(ids[:, -1:], cache=cache, positions=positions[:, -1:], extent=len(prefix))
        hidden.append(step.post_norm[:, -1])
    gaps = []
    for state in hidden:
        logits = target.logits(state)[0]  # [V]
        best = float(logits.max())
        gaps.append((best - float(logits[list(pair)].min())) / ulp(best, target.dtype))
    return min(gaps)


def compare_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    baseline: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    *,
    numbers: Sequence[int] | None = None,
) -> LosslessReport:
    """Compare new tokens of both runs, prompt by prompt; after a first divergence texts may differ and are not read.

    Args: numbers: what divergences call the prompts; None: by their index.
    """
    divergences, num_explained = [], 0
    numbers = numbers or range(len(prompts))
    for number, prompt, ours, theirs in zip(numbers, prompts, speculative, baseline, strict=True):
        if list(ours) == list(theirs):
            continue
        at = next((j for j, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        gap = math.inf if at is None else gap_in_ulps(target, [*prompt, *theirs[:at]], (ours[at], theirs[at]))
        num_explained += gap <= MAX_ULPS
        divergences.append(Divergence(number, at, None if math.isinf(gap) else round(gap, 2)))
    return LosslessReport(
        checked=len(prompts),
        identical=len(prompts) - len(divergences),
        explained=num_explained,
        unexplained=len(divergences) - num_explained,
        divergences=divergences,
    )
