"""What the engine itself costs on this machine: a target of a given size with random weights, baseline and drafts.

    python -m headstart.scripts.benchmarks.engine_bench --size 8b --output engine.json [--acceptance REPORT.json]
    python -m headstart.scripts.benchmarks.engine_bench --size toy --output engine.json  (CPU, seconds: that it runs)

Untrained heads draft at the price of trained ones, and that is what is timed: baseline steps against the machine's copy
bandwidth, verifying by tokens, drafting by family, and whole rounds by batch size and context. Speedups are measured
with SYNTHETIC acceptance: drafts are right at the rates that a report measured on a real target (the first greedy chain
of the family in it), else at fixed rates, and compared with what the step times predict.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ...configs.errors import BadInput
from ...eval.measurement.environment import Environment, device_name
from ...eval.report.document import read_report
from ...heads.loading import default_device
from ...heads.registry import HEADS
from .engine_cells import MAIN, SIZES, Workbench, cells_of, random_target
from .store import CellStore, Figures, judge

# what is asked of a GPU of the H200 class at 8B shape, batch 1
BARS = {
    "baseline_tokens_per_second": (">=", 190.0),
    "share_of_copy_bandwidth": (">=", 0.60),
    "verify_in_baseline_steps": ("<=", 1.25),
    "round_overhead": ("<=", 0.05),
    "speedup_over_formula_error": ("<=", 0.10),
}
FIXED_RATES = (0.80, 0.75, 0.70, 0.65, 0.60)  # by draft position: about what is published of EAGLE-3 heads


def read_acceptance(path: Path | None) -> dict[str, Figures]:
    """Of each family `rates`, acceptance by draft position, and `source`, in words. Raises BadInput.

    Args: path: a report.json, for the families of which it has a greedy chain; the rest have FIXED_RATES.
    """
    results = read_report(path).results if path is not None else []
    accepted: dict[str, Figures] = {
        family: {"rates": list(FIXED_RATES), "source": "fixed, not measured"} for family in HEADS
    }
    for result in reversed(results):  # of several, the first counts
        family = result.drafter.split(":")[0].split("#")[0]
        is_greedy_chain = (result.engine, result.tree, result.temperature) == ("headstart", "chain", 0)
        rates = [rate for rate in result.acceptance_rate if rate is not None]  # a prefix
        if family in HEADS and is_greedy_chain and rates:
            source = f"measured: {result.drafter} on {result.suite}, batch {result.batch_size}"
            accepted[family] = {"rates": rates, "source": source}
    return accepted


def summarize(document: Figures) -> Figures:
    """What follows from the cells of a document, and which bars are held."""
    figures = bar_figures(document)
    return {
        "bars": {name: " ".join(map(str, bar)) for name, bar in BARS.items()},
        "figures": figures,
        "verify_in_baseline_steps": verify_costs(document["cells"]),
        "over_captured_graphs": over_captured_graphs(document["cells"]),
        "holds": {row["of"]: judge(row, BARS) for row in figures},
    }


def bar_figures(document: Figures) -> list[Figures]:
    """What the bars are about: of the baseline, captured and compiled, and of each family whose rounds were timed."""
    cells, rows = document["cells"], []
    for of, name in (("baseline", "baseline"), ("baseline, compiled", f"compile {MAIN}")):
        base = cells.get(name, {})
        if "baseline_ms" in base:
            read = base["baseline_gigabytes_per_second"]["median"]
            share = read / document["environment"]["copy_gigabytes_per_second"]
            speed = base["baseline_tokens_per_second"]["median"]
            rows.append({"of": of, "baseline_tokens_per_second": speed, "share_of_copy_bandwidth": round(share, 4)})
    for family in HEADS:
        timed, decoded = cells.get(f"draft {family}", {}), cells.get(f"synthetic {family}", {})
        if "round_ms" in timed:
            parts = ("draft_in_baseline_steps", "verify_in_baseline_steps", "round_in_baseline_steps", "round_overhead")
            medians = {key: timed[key]["median"] for key in parts}
            rows.append({"of": family, **medians, **predictions(timed, decoded)})
    return rows


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


def over_captured_graphs(cells: Figures) -> Figures:
    """Times of a baseline step and a round, eager and compiled, over those of captured graphs, where measured."""
    graph, ratios = cells.get(f"draft {MAIN}", {}), {}
    for steps in ("eager", "compile"):
        other = cells.get(f"{steps} {MAIN}", {})
        if "round_ms" in graph and "round_ms" in other:
            base = other["baseline_ms"]["median"] / graph["baseline_ms"]["median"]
            ratios[steps] = {"baseline": round(base, 4), "round": round(other["round_ms"] / graph["round_ms"], 4)}
    return ratios


def verify_costs(cells: Figures) -> dict[str, float]:
    """By tokens per row: a forward over them and what a round has besides, in baseline steps, which read one token."""
    timed = {name.split()[1]: cell for name, cell in cells.items() if name.startswith("verify ") and "round_ms" in cell}
    return {"1": 1.0, **{number: cell["verify_in_baseline_steps"]["median"] for number, cell in timed.items()}}


def run(size_name: str, output: Path, device: torch.device, acceptance: Path | None) -> tuple[Figures, int]:
    """Measure what the output lacks; returns the whole document, and the exit code. Raises BadInput."""
    size, accepted = SIZES[size_name], read_acceptance(acceptance)
    header = {"size": size_name, "device": device_name(device), "torch": torch.__version__}
    store = CellStore(output, header, summarize)
    rates = {family: each["rates"] for family, each in accepted.items()}
    cells = cells_of(size, "graph" if device.type == "cuda" else "eager", rates)
    if not all(map(store.has, cells)):
        bench = Workbench(random_target(size, device), size)
        store.document.setdefault("environment", asdict(Environment.of(bench.target)))
        store.document["acceptance"] = {"synthetic": True, **accepted}
        return store.document, store.run(cells, bench.measure)
    return store.document, 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a cell failed otherwise than for memory, 2 on bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to go on with")
    parser.add_argument(
        "--acceptance", type=Path, metavar="REPORT.json", help="rates of synthetic acceptance, by family"
    )
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args(arguments)
    try:
        document, code = run(options.size, options.output, torch.device(options.device), options.acceptance)
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    print("bars, asked of an H200 at 8B shape:")
    for row in document["figures"]:
        for name, holds in document["holds"][row["of"]].items():
            print(f"{'holds ' if holds else 'MISSED'} {row['of']}: {name} {row[name]}, bar {document['bars'][name]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
