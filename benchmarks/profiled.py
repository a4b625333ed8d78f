"""Where the time of a piece of work goes: torch's own table by operator, and how many kernels a GPU was given."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from ..train.watching.speed import synchronize
from .store import Figures


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
