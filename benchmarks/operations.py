"""What a piece of work does: its floating point operations as they run, beside the rate of the fastest large matrix
product, for MFU; and torch's own table of its time by operator."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..heads.nn.chain_attention import is_recomputing
from ..train.watching.speed import synchronize
from .store import Figures

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices that measure the rate
TRIALS = 5


class Operations(TorchDispatchMode):
    """Counts floating point operations as they run: of matrix products, convolutions and attention. Attention counts
    for all queries and keys that a kernel is given, masked ones too; elementwise operations do not count.

    total: all. repeated: those that backward recomputes: layers whose activations were not kept, and attention scores.
    torch's own counter is not used: it decomposes some operations, which changes their rounding although a resumed run
    must give the same numbers, and it does not know attention on CPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = self.repeated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet, again = func._overloadpacket, 0
        if packet in ATTENTION:
            count = sum(attention_operations(*args[:3]))
        elif packet in ATTENTION_BACKWARD:  # the scores again, then two gradients of each product
            again, of_values = attention_operations(*args[1:4])
            count = 3 * again + 2 * of_values
        elif packet in flop_registry:
            count = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            return out
        self.total += count
        self.repeated += count if is_recomputing() else again
        return out


ATTENTION_KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
ATTENTION, ATTENTION_BACKWARD = (
    {getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{suffix}") for kind in ATTENTION_KINDS}
    for suffix in ("", "_backward")
)


def attention_operations(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Operations of the scores of queries [B, N, Q, H] and keys [B, Nkv, P, H], and of weighing the values."""
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * pairs * query.shape[-1], 2 * pairs * value.shape[-1]


def matmul_rate(device: torch.device, dtype: torch.dtype, *, trials: int = TRIALS) -> float:
    """Floating point operations per second of the fastest of a few large matrix products."""
    side = SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    fastest = float("inf")
    for _ in range(trials):
        synchronize(device)
        started = time.perf_counter()
        torch.matmul(a, b)
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * side**3 / fastest


def profiled(work: Callable[[], object], device: torch.device, *, top: int = 10) -> Figures:
    """The operators that take longest in themselves, first.

    num_kernels: what a GPU was given to run, copies and fills among them; null on a CPU.
    """
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]) as profiler:
        work()
        synchronize(device)
    events = profiler.key_averages()
    num_kernels = sum(event.count for event in events if event.device_type.name == "CUDA")
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    table = events.table(sort_by=order, row_limit=top, max_name_column_width=100)
    return {"num_kernels": num_kernels if is_cuda else None, "table": table.splitlines()}
