"""Single matrix products, norms and choices in bf16 on a CPU, by our own kernels.

Unlike oneDNN's they read weights at memory bandwidth also for few rows, and a row's result does not depend on the other
rows.
"""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .build import kernels, multiplies_bf16
from .structs import address_of

BLOCK = 32  # outputs that are computed together, as in kernels.cpp
TILE = 8  # tokens likewise, at most: fewer take hardly less time, as the weights are read all the same


def blocked(weight: Tensor) -> Tensor:
    """A weight [N, K], K even, in the kernels' layout [ceil(N / 32), K / 2, 32, 2], padded with zeros."""
    num, size = weight.shape
    whole = F.pad(weight.detach(), (0, 0, 0, -num % BLOCK)).contiguous()
    pairs = whole.view(torch.int32).view(-1, BLOCK, size // 2).transpose(1, 2).contiguous()  # moved as one number each
    return pairs.view(weight.dtype).view(-1, size // 2, BLOCK, 2)


def multiply(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """[..., K] -> [..., N] products with a blocked weight. Needs `kernels()`."""
    library, x = kernels(), x.contiguous()
    assert library is not None
    y, size = x.new_empty(*x.shape[:-1], num_outputs), x.shape[-1]
    product = x.data_ptr(), x.numel() // size, size, weight.data_ptr(), num_outputs
    library.multiply(*product, y.data_ptr(), torch.get_num_threads())
    return y


def multiply_argmax(x: Tensor, weight: Tensor, num_outputs: int, logits: Tensor | None = None) -> Tensor:
    """[..., K] -> [...] the argmax of `multiply`, or of the logits that are made of it, the first index if several tie.

    Args: logits: as `Choice` has them.
    """
    library, x = kernels(), x.contiguous()
    assert library is not None
    indices, size = torch.empty(x.shape[:-1], dtype=torch.long), x.shape[-1]
    product = x.data_ptr(), indices.numel(), size, weight.data_ptr(), num_outputs
    library.multiply_argmax(*product, address_of(logits), indices.data_ptr(), torch.get_num_threads())
    return indices


def rms_normalised(x: Tensor, gain: Tensor, eps: float) -> Tensor | None:
    """x / rms(x) * gain over the last dimension; None if the kernels do not support it."""
    library = usable_kernels(x)
    if library is None or gain.dtype != x.dtype:
        return None
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    library.normalise_rows(x.data_ptr(), gain.data_ptr(), y.data_ptr(), x.numel() // size, size, eps)
    return y


def best(logits: Tensor) -> Tensor:
    """[..., V] -> [...] the argmax, the first index if several tie."""
    library = usable_kernels(logits)
    if library is None:
        return logits.argmax(-1)
    logits, size = logits.contiguous(), logits.shape[-1]
    indices = torch.empty(logits.shape[:-1], dtype=torch.long)
    library.argmax(logits.data_ptr(), indices.numel(), size, indices.data_ptr())
    return indices


def usable_kernels(x: Tensor) -> ctypes.CDLL | None:
    """The kernels if they support x (bf16 on a CPU) and neither gradients nor compilation are active; else None."""
    return None if torch.is_grad_enabled() else kernels_for(x)


def kernels_for(x: Tensor) -> ctypes.CDLL | None:
    """`usable_kernels` for an operation whose weights need no gradients, so that only x may need them."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.requires_grad or torch.compiler.is_compiling():
        return None
    return kernels()


class WideProducts(TorchFunctionMode):
    """Inside, torch's linear layers in bf16 on a CPU compute in fp32 and round to bf16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].dtype == torch.bfloat16 and args[1].device.type == "cpu":
            wide: list[Any] = [None if tensor is None else tensor.float() for tensor in args]
            return F.linear(*wide).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def wide_products() -> AbstractContextManager[Any]:
    """`WideProducts` where torch would emulate bf16, several times slower."""
    return nullcontext() if multiplies_bf16() else WideProducts()


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output, with gradients if they are recorded, in `wide_products` unless it is being compiled."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return linear(x)
    rows = x.reshape(-1, x.shape[-1])  # of a slice of positions torch would copy the whole weight
    with wide_products():
        out = linear(rows)
        return out.view(*x.shape[:-1], out.shape[-1])


def is_multiplied(weight: Tensor) -> bool:
    """Whether the kernels support a weight [N, K]."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0
