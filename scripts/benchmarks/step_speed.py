"""How long a training step takes at a shape, how much of the machine it uses, and where the time goes.

A step is loss, backward and AdamW on random rows; the target's own forward is left aside, its states being given.
docs/results/train.md defines the figures.
"""

import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from ...heads.nn.fusing import fused
from ...train.speed import Operations, matmul_rate, synchronize
from .step_memory import Shape, build_step, peak_bytes, run_step
from .store import Figures


class TrainingStep:
    """A head of a shape, its optimizer and a batch; each call is one step.

    is_compiled: with train.compile. On a CPU the memory of such a step is not seen.
    """

    def __init__(self, shape: Shape, *, device: str, is_compiled: bool = False):
        self.shape, self.device, self.is_compiled = shape, torch.device(device), is_compiled
        self.head, self.batch = build_step(shape, device=device)
        trained = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def __call__(self) -> None:
        with fused(self.is_compiled):
            run_step(self.head, self.batch, dtype=self.shape.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> float:
        """Of one step."""
        synchronize(self.device)
        start = time.perf_counter()
        self()
        synchronize(self.device)
        return time.perf_counter() - start

    def measure(self, *, steps: int) -> Figures:
        """Figures of so many timed steps behind two others."""
        shape, seconds, rates = self.shape, [], []
        first = self.seconds()
        with Operations() as counted:
            self()
        kind = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
        for _ in range(steps):
            rates.append(matmul_rate(self.device, kind, trials=1))
            seconds.append(self.seconds())
        typical, rate = statistics.median(seconds), max(rates)
        own = counted.total - counted.repeated
        return {
            "tokens_per_second": round(shape.batch_size * shape.context / typical, 1),
            "step_ms": round(1e3 * typical, 3),
            "step_ms_min": round(1e3 * min(seconds), 3),
            "step_ms_max": round(1e3 * max(seconds), 3),
            "num_steps": steps,
            "first_step_seconds": round(first, 2),
            "peak_bytes": self.peak(),
            "step_flops": own,
            "repeated_flops": counted.repeated,
            "matmul_flops_per_second": round(rate),
            "mfu": round(own / typical / rate, 3),
            "hfu": round(counted.total / typical / rate, 3),
        }

    def peak(self) -> int | None:
        """Most bytes at once in a step."""
        if self.device.type != "cuda":
            return None if self.is_compiled else peak_bytes(self.head, self.batch, dtype=self.shape.dtype)
        batch, model = self.batch, self.head.target.model
        aside = (*model.parameters(), batch.input_ids, batch.loss_mask, batch.output.features, batch.output.post_norm)
        torch.cuda.reset_peak_memory_stats()
        self()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - sum(tensor.nbytes for tensor in aside)

    def profile(self, *, top: int = 15) -> Figures:
        """One step by operator, those that take longest in themselves first: torch's own table.

        num_kernels: what a GPU was given to run, copies and fills among them; null on a CPU.
        """
        is_cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]) as profiler:
            self()
            synchronize(self.device)
        events = profiler.key_averages()
        num_kernels = sum(event.count for event in events if event.device_type.name == "CUDA")
        order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
        table = events.table(sort_by=order, row_limit=top, max_name_column_width=60)
        return {"num_kernels": num_kernels if is_cuda else None, "table": table.splitlines()}
