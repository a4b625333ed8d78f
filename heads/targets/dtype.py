"""The dtype that a target is loaded in where none is asked for: one rule, for every command."""

from dataclasses import replace
from pathlib import Path

import torch

from ..decoders.cpu.build import kernels, multiplies_bf16
from ..decoders.cpu.decoder import CpuDecoder
from ..loading import TargetConfig, quantization, read_model_config
from .skeleton import NoSkeleton, load_skeleton

NARROW = (torch.bfloat16, torch.float16)


def default_dtype(path: str | Path, device: str) -> str:
    """The default for a target on a device: as stored on a GPU, or if it is stored quantised. On a CPU float32; or
    bfloat16 if the weights are stored in 16 bits, and this processor has bf16 instructions or our kernels decode the
    target.

    Raises: BadInput if there is no such target.
    """
    if torch.device(device).type != "cpu":
        return "auto"
    config = TargetConfig(path=str(path))
    stored = read_model_config(config)
    if quantization(stored) is not None:
        return "auto"
    if stored.get_text_config().dtype not in NARROW:
        return "float32"
    return "bfloat16" if multiplies_bf16() or decoded_by_kernels(config) else "float32"


def with_default_dtype(config: TargetConfig, device: str) -> TargetConfig:
    """The config with `default_dtype` in place of `auto`; as it is for a target that is spread over devices."""
    if config.dtype != "auto" or config.device_map is not None:
        return config
    return replace(config, dtype=default_dtype(config.path, device))


def decoded_by_kernels(config: TargetConfig) -> bool:
    """Whether a target's layers, in bf16, would be decoded by our kernels for this CPU."""
    if kernels() is None:
        return False
    try:
        skeleton = load_skeleton(config)
    except NoSkeleton:
        return False
    skeleton.model.to(torch.bfloat16).to_empty(device="cpu")  # no page of this memory is ever touched
    return skeleton.may_use(CpuDecoder)
