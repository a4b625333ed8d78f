"""The dtype that a target is loaded in where none is asked for: one rule, for every command."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from .cpu.build import kernels, multiplies_bf16
from .cpu.decoder import CpuDecoder
from .cpu.packing import multiplied_weights
from .loading import TargetConfig, quantization, read_model_config, torch_device
from .skeleton import NoSkeleton, load_skeleton

MOST_MULTIPLIED = 0.9  # share from which on others' weights in bf16, whose products are emulated, cost less than fp32
NARROW = (torch.bfloat16, torch.float16)


def default_dtype(path: str | Path, device: str) -> str:
    """What `with_default_dtype` gives a target, by its path alone."""
    return with_default_dtype(TargetConfig(path=str(path)), device).dtype


def with_default_dtype(config: TargetConfig, device: str) -> TargetConfig:
    """The config with the default on a device in place of `auto`; as it is for a target that is spread over devices.

    As stored on a GPU, or if it is stored quantised. On a CPU float32; or bfloat16 if the weights are stored in 16
    bits, and this processor has bf16 instructions or our kernels decode the target, or multiply most of its weights.

    Raises: BadInput if there is no such target or device.
    """
    if config.dtype != "auto" or config.device_map is not None or torch_device(device).type != "cpu":
        return config
    stored = read_model_config(config)
    if quantization(stored) is not None:
        return config
    is_narrow = stored.get_text_config().dtype in NARROW
    pays = is_narrow and (multiplies_bf16() or decoded_by_kernels(config))
    return replace(config, dtype="bfloat16" if pays else "float32")


def decoded_by_kernels(config: TargetConfig) -> bool:
    """Whether a target's layers, in bf16, would be decoded by our kernels for this CPU, or most of their weights be
    multiplied by them."""
    if kernels() is None:
        return False
    try:
        skeleton = load_skeleton(config)
    except NoSkeleton:
        return False
    skeleton.model.to(torch.bfloat16).to_empty(device="cpu")  # no page of this memory is ever touched
    return skeleton.may_use(CpuDecoder) or multiplied_share(skeleton.layers) >= MOST_MULTIPLIED


def multiplied_share(layers: nn.ModuleList) -> float:
    """The share of the layers' weights whose products our kernels would compute: linear layers', and experts'."""
    multiplied = [weight for part in layers.modules() for weight in multiplied_weights(part)]
    return sum(map(torch.numel, multiplied)) / max(sum(map(torch.numel, layers.parameters())), 1)
