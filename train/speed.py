"""The speed of a run relative to its machine's: operations per step, measured matmul rate, memory."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..heads.nn.chain_attention import is_recomputing

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices that measure the rate
TRIALS = 5
LIMITED = 0.05  # share of the time: a run that waits less for its server is limited by training


@dataclass(frozen=True)
class StepSpeed:
    """The figures of a step that differ between identical runs."""

    tokens_per_second: float  # positions read, over all processes
    mfu: float  # floating point operations per second / `matmul_rate`; recomputation in backward does not count
    data_wait: float  # share of the time in which it waited for data
    peak_bytes: int  # see `peak_bytes`


class Speed:
    """Counts the operations of the first step (target forward, head forward and backward: `Operations`), and scales
    them to other steps by the number of positions."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        """Measures the device's rate, once in a process: milliseconds on a GPU, a quarter of a second on a CPU core."""
        self.device = device
        self.rate = rate_of_process(device, dtype)
        self.per_position: float | None = None

    @contextmanager
    def counted(self, num_positions: int) -> Iterator[None]:
        """Around a step of as many token positions on this device; counts in the first one."""
        if self.per_position is not None:
            yield
            return
        with Operations() as counted:
            yield
        self.per_position = (counted.total - counted.repeated) / num_positions

    def of_step(self, *, num_positions: int, seconds: float, waited: float, num_groups: int) -> StepSpeed:
        """Args:
        num_positions: on this device. seconds: in all. waited: seconds of them waiting for data.
        num_groups: of processes that read rows of their own.
        """
        per_second = (self.per_position or 0.0) * num_positions / seconds
        return StepSpeed(
            tokens_per_second=round(num_positions * num_groups / seconds, 1),
            mfu=round(per_second / self.rate, 4),
            data_wait=round(waited / seconds, 4),
            peak_bytes=peak_bytes(self.device),
        )


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


rate_of_process = cache(matmul_rate)  # measured once


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """The most GPU memory that tensors held so far; on a CPU, the most memory that the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_of(waited: float) -> str:
    """Which side limits a run, in words. Args: waited: share of the time in which it waited for the server, 0..1."""
    side = "training limits" if waited < LIMITED else "the server limits"
    return f"waited for the server {waited:.0%} of the time: {side}"
