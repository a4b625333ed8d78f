"""Hidden states as they lie on disk: in 32, 16 or 8 bits a value.

In 8 bits each vector (one token's state of one layer) has a scale of its own and whichever coding loses less: int8,
steps of one size, or fp8 (e4m3), whose steps grow with the value. The error of int8 is 0.0023 max / rms of the vector's
norm, that of fp8 0.026 of every value's size. Where few channels carry most of the norm, as massive activations do,
int8 would erase all others. The sign of the scale says which it is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}  # a value's dtype on disk
SCALE = torch.bfloat16
STEPS, LARGEST = 126.5, 448.0  # of int8, with room for a scale rounded down; of e4m3
SPREAD = 11.0  # max / rms from which fp8 loses less than int8


@dataclass
class Packed:
    """values: [n, ..., D] of a dtype in STORAGE. scales: [n, ...], in 8 bits: positive for int8, negative for fp8."""

    values: Tensor
    scales: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def split(self, sizes: list[int]) -> list["Packed"]:
        """Along the first dimension."""
        scales = [None] * len(sizes) if self.scales is None else self.scales.split(sizes)
        return [Packed(*pair) for pair in zip(self.values.split(sizes), scales, strict=True)]


def pack(states: Tensor, storage_dtype: str) -> Packed:
    """[n, ..., D] as STORAGE has it."""
    if storage_dtype != "8bit":
        return Packed(states.to(STORAGE[storage_dtype]), None)
    states = states.float()
    peak = torch.maximum(states.amax(-1), -states.amin(-1))  # [n, ...]; on a CPU five times as fast as a norm
    norm = torch.linalg.vector_norm(states, 2, -1)
    uneven = peak * math.sqrt(states.shape[-1]) > SPREAD * norm
    scales = (peak / torch.where(uneven, LARGEST, STEPS)).to(SCALE)
    scales = torch.where(peak == 0, 1, scales)  # not for NaN, which stays to be seen
    scaled = states * (1 / scales.float())[..., None]
    values = scaled.round().to(torch.int8).view(torch.uint8)
    if states.is_cuda or uneven.any():  # on a GPU, asking would wait for it
        as_float = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        values = torch.where(uneven[..., None], as_float, values)
    return Packed(values, torch.where(uneven, -scales, scales))


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """[n, ..., D] of a dtype."""
    values, scales = packed.values, packed.scales
    if scales is None:
        return values.to(dtype)
    states = values.view(torch.int8).float()
    uneven = scales < 0
    if uneven.any():
        states[uneven] = values[uneven].view(torch.float8_e4m3fn).float()
    return states.mul_(scales.float().abs_()[..., None]).to(dtype)
