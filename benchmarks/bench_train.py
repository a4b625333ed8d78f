"""`make bench-train`: what a training step costs by head and shape, in tokens per second, memory and matrix products.

    python -m headstart.benchmarks.bench_train [--size small|8b|toy] [--output docs/results/train.json]

Random targets and rows: a step costs the same whatever the weights are. The target's own forward is left aside, its
states being given. small, the default on a CPU, has every family at one shape, and the memory of EAGLE-3 at 8B shape by
estimate. 8b, that of a GPU, takes five minutes: EAGLE-3, DSpark, Medusa and MTP by context, each with train.compile and
without, and where a step's time goes. toy is the same on a CPU.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..base.errors import BadInput
from ..engines.heads import HEADS
from ..eval.figures.environment import device_name
from ..targets.loading import default_device
from . import store
from .store import CellStore, Figures
from .training_step import Shape, TrainingStep, estimated_peak

RESULTS = Path("docs/results/train.json")
TOY = Shape(head="eagle3", hidden=64, intermediate=172, num_heads=8, num_kv_heads=4, vocabulary=512, context=64)
SMALL = replace(TOY, hidden=256, intermediate=704, vocabulary=4096, context=256, batch_size=4)
LARGE = replace(TOY, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, vocabulary=152064, context=4096)
LARGE = replace(LARGE, dtype="bf16")
SERVED = ("eagle3", "block", "medusa", "mtp")  # the families of 8b


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """What is measured."""

    shape: Shape
    heads: Sequence[str]  # families at the shape's context
    swept: Sequence[str] = ()  # those at the other contexts
    contexts: Sequence[int] = ()
    draft_vocabulary: int | None = None  # of EAGLE-3, beside the whole one
    is_compiled: bool = False  # all of it with train.compile, too, and EAGLE-3's step by operator
    is_estimated: bool = False  # the memory of EAGLE-3 at 8B shape, too
    steps: int = 5  # timed ones of a cell


SIZES = {
    "toy": StepSize(
        shape=TOY, heads=("eagle3",), swept=SERVED, contexts=(32,), draft_vocabulary=128, is_compiled=True, steps=2
    ),
    "8b": StepSize(
        shape=LARGE, heads=("eagle3",), swept=SERVED, contexts=(2048, 8192), draft_vocabulary=32000, is_compiled=True,
        steps=3,
    ),
    "small": StepSize(shape=SMALL, heads=sorted(HEADS), is_estimated=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepCell(store.BenchedCell):
    """A step of one shape. what: `step`, timed; `profile`, its third one by operator; `estimate`, of its memory."""

    shape: Shape
    what: str = "step"
    is_compiled: bool = False
    num_steps: int = 0


def cell_of(shape: Shape, *, what: str = "step", is_compiled: bool = False, num_steps: int = 0) -> StepCell:
    """A cell and its name."""
    options = "".join(f", {key} {value}" for key, value in shape.options.items())
    drafted = f" of which {shape.draft_vocabulary} drafted" if shape.draft_vocabulary else ""
    name = f"{shape.head}, {shape.depths} depths{options}, T {shape.context}, V {shape.vocabulary}{drafted}"
    name = {"step": "", "profile": "profile of ", "estimate": "estimate of "}[what] + name + ", compiled" * is_compiled
    return StepCell(name=name, shape=shape, what=what, is_compiled=is_compiled, num_steps=num_steps)


def shape_of(size: StepSize, head: str) -> Shape:
    """A family's shape where compile, bars and profiles are."""
    config = HEADS[head].config_class(type=head)
    # at 8B shape an output layer of its own per depth has as many weights as the target's body
    is_shared = size.shape is not SMALL and getattr(config, "output", "") == "own"
    options = {"output": "shared"} if is_shared else {}
    return replace(size.shape, head=head, depths=config.num_depths, options=options)


def cells_of(size: StepSize) -> Iterator[StepCell]:
    """All cells to measure, in order of importance."""
    for head in size.heads:
        yield from step_cells(size, shape_of(size, head))
    if size.is_compiled:
        for is_compiled in (False, True):
            yield cell_of(shape_of(size, "eagle3"), what="profile", is_compiled=is_compiled)
    for context in size.contexts:
        for head in size.swept:
            yield from step_cells(size, replace(shape_of(size, head), context=context))
    if size.is_estimated:
        for drafted in (32000, None):
            yield cell_of(replace(LARGE, draft_vocabulary=drafted), what="estimate")


def step_cells(size: StepSize, shape: Shape) -> Iterator[StepCell]:
    """A shape's timed steps, of EAGLE-3 also with a cut draft vocabulary."""
    cut = [size.draft_vocabulary] if shape.head == "eagle3" and size.draft_vocabulary else []
    for drafted in (None, *cut):
        for is_compiled in (False, True) if size.is_compiled else (False,):
            each = replace(shape, draft_vocabulary=drafted)
            yield cell_of(each, is_compiled=is_compiled, num_steps=size.steps)


def measure(cell: StepCell, device: str) -> Figures:
    """The figures of a cell."""
    if cell.what == "estimate":
        return {"peak_bytes": estimated_peak(cell.shape)}
    step = TrainingStep(cell.shape, device=device, is_compiled=cell.is_compiled)
    if cell.what == "profile":
        step()
        step()
        return step.profile()
    figures = step.measure(steps=cell.num_steps)
    rate = figures["matmul_flops_per_second"] / figures["step_flops"]  # steps per second, were all of it plain products
    tokens = cell.shape.batch_size * cell.shape.context
    return {**figures, "roofline_tokens_per_second": round(tokens * rate, 1)}


def run(path: Path, *, size: str, device: str) -> tuple[Figures, int]:
    """Measure what the file lacks, of small all of it; the document, and the exit code.

    Raises: BadInput if the file holds another run.
    """
    header = {"size": size, "device": device_name(torch.device(device)), "torch": torch.__version__}
    results = CellStore(path, header, is_new=SIZES[size].is_estimated)
    results.document.setdefault("num_threads", torch.get_num_threads())
    code = results.run(list(cells_of(SIZES[size])), lambda cell: measure(cell, device))
    return results.document, code


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a cell failed otherwise than for memory, 2 on bad input."""
    parser = argparse.ArgumentParser(description="What a training step costs.")
    parser.add_argument("--size", choices=sorted(SIZES), help="[default: small on a CPU, 8b on a GPU]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument(
        "--output", type=Path, help="JSON file to write, or to go on with [default: train.json of small]"
    )
    options = parser.parse_args(arguments)
    size = options.size or ("small" if options.device == "cpu" else "8b")
    output = options.output or (RESULTS if size == "small" else RESULTS.with_name(f"train_{size}.json"))
    try:
        return run(output, size=size, device=options.device)[1]
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
