"""Linear maps with weights packed once for a CPU that multiplies bf16 (oneDNN), for decoding.

Unpacked, oneDNN reorders a weight on each call: that costs several times what reading it does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_packed_linear: Any = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("headstart", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight) -> Tensor")


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bf16 (AVX512-BF16, AMX), and torch uses them."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and torch.backends.mkldnn.is_available())


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in bf16 as oneDNN's kernels read it: an opaque tensor for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())


def packed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[..., in] -> [..., out] with a weight of `pack`. An operation of its own, so that compiled code can call it."""
    return torch.ops.headstart.packed_linear.default(x, weight)


def pack_linears(module: nn.Module) -> None:
    """Let the linear layers within a module in bf16 on a CPU compute with packed weights, where no gradient is asked.

    The weights themselves stay as they are, and must stay so: what is packed is a copy. Nothing happens elsewhere.
    """
    if not multiplies_bf16():
        return
    for linear in module.modules():
        if type(linear) is nn.Linear and linear.weight.dtype == torch.bfloat16 and linear.weight.device.type == "cpu":
            linear.forward = _packed_forward(linear)  # pyright: ignore[reportAttributeAccessIssue]


def _packed_forward(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    packed, plain = pack(linear.weight), linear.forward

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype != torch.bfloat16:
            return plain(x)
        out = packed_linear(x, packed)
        return out if linear.bias is None else out + linear.bias

    return forward


def _run(x: Tensor, weight: Tensor) -> Tensor:
    return _packed_linear(x, weight, None, "none", (), "")


_library.impl("packed_linear", _run, "CPU")
_library.impl("packed_linear", _run, "MkldnnCPU")


@torch.library.register_fake("headstart::packed_linear", lib=_library)
def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
