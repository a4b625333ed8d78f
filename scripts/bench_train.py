"""`make bench-train`: what a training step costs by head and shape, in tokens per second, memory and matrix products.

    python -m headstart.scripts.bench_train [--device cuda] [--steps 5] [--output docs/results/train.json]

Random targets and rows: a step costs the same whatever the weights are. The target's own forward is left aside, its
states being given. On a GPU shapes are those of heads on an 8B target, on a CPU small ones; the memory of EAGLE-3 at 8B
shape is estimated either way.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..heads.loading import default_device
from ..heads.registry import HEADS
from ..train.speed import matmul_rate
from .step_memory import Shape, build_step, estimated_peak, peak_bytes, run_step

RESULTS = Path("docs/results/train.json")
SMALL = Shape(
    head="eagle3",
    hidden=256,
    intermediate=704,
    num_heads=8,
    num_kv_heads=4,
    vocabulary=4096,
    context=256,
    batch_size=4,
)
LARGE = Shape(
    head="eagle3",
    hidden=4096,
    intermediate=14336,
    num_heads=32,
    num_kv_heads=8,
    vocabulary=152064,
    context=4096,
    dtype="bf16",
)
DEPTHS = {"medusa": 4, "hydra": 4, "mtp": 3, "draft_lm": 5, "eagle": 5, "eagle3": 7}


class Products(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, in forward and backward; torch's own counter follows
    modules through the graph, which gradients taken within a forward do not allow."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def timed(work: Any, device: str) -> float:
    """Seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bench(shape: Shape, *, device: str, steps: int) -> dict[str, Any]:
    """One entry of the results. mfu: the step's matrix products against what the machine made of plain ones meanwhile;
    attention scores do not count as work."""
    head, batch = build_step(shape, device=device)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        run_step(head, batch, dtype=shape.dtype)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Products() as counter:
        run_step(head, batch, dtype=shape.dtype)
    optimizer.zero_grad()
    seconds, rates = [], []
    kind = torch.bfloat16 if shape.dtype == "bf16" else torch.float32
    for _ in range(steps):
        rates.append(matmul_rate(torch.device(device), kind))
        seconds.append(timed(step, device))
    if device == "cuda":
        before = sum(x.numel() * x.element_size() for x in (*head.target.model.parameters(), batch.output.features))
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        peak = peak_bytes(head, batch, dtype=shape.dtype)
    typical = statistics.median(seconds)
    rate = statistics.median(rates)
    work = counter.flops
    return entry(
        shape,
        device=torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        tokens_per_second=round(shape.batch_size * shape.context / typical, 1),
        peak_bytes=peak,
        step_flops=work,
        matmul_flops_per_second=round(rate),
        roofline_tokens_per_second=round(shape.batch_size * shape.context * rate / work, 1),
        mfu=round(work / typical / rate, 3),
    )


def estimate(shape: Shape) -> dict[str, Any]:
    """An entry of memory alone, of a GPU that need not be there."""
    unknown = {"tokens_per_second": None, "step_flops": None, "matmul_flops_per_second": None}
    unknown |= {"roofline_tokens_per_second": None, "mfu": None}
    return entry(shape, device="estimated", peak_bytes=estimated_peak(shape), **unknown)


def entry(shape: Shape, **measured: Any) -> dict[str, Any]:
    said = ("head", "batch_size", "context", "hidden", "vocabulary", "draft_vocabulary", "depths", "dtype")
    return {"device": measured.pop("device"), **{key: getattr(shape, key) for key in said}, **measured}


def shapes_for(device: str, heads: Sequence[str]) -> list[Shape]:
    """Every family at one size; on a GPU, several contexts of EAGLE-3 more."""
    first = SMALL if device == "cpu" else replace(LARGE, draft_vocabulary=32000)
    shapes = []
    for name in heads:
        cut = first.draft_vocabulary if name == "eagle3" else None
        # at 8B shape an output layer of its own per depth has as many weights as the target's body
        options = {"output": "shared"} if device != "cpu" and name in ("medusa", "hydra") else {}
        shapes.append(replace(first, head=name, depths=DEPTHS[name], draft_vocabulary=cut, options=options))
    if device != "cpu" and "eagle3" in heads:
        shapes += [replace(first, context=context) for context in (2048, 8192)]
    return shapes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a training step costs.")
    parser.add_argument("--device", default=str(default_device()), help="cpu or cuda; the GPU where there is one")
    parser.add_argument("--heads", nargs="+", choices=sorted(HEADS), default=sorted(HEADS))
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each head, the median of which counts")
    parser.add_argument("--output", type=Path, default=RESULTS)
    said, console = parser.parse_args(arguments), Console(stderr=True)
    device = torch.device(said.device).type
    said.output.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    for shape in shapes_for(device, said.heads):
        entries.append(bench(shape, device=device, steps=said.steps))
        said.output.write_text(json.dumps(entries, indent=1) + "\n")
        one = entries[-1]
        console.print(
            f"{shape.head} {shape.batch_size} x {shape.context}, {shape.depths} depths, {shape.dtype}: "
            f"{one['tokens_per_second']} tokens/s, {one['peak_bytes'] / 1e6:.0f} MB; {one['step_flops'] / 1e9:.1f} "
            f"GFLOP a step, {one['mfu']:.0%} of {one['matmul_flops_per_second'] / 1e9:.0f} GFLOP/s"
        )
    for size in (32000, None):
        entries.append(estimate(replace(LARGE, draft_vocabulary=size)))
        said.output.write_text(json.dumps(entries, indent=1) + "\n")
        peak = entries[-1]["peak_bytes"] / 1e9
        console.print(f"eagle3 at 8B shape, draft vocabulary {size or 'whole'}: {peak:.1f} GB, estimated")


if __name__ == "__main__":
    main()
