"""What the engine itself costs on this machine: a target of a given size with random weights, baseline and drafts.

    python -m headstart.benchmarks.engine_bench single|load --output engine.json [--size toy|8b]

Untrained heads draft at the price of trained ones, and that is what is timed. single: baseline steps against the
machine's copy bandwidth, verifying by tokens, drafting by family. load: rounds by batch size and context. A speedup is
measured with SYNTHETIC acceptance: drafts are right at fixed rates. It is compared with what the step times predict.
--size toy runs on a CPU, in seconds, to see that it runs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ..base.errors import BadInput
from ..eval.figures.environment import Environment, device_name
from ..targets.loading import default_device
from .engine_cells import CELLS, MAIN, OTHERS, SIZES, EngineWorkbench, random_target
from .store import CellStore, Figures, describe


def summarize(document: Figures) -> Figures:
    """`figures`: what follows from the cells, of the baseline, of verifying, and of each family whose rounds were
    timed. docs/results/gpu.md says what is asked of a GPU."""
    cells, rows = document["cells"], []
    base = cells.get("baseline", {})
    if "baseline_ms" in base:
        read = base["baseline_gigabytes_per_second"]["median"]
        share = read / document["environment"]["copy_gigabytes_per_second"]
        speed = base["baseline_tokens_per_second"]["median"]
        rows.append({"of": "baseline", "baseline_tokens_per_second": speed, "share_of_copy_bandwidth": round(share, 4)})
    # by tokens per row: a forward over them and what a round has besides, in baseline steps, which read one token
    timed = {name: cell for name, cell in cells.items() if name.startswith("verify ") and "round_ms" in cell}
    if timed:
        costs = {name: cell["verify_in_baseline_steps"]["median"] for name, cell in timed.items()}
        rows.append({"of": "verifying", **costs})
    for family in (MAIN, *OTHERS):
        timed, decoded = cells.get(f"draft {family}", {}), cells.get(f"synthetic {family}")
        if "round_ms" in timed:
            parts = ("draft_in_baseline_steps", "verify_in_baseline_steps", "round_in_baseline_steps", "round_overhead")
            medians = {key: timed[key]["median"] for key in parts}
            rows.append({"of": family, **medians, **({} if decoded is None else predictions(timed, decoded))})
    return {"figures": rows}


def predictions(timed: Figures, decoded: Figures) -> Figures:
    """Measured speedup beside what step times predict: from the given rates, and from the rounds that were decoded.

    The first is acceptance_length * baseline step / round (Leviathan et al. 2023, section 3.3), and its error contains
    the chance of few rounds. The second counts the rounds, and the drafter's reading of the prompts.
    """
    keys = ("predicted_speedup", "prediction_error", "formula_speedup", "speedup_over_formula_error")
    if decoded.get("speedup") is None:
        return {"speedup": None, **dict.fromkeys(keys)}
    step, whole, speedup = timed["baseline_ms"]["median"], timed["round_ms"], decoded["speedup"]
    plain = (decoded["num_tokens"] - decoded["num_prompts"]) * step  # the prefill gives each text's first token
    drafted = decoded["num_rounds"] * whole + decoded["num_prompts"] * timed["reading_ms"]
    predicted, formula = decoded["given_acceptance_length"] * step / whole, plain / drafted
    numbers = (predicted, abs(predicted / speedup - 1), formula, abs(speedup / formula - 1))
    return {"speedup": speedup, **{key: round(value, 4) for key, value in zip(keys, numbers, strict=True)}}


def run(which: str, size_name: str, output: Path, device: torch.device) -> tuple[Figures, int]:
    """Measure what the output lacks; returns the whole document, and the exit code. Raises BadInput."""
    size = SIZES[size_name]
    header = {"measured": which, "size": size_name, "device": device_name(device), "torch": torch.__version__}
    store = CellStore(output, header, summarize)
    cells = CELLS[which](size, "graph" if device.type == "cuda" else "eager")
    if not all(map(store.has, cells)):
        bench = EngineWorkbench(random_target(size, device), size)
        store.document.setdefault("environment", asdict(Environment.of(bench.target)))
        return store.document, store.run(cells, bench.measure)
    return store.document, 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a cell failed otherwise than for memory, 2 on bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", choices=sorted(CELLS))
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to go on with")
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args(arguments)
    try:
        document, code = run(options.cells, options.size, options.output, torch.device(options.device))
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    for row in document["figures"]:
        print(describe(row))
    return code


if __name__ == "__main__":
    sys.exit(main())
