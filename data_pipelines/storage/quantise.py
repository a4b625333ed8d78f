"""The formats in which hidden states are stored: float32, bfloat16, or 8 bits per value.

With 8 bits, each vector (the state of one token at one layer) has its own scale, and is stored as int8 or as fp8
(e4m3), whichever loses less. int8 has steps of equal size: its error relative to the vector's norm is about
0.0023 * max / rms of the vector. fp8 has steps proportional to the value: its error is about 0.026 of each value. If a
few channels have most of the norm (massive activations), int8 would round all other channels to zero. The sign of the
scale says which format a vector has.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}  # dtype of values on disk
SCALE = torch.bfloat16  # dtype of scales on disk
STEPS = 126.5  # the value that a vector's maximum is scaled to in int8: below 127, as a scale may be rounded down
LARGEST = 448.0  # the same in e4m3: its largest value
SPREAD = 11.0  # max / rms of a vector above which fp8 loses less than int8


@dataclass
class Packed:
    """States in a storage format."""

    values: Tensor  # [n, ..., D] of a dtype in STORAGE; in uint8 the bits of int8 or fp8
    scales: Tensor | None  # [n, ...] positive for int8, negative for fp8; None unless stored with 8 bits

    def split(self, sizes: list[int]) -> list["Packed"]:
        """Parts of these sizes along the first dimension."""
        scales = [None] * len(sizes) if self.scales is None else self.scales.split(sizes)
        return [Packed(*pair) for pair in zip(self.values.split(sizes), scales, strict=True)]


def pack(states: Tensor, storage_dtype: str) -> Packed:
    """Convert states [n, ..., D] to a storage format. Args: storage_dtype: a key of STORAGE."""
    if storage_dtype != "8bit":
        return Packed(states.to(STORAGE[storage_dtype]), None)
    states = states.float()
    peak = torch.maximum(states.amax(-1), -states.amin(-1))  # [n, ...]; on a CPU five times as fast as a norm
    norm = torch.linalg.vector_norm(states, 2, -1)
    uneven = peak * math.sqrt(states.shape[-1]) > SPREAD * norm
    scales = (peak / torch.where(uneven, LARGEST, STEPS)).to(SCALE)
    scales = torch.where(peak == 0, 1, scales)  # the scale of a vector with NaN stays NaN, so that it is noticed
    scaled = states * (1 / scales.float())[..., None]
    values = scaled.round().to(torch.int8).view(torch.uint8)
    if states.is_cuda or uneven.any():  # on a GPU, the test would wait for the device
        as_float = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        values = torch.where(uneven[..., None], as_float, values)
    return Packed(values, torch.where(uneven, -scales, scales))


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The stored states as [n, ..., D] of a dtype."""
    values, scales = packed.values, packed.scales
    if scales is None:
        return values.to(dtype)
    states = values.view(torch.int8).float()
    uneven = scales < 0
    if uneven.any():
        states[uneven] = values[uneven].view(torch.float8_e4m3fn).float()
    return states.mul_(scales.float().abs_()[..., None]).to(dtype)
