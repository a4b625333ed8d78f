"""Linear maps with weights packed once for a CPU that multiplies bf16 (oneDNN), for decoding.

Unpacked, oneDNN reorders a weight on each call: that costs several times what reading it does.
"""

from typing import Any

import torch
from torch import Tensor

_packed_linear: Any = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("headstart", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight) -> Tensor")


def multiplies_bf16() -> bool:
    """Whether this machine's processor has instructions for products of bf16 (AVX512-BF16, AMX), and torch uses them."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and torch.backends.mkldnn.is_available())


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in bf16 as oneDNN's kernels read it: an opaque tensor for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def packed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[..., in] -> [..., out] with a weight of `pack`. An operation of its own, so that compiled code can call it."""
    return torch.ops.headstart.packed_linear.default(x, weight)


def _run(x: Tensor, weight: Tensor) -> Tensor:
    return _packed_linear(x, weight, None, "none", (), "")


_library.impl("packed_linear", _run, "CPU")
_library.impl("packed_linear", _run, "MkldnnCPU")


@torch.library.register_fake("headstart::packed_linear", lib=_library)
def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
