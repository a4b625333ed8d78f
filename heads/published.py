"""EAGLE heads of others: as ours, but with sizes, rotary positions and norms of their own instead of the target's."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..configs.errors import BadInput
from .eagle import EagleConfig, EagleHead
from .eagle3 import Eagle3Config, Eagle3Head, Eagle3Layer
from .layers import RMSNorm, llama_config
from .recurrent import Context
from .target import Target, TargetOutput

SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


@dataclass(kw_only=True)
class PublishedEagleConfig(EagleConfig):
    """architecture: what of the head's layers is not the target's, see `architecture_of`."""

    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PublishedEagle3Config(Eagle3Config):
    """architecture: as in `PublishedEagleConfig`. norm_before_residual: the first layer's residual is the normalised
    hidden state. norm_before_fc: one RMSNorm over all features side by side, before they are fused."""

    architecture: dict[str, Any] = field(default_factory=dict)
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise BadInput("norm_before_fc: not together with fc_norm")


class PublishedEagle(EagleHead):
    """EAGLE-1 with layers of its own sizes."""

    config_class = PublishedEagleConfig

    def __init__(self, config: PublishedEagleConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, dressed(target, config.architecture), draft_token_ids)
        object.__setattr__(self, "target", target)


class NormedResidualLayer(Eagle3Layer):
    """The residual is what `hidden_norm` made of the hidden state."""

    def forward(self, x: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        return super().forward(x, self.hidden_norm(hidden), rotary, context)


class PublishedEagle3(Eagle3Head):
    """EAGLE-3 with layers of its own sizes; with norm_before_fc also `input_norm`."""

    config_class = PublishedEagle3Config

    def __init__(self, config: PublishedEagle3Config, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, dressed(target, config.architecture), draft_token_ids)
        object.__setattr__(self, "target", target)
        self.config: PublishedEagle3Config = config
        self.input_norm: nn.Module | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(self.fc.in_features, eps=self.llama.rms_norm_eps)
        if config.norm_before_residual:
            first = NormedResidualLayer(config=self.llama)
            if config.num_layers == 1:
                self.midlayer = first
            else:
                self.layers[0] = first

    def serving_config(self) -> dict[str, Any]:
        config = super().serving_config()
        config |= {key: getattr(self.config, key) for key in ("norm_before_residual", "norm_before_fc")}
        config["eagle_config"]["norm_before_fc"] = self.config.norm_before_fc
        return config

    def _fuse(self, output: TargetOutput) -> Tensor:
        if self.input_norm is None:
            return super()._fuse(output)
        return self.fc(self.input_norm(output.features.to(self.fc.weight.dtype).flatten(2)))


def dressed(target: Target, architecture: dict[str, Any]) -> Target:
    """The target as a head's constructor reads it, with the sizes of the head's layers in its config."""
    config = llama_config(target.config).to_dict() | architecture
    worn = copy.copy(target)
    worn.config = LlamaConfig(**config)
    return worn


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
