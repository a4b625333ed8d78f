"""`make bench-train`: what a training step costs by head and shape, in tokens per second, memory and matrix products.

    python -m headstart.scripts.benchmarks.bench_train [--device cuda] [--steps 5] [--output docs/results/train.json]

Random targets and rows: a step costs the same whatever the weights are. The target's own forward is left aside, its
states being given. On a GPU shapes are those of heads on an 8B target, on a CPU small ones; the memory of EAGLE-3 at 8B
shape is estimated either way.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...heads.loading import default_device
from ...heads.registry import HEADS
from .step_memory import Shape, estimated_peak
from .step_speed import TrainingStep

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


def bench(shape: Shape, *, device: str, steps: int) -> dict[str, Any]:
    """One entry of the results."""
    found = TrainingStep(shape, device=device).measure(steps=steps)
    rate = found["matmul_flops_per_second"] / found["step_flops"]  # steps per second, were all of it plain products
    return entry(
        shape,
        device=torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        **found,
        roofline_tokens_per_second=round(shape.batch_size * shape.context * rate, 1),
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
