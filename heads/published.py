"""What the configs of heads that others trained say of their layers, and what of it is not the target's."""

from typing import Any

import torch
from torch import Tensor

from ..configs.errors import BadInput
from .layers import llama_config
from .target import Target

SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


def architecture_of(config: dict[str, Any], target: Target) -> dict[str, Any]:
    """What of a head's config differs from the layers that we would give it; empty: nothing.

    Raises: BadInput where its layers are not Llama's, or read states of another size than the target's.
    """
    ours = llama_config(target.config).to_dict()
    found = {key: config[key] for key in SIZES if config.get(key) is not None}
    heads = found.get("num_attention_heads", ours["num_attention_heads"])
    found.setdefault("num_key_value_heads", heads if "num_attention_heads" in found else ours["num_key_value_heads"])
    found["head_dim"] = config.get("head_dim") or ours["hidden_size"] // heads
    found["rope_parameters"] = rotary_of(config)
    problems = [
        (config.get("model_type", "llama") != "llama", f"model_type {config.get('model_type')}: expected llama"),
        (config.get("hidden_act", "silu") != "silu", f"hidden_act {config.get('hidden_act')}: expected silu"),
        (bool(config.get("attention_bias")), "attention_bias: expected none"),
        (bool(config.get("mlp_bias")), "mlp_bias: expected none"),
        (bool(config.get("sliding_window")), f"sliding_window {config.get('sliding_window')}: expected none"),
    ]
    for key in ("hidden_size", "target_hidden_size"):
        size = config.get(key) or target.hidden_size
        problems.append((size != target.hidden_size, f"{key} {size}: {target.name} has {target.hidden_size}"))
    for is_wrong, what in problems:
        if is_wrong:
            raise BadInput(what)
    return {key: value for key, value in found.items() if not same(value, ours[key])}


def rotary_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a config of any age, as transformers keeps them now."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type", "rope_theta")}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": float(theta), **rest}


def same(value: Any, ours: Any) -> bool:
    """Whether a key says the same, in whatever order and number type."""
    if isinstance(value, dict) and isinstance(ours, dict):
        return value.keys() == ours.keys() and all(same(value[key], ours[key]) for key in value)
    return value == ours


def same_tensor(value: Tensor, reference: Tensor) -> bool:
    """Whether a copy of a table is the table, but for the rounding of another dtype."""
    return value.shape == reference.shape and torch.allclose(value.float(), reference.float(), rtol=1e-2, atol=1e-3)
