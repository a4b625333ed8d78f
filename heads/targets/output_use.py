"""How a model uses its output layer: what is in front of it, and the scale and cap of the logits that it makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...configs.errors import BadInput

CLOSE, CLOSE_16_BITS = 1e-3, 0.1  # relative error of a position's state


def check_logits(target: Any, post_norm: Tensor, logits: Tensor) -> None:
    """Set `logit_scale` and `caps_wide` by what the model's own code made of states [1, T, D]: logits [1, T, V].

    Raises BadInput if it computes them in an unknown way."""
    where = f"target {target.name}: {type(target.model).__name__}"
    if logits.shape[-1] != target.vocab_size:
        raise BadInput(f"{where}: it has logits of {logits.shape[-1]} tokens, its output layer of {target.vocab_size}")
    target.logit_scale = found_scale(target, post_norm, logits)
    target.caps_wide = bool(target.logit_cap) and is_capped_wide(target, post_norm, logits)
    if not is_close(logits.to(target.dtype), target.logits(post_norm)):  # as exact as the weights that made them
        raise BadInput(f"{where}: its logits are computed in an unknown way")


def is_capped_wide(target: Any, post_norm: Tensor, logits: Tensor) -> bool:
    """Whether the model's logits [1, T, V] of states [1, T, D] are nearer to ours capped in fp32 than in its dtype."""
    values = target.output_values(post_norm)
    narrow, wide = ((logits - target.as_logits(x).float()).norm() for x in (values, values.float()))
    return bool(wide < narrow)


@contextmanager
def last_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """What the layer reads in forwards inside; nothing if it is not called, but its weights are used."""
    read: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        yield read
    finally:
        handle.remove()


def found_before_output(target: Any, post_norm: Tensor, read: list[Tensor]) -> nn.Module | None:
    """The part of the model, as ModernBERT's prediction head, that makes what the output layer read [1, T, D] of
    post-norm states; None: there is none."""
    if not read or read[-1].ndim != 3:
        return None
    post_norm = post_norm[:, -read[-1].shape[1] :]
    if read[-1].shape != post_norm.shape or is_close(read[-1], post_norm):
        return None
    for part in parts_beside(target):
        try:
            if is_close(read[-1], part(post_norm)):
                return part
        except Exception:  # the code of an unknown part may raise anything
            continue
    return None


def parts_beside(target: Any) -> list[nn.Module]:
    """The parts of the model that are neither its decoder nor its output layer, nor have one of them inside."""
    ends = target.base, target.output_layer
    return [part for part in target.model.children() if not any(end in part.modules() for end in ends)]


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


def is_close(wanted: Tensor, got: Tensor) -> bool:
    """Whether states or logits [B, T, D] are equal up to rounding; in 16 bits at half of the positions, as there
    rounding may choose other experts at some."""
    is_wide, wanted, got = wanted.dtype in (torch.float32, torch.float64), wanted.float(), got.float()
    errors = (wanted - got).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)
    return bool(errors.max() <= CLOSE) if is_wide else bool(errors.median() <= CLOSE_16_BITS)
