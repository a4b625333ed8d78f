"""Heads with FP8 matrices in their layers, as vLLM reads them from a draft's own quantization_config.

A matrix has a scale for each row, beside it under its name and `_scale`; what multiplies it the engine rounds to
FP8 itself, with a scale for each token. What fuses features, embeds and scores tokens stays in the head's dtype.
Source: vLLM 0.32, its classes of EAGLE-3, EAGLE-1 and DFlash, and compressed_tensors_w8a8_fp8.py.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...targets.weights.tensor_files import TensorFiles
from .contracts import Contract

FP8 = "fp8"  # as a dtype of exports
MATRIX = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+_proj\.weight")
SCALE = "_scale"
NUMBERS, STORED = torch.float8_e4m3fn, "F8_E4M3"
LARGEST, LEAST = torch.finfo(NUMBERS).max, torch.finfo(torch.float32).tiny
KEY = "quantization_config"
ONLY = "only vLLM was seen to read FP8, of EAGLE-3, EAGLE-1 and DFlash"
KIND = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**KIND, "strategy": "channel", "dynamic": False},
    "input_activations": {**KIND, "strategy": "token", "dynamic": True},
}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", r"re:.*\bfc$"],  # vLLM's names, in which layers are numbered behind the target's
}


def is_read_in_fp8(config: Mapping[str, Any], in_fp8: str) -> bool:
    """Whether vLLM reads this head in FP8. Args: in_fp8: of its `Serving`."""
    return in_fp8 in (config.get("architectures") or [])[:1]


def quantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head with the matrices of its layers in FP8, and their scales [rows, 1]."""
    made = dict(tensors)
    for name, value in tensors.items():
        if MATRIX.fullmatch(name):
            scale = (value.float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST)
            made |= {name: (value.float() / scale).to(NUMBERS), name + SCALE: scale}
    return made


def dequantised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a folder in float32 where they are in FP8 with a scale for each row, or for all."""
    made = dict(tensors)
    for name, value in tensors.items():
        scale = tensors.get(name + SCALE)
        if value.dtype == NUMBERS and scale is not None and scale.numel() in (1, len(value)):
            made[name] = value.float() * made.pop(name + SCALE).float().reshape(-1, 1)
    return made


def require(contract: Contract, config: Mapping[str, Any], stored: TensorFiles, *, in_fp8: str, to: str) -> None:
    """Let a contract require of a head with FP8 tensors what its config says of them, or report why it is not read so.

    Args: in_fp8: of `Serving`. to: as in `check_export`.
    """
    told = config.get(KEY)
    if not told or STORED not in stored.dtypes.values():
        return
    for key, value in CONFIG.items():
        contract.report(told.get(key) != value, f"{KEY}.{key}: expected {value}, found {told.get(key)}")
    is_read = is_read_in_fp8(config, in_fp8) and to in ("", "vllm")
    contract.report(not is_read, f"{KEY}: {ONLY}")
    for name, shape in list(contract.shapes.items()):
        if MATRIX.fullmatch(name):
            contract.shapes[name + SCALE] = (shape[0], 1)
            contract.dtypes |= {name: (STORED,), name + SCALE: ("F32", "BF16", "F16")}
