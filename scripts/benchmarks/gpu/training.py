"""What training costs at 8B shape on this machine: speed, memory, torch.compile, and where the time goes.

    python -m headstart.scripts.benchmarks.gpu.training --size 8b --output training.json     (one GPU, under 9 minutes)
    python -m headstart.scripts.benchmarks.gpu.training --size toy --output training.json  (CPU, seconds: that it runs)

A random Llama-shaped target and random rows: a step costs the same whatever they hold. Each cell is written as it is
measured; the same command goes on behind the last one that is there.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .... import __version__
from ....configs.errors import BadInput, first_line
from ....eval.report.document import device_name, write_whole
from ....heads.loading import default_device, release_memory
from ..bench_train import DEPTHS, LARGE
from ..step_memory import Shape
from ..step_speed import DEFINITIONS, TrainingStep

FAMILIES = ("eagle3", "mtp", "medusa")


@dataclass(frozen=True, kw_only=True)
class Size:
    """shape: where compile is on and off, steps are profiled and bars are judged. contexts, vocabularies: all that are
    measured. compiled: families that are, with train.compile. steps: timed ones of a cell."""

    shape: Shape
    contexts: tuple[int, ...]
    vocabularies: tuple[int, ...]
    draft_vocabulary: int
    compiled: tuple[str, ...]
    steps: int


TOY = Shape(
    head="eagle3",
    hidden=64,
    intermediate=172,
    num_heads=8,
    num_kv_heads=4,
    vocabulary=512,
    context=64,
)
SIZES = {
    "toy": Size(shape=TOY, contexts=(64, 32), vocabularies=(512,), draft_vocabulary=128, compiled=("medusa",), steps=2),
    "8b": Size(
        shape=LARGE,
        contexts=(4096, 2048, 8192),
        vocabularies=(152064, 128256),
        draft_vocabulary=32000,
        compiled=FAMILIES,
        steps=5,
    ),
}

# what is asked of EAGLE-3 with 7 depths at 8B shape, one row of 4096 tokens, the whole vocabulary of 152,064
BARS = {"mfu": (">=", 0.40), "peak_bytes": ("<=", 20e9)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape, with train.compile or without."""

    shape: Shape
    is_compiled: bool = False

    @property
    def name(self) -> dict[str, Any]:
        """What tells it from the others of its size."""
        said = ("head", "depths", "context", "vocabulary", "draft_vocabulary", "options")
        return {**{key: getattr(self.shape, key) for key in said}, "is_compiled": self.is_compiled}

    def __str__(self) -> str:
        shape = self.shape
        cut = f" of which {shape.draft_vocabulary} drafted" if shape.draft_vocabulary else ""
        options = "".join(f", {key} {value}" for key, value in shape.options.items())
        how = ", compiled" if self.is_compiled else ""
        return f"{shape.head}, {shape.depths} depths{options}, T {shape.context}, V {shape.vocabulary}{cut}{how}"


def firsts_of(size: Size) -> list[Shape]:
    """One of each family, where compile, bars and profiles are."""
    # an output layer of its own per depth has as many weights as the target's body
    options = {"medusa": {"output": "shared"}}
    return [replace(size.shape, head=head, depths=DEPTHS[head], options=options.get(head, {})) for head in FAMILIES]


def cells_of(size: Size) -> Iterator[Cell]:
    """All that is measured, the most important first."""
    firsts = firsts_of(size)
    for shape in firsts:
        yield Cell(shape=shape)
        if shape.head in size.compiled:
            yield Cell(shape=shape, is_compiled=True)
    for shape in firsts:
        for context in size.contexts:
            for vocabulary in size.vocabularies:
                for cut in (None, size.draft_vocabulary) if shape.head == "eagle3" else (None,):
                    one = replace(shape, context=context, vocabulary=vocabulary, draft_vocabulary=cut)
                    if one != shape:
                        yield Cell(shape=one)
    yield Cell(shape=replace(firsts[-1], options={"output": "own"}))


def measured(cell: Cell, device: str, steps: int) -> dict[str, Any]:
    return TrainingStep(cell.shape, device=device, is_compiled=cell.is_compiled).measure(steps=steps)


def profiled(cell: Cell, device: str) -> dict[str, Any]:
    """The profile of the third step."""
    step = TrainingStep(cell.shape, device=device, is_compiled=cell.is_compiled)
    step()
    step()
    return step.profile()


def attempt(work: Callable[..., dict[str, Any]], cell: Cell, *how: Any) -> dict[str, Any]:
    """What work(cell, ...) found, with its status: measured, out of memory, or failed, where torch.compile did."""
    try:
        return {"status": "measured", **work(cell, *how)}
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except Exception as error:  # whatever torch.compile raises
        if not cell.is_compiled:
            raise
        return {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"}


def judge(size: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Each bar, what was found with compile off and on, and whether the better of both holds it; null at another size
    than 8b or where nothing was measured."""
    first = Cell(shape=firsts_of(SIZES[size])[0])
    found: dict[bool, Any] = {
        cell["is_compiled"]: cell
        for cell in cells
        if {**first.name, "is_compiled": cell["is_compiled"]} == {key: cell[key] for key in first.name}
    }
    judged = {}
    for name, (way, bar) in BARS.items():
        values = {key: found.get(on, {}).get(name) for key, on in (("plain", False), ("compiled", True))}
        known = [value for value in values.values() if value is not None]
        holds = None
        if size == "8b" and known:
            holds = max(known) >= bar if way == ">=" else min(known) <= bar
        judged[name] = {"bar": f"{way} {bar:g}", "cell": str(first), **values, "holds": holds}
    return judged


def begin(path: Path, *, size: str, device: str) -> dict[str, Any]:
    """The document to go on with. Raises BadInput where the file holds another run."""
    document: dict[str, Any] = {
        "size": size,
        "device": device_name(torch.device(device)),
        "environment": {
            "headstart": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "definitions": DEFINITIONS,
        "cells": [],
        "profiles": [],
        "bars": {},
    }
    if not path.is_file():
        return document
    try:
        before = json.loads(path.read_text())
        was = (before["size"], before["device"])
        lists = (before["cells"], before["profiles"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a file of this bench: {first_line(error)}; choose another --output") from error
    if was != (size, document["device"]):
        now = f"this is size {size} on {document['device']}"
        raise BadInput(f"{path}: of size {was[0]} on {was[1]}, {now}; choose another --output")
    return {**document, "cells": lists[0], "profiles": lists[1]}


def line_of(cell: Cell, found: dict[str, Any]) -> str:
    if found["status"] != "measured":
        return f"{cell}: {found['status']} {found.get('reason', '')}".rstrip()
    peak = "" if found["peak_bytes"] is None else f", {found['peak_bytes'] / 1e9:.2f} GB"
    return (
        f"{cell}: {found['tokens_per_second']:,.0f} tokens/s, {found['step_ms']:.1f} ms ({found['step_ms_min']:.1f} to "
        f"{found['step_ms_max']:.1f}), MFU {found['mfu']:.1%}, HFU {found['hfu']:.1%}{peak}"
    )


def table_of(cell: Cell, found: dict[str, Any]) -> Table:
    kernels = "" if found["num_kernels"] is None else f", {found['num_kernels']} kernels"
    table = Table(title=f"{cell}: {found['total_ms']:.1f} ms{kernels}", title_justify="left")
    for name in ("operator", "calls", "ms", "share"):
        table.add_column(name, justify="left" if name == "operator" else "right")
    for row in found["rows"]:
        table.add_row(row["name"], str(row["calls"]), f"{row['ms']:.2f}", f"{row['share']:.1%}")
    table.add_row("all others", "", f"{found['rest_ms']:.2f}", "")
    return table


def run(path: Path, *, size: str, device: str, console: Console) -> dict[str, Any]:
    """Measure what the file does not hold yet; the document."""
    document, config = begin(path, size=size, device=device), SIZES[size]
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(kind: str, cell: Cell, found: dict[str, Any]) -> None:
        release_memory()
        document[kind].append({**cell.name, **found})
        document["bars"] = judge(size, document["cells"])
        write_whole(path, json.dumps(document, indent=1) + "\n")

    def is_there(kind: str, cell: Cell) -> bool:
        return any(cell.name == {key: one.get(key) for key in cell.name} for one in document[kind])

    for cell in cells_of(config):
        if not is_there("cells", cell):
            found = attempt(measured, cell, device, config.steps)
            keep("cells", cell, found)
            console.print(line_of(cell, found), highlight=False, soft_wrap=True)
        if cell.shape in firsts_of(config) and not is_there("profiles", cell):
            found = attempt(profiled, cell, device)
            keep("profiles", cell, found)
            shown = table_of(cell, found) if "rows" in found else f"profile of {line_of(cell, found)}"
            console.print(shown, highlight=False, soft_wrap=True)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write or to go on with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=str(default_device()))
    options = parser.parse_args()
    console = Console()
    try:
        document = run(options.output, size=options.size, device=options.device, console=console)
    except BadInput as error:
        parser.exit(2, f"gpu_training: {error}\n")
    for name, one in document["bars"].items():
        console.print(f"{name} {one['bar']}: {one['plain']}, compiled {one['compiled']}: holds {one['holds']}")


if __name__ == "__main__":
    main()
