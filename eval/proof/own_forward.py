"""Texts held against the model itself: its own code in transformers, without any cache, mask or kernel of ours."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...targets.caches.attention import any_shape
from ...targets.check import own_attention
from ...targets.images.image_rows import forgetting_positions, own_inputs
from ...targets.images.pictures import pictures_of
from ...targets.target import Target
from .own_sampling import NoiseOfText

# up to how far apart two logits are equal but for rounding
FULL_PRECISION = 1e-3  # of the standard deviation of the logits, where all weights have 32 bits
HALF_PRECISION = 2**-6  # of the largest absolute logit, where some have fewer
LEAST_LOGIT = -1e4  # below it are tokens that the model rules out


@contextmanager
def generation_config(model: Any, **values: Any) -> Iterator[None]:
    """The model with these generation settings alone; its own may sample or penalise repetition."""
    own_config = model.generation_config
    model.generation_config = GenerationConfig(**values)
    try:
        yield
    finally:
        model.generation_config = own_config


@torch.no_grad()
def own_logits(target: Target, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """[n, V] fp32: from what the model chooses each of n new tokens, in one forward over the whole text."""
    ids = torch.tensor([[*prompt, *new[:-1]]], device=target.device)  # [1, T]
    takes_part = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    part: dict[str, Any] = {"logits_to_keep": len(new)} if takes_part else {}
    part |= own_inputs(target, ids[0].tolist(), pictures_of(prompt))
    with own_attention(target), any_shape(ids.device), forgetting_positions(target):
        logits = target.model(input_ids=ids, use_cache=False, **part).logits
    return logits[0, -len(new) :].to(target.device).float()


@torch.no_grad()
def own_step_logits(target: Target, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """`own_logits` one token per forward, as transformers' `generate` computes them when made to write this text."""
    ids = torch.tensor([prompt], device=target.device)  # [1, T]

    def force(read: Tensor, scores: Tensor) -> Tensor:
        token = torch.tensor([[new[read.shape[1] - len(prompt)]]], device=scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    given = own_inputs(target, prompt, pictures_of(prompt))
    with (
        own_attention(target),
        forgetting_positions(target),
        generation_config(
            target.model,
            max_new_tokens=len(new),
            pad_token_id=0,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    ):
        generated = target.model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[force], **given)
    return torch.cat(generated.logits).to(target.device)


def rounding(target: Target, logits: Tensor, *, is_narrow: bool = False) -> Tensor:
    """logits [n, V] -> [n] how far apart two of them may be and still be equal up to rounding.

    Args: is_narrow: the text was written in 16 bits, whatever the target is held in here."""
    allowed = logits.masked_fill(logits < LEAST_LOGIT, 0)
    if not is_narrow and all(parameter.dtype.itemsize >= 4 for parameter in target.model.parameters()):
        return FULL_PRECISION * allowed.std(-1)
    return HALF_PRECISION * allowed.abs().amax(-1)


def below_best(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """logits [n, V] -> [n] by how much those of n tokens lie below the largest."""
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    return logits.amax(-1) - own[:, 0]


def are_chosen(
    target: Target,
    logits: Tensor,
    new: Sequence[int],
    baseline: Sequence[int],
    noise: NoiseOfText | None,
    *,
    is_narrow: bool = False,
) -> Tensor:
    """[n] whether the new tokens are what is chosen from the logits up to rounding, and where the two texts part, the
    baseline's token too. Args: noise: what sampled the text; None: greedy. is_narrow: as of `rounding`."""
    allowed = rounding(target, logits, is_narrow=is_narrow)
    at = next((i for i, (token, other) in enumerate(zip(new, baseline, strict=False)) if token != other), None)

    def fit(tokens: Sequence[int]) -> Tensor:
        if noise is None:
            return below_best(logits, tokens) <= allowed
        return noise.may_choose(logits, torch.tensor(tokens, device=logits.device), allowed)

    chosen = fit(new)
    if at is not None:
        chosen[at] &= fit([*new[:at], baseline[at], *new[at + 1 :]])[at]
    return chosen


def first_not_own(
    target: Target,
    prompt: Sequence[int],
    new: Sequence[int],
    logits: Tensor | None = None,
    *,
    baseline: Sequence[int] = (),
    noise: NoiseOfText | None = None,
    is_narrow: bool = False,
) -> int | None:
    """The index of the first new token that is not the model's own choice up to rounding; None: all are.

    A token that is not best in the forward over the whole text may be so where the model itself decodes step by step: a
    router that rounds to another expert moves logits by more than rounding, and rotary frequencies may depend on the
    length of what is read.

    Args:
        logits: `own_logits` of this text, if they are known.
        baseline: another text behind this prompt; where it parts from `new`, its token must be such a choice too.
        noise: what sampled the text; None: it is greedy.
        is_narrow: as of `rounding`.
    """
    logits = own_logits(target, prompt, new) if logits is None else logits
    own = are_chosen(target, logits, new, baseline, noise, is_narrow=is_narrow)
    if not bool(own.all()):
        own |= are_chosen(target, own_step_logits(target, prompt, new), new, baseline, noise, is_narrow=is_narrow)
    return next(iter((~own).nonzero()[:, 0].tolist()), None)
