"""How a model uses its output layer: the scale and cap of the logits that it makes."""

from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput

CLOSE, CLOSE_16_BITS = 1e-3, 0.1  # relative error of a position's state


def check_logits(target: Any, post_norm: Tensor, logits: Tensor) -> None:
    """Set `logit_scale`, `logit_cap` and `caps_wide` by the logits [1, T, V] that the model's own code made of states
    [1, T, D].

    Raises BadInput if it computes them in an unknown way."""
    where = f"target {target.name}: {type(target.model).__name__}"
    if logits.shape[-1] != target.vocab_size:
        raise BadInput(f"{where}: it has logits of {logits.shape[-1]} tokens, its output layer of {target.vocab_size}")
    for cap in dict.fromkeys((target.logit_cap, None)):  # a config may name a cap that the model does not apply
        target.logit_cap = cap
        target.logit_scale = found_scale(target, post_norm, logits)
        target.caps_wide = bool(cap) and is_capped_wide(target, post_norm, logits)
        if is_close(logits.to(target.dtype), target.logits(post_norm)):  # as exact as the weights that made them
            return
    raise BadInput(f"{where}: its logits are computed in an unknown way")


def is_capped_wide(target: Any, post_norm: Tensor, logits: Tensor) -> bool:
    """Whether the model's logits [1, T, V] of states [1, T, D] are nearer to ours capped in fp32 than in its dtype."""
    values = target.output_values(post_norm)
    narrow, wide = ((logits - target.as_logits(x).float()).norm() for x in (values, values.float()))
    return bool(wide < narrow)


def found_scale(target: Any, post_norm: Tensor, logits: Tensor) -> float:
    """The factor between the output layer's values and the model's logits, as Granite's and Cohere's; else 1.

    It is read off the logits, and is one of the config's numbers or its inverse if one is that close.
    """
    cap = target.logit_cap
    values, uncapped = target.output_values(post_norm).double(), logits.double()
    if cap is not None:
        uncapped = torch.atanh((uncapped / cap).clamp(-0.99, 0.99)) * cap
        values = values.where(logits.abs() < 0.9 * cap, 0)  # where the cap leaves nothing to read
    scale = float((values * uncapped).sum() / values.square().sum())
    numbers = [x for x in target.config.to_dict().values() if isinstance(x, int | float) and x > 0]
    given = [1.0, *numbers, *(1 / number for number in numbers)]
    nearest = min(given, key=lambda number: abs(number - scale))
    return nearest if abs(nearest - scale) < 4e-3 * scale else scale


def logits_by_bits(target: Any) -> Tensor | None:
    """[2**16] fp32: by the bits of a bf16 value of the output layer, the logit that is made of it; None: the value."""
    if target.logit_scale == 1 and target.logit_cap is None:
        return None
    return target.as_logits(torch.arange(2**16).to(torch.int16).view(torch.bfloat16)).float()


def rises(by_bits: Tensor) -> bool:
    """Whether no larger value has a smaller logit."""
    values = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).float()
    order = values[values.isfinite()].argsort()
    return bool((by_bits[values.isfinite()][order].diff() >= 0).all())


def is_close(wanted: Tensor, got: Tensor) -> bool:
    """Whether states or logits [B, T, D] are equal up to rounding; in 16 bits at half of the positions, as there
    rounding may choose other experts at some."""
    is_wide, wanted, got = wanted.dtype in (torch.float32, torch.float64), wanted.float(), got.float()
    errors = (wanted - got).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    return bool(errors.max() <= CLOSE) if is_wide else bool(errors.median() <= CLOSE_16_BITS)
