"""What the engine itself costs on this machine: a target of a given shape with random weights, baseline and drafts.

    python -m headstart.scripts.benchmarks.engine_bench --size 8b --output engine.json [--acceptance REPORT.json]
    python -m headstart.scripts.benchmarks.engine_bench --size toy --output engine.json  (CPU, seconds: that it runs)

Untrained heads draft at the price of trained ones, and that is what is timed: baseline steps against the machine's copy
bandwidth, verifying by tokens, drafting by family, and whole rounds by batch size and context. Speedups are measured
with SYNTHETIC acceptance: drafts are right as often as is said, by what a report measured on a real target (the first
greedy chain of the family in it), else by fixed rates, and compared with what the step times predict.

The output is written after each cell. A cell that is in it is not measured again; one that failed is.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...configs.errors import BadInput
from ...eval.report.document import device_name, environment, write_whole
from ...heads.loading import default_device
from ...heads.registry import HEADS
from .engine_cells import MAIN, Cell, Workbench, cells_of
from .engine_shapes import SHAPES, Shape, random_target
from .gpu.bars import Bar, judge

# what is asked of a GPU of the H200 class at 8B shape, batch 1
BARS: dict[str, Bar] = {
    "baseline_tokens_per_second": (">=", 190.0),
    "share_of_copy_bandwidth": (">=", 0.60),
    "verify_in_baseline_steps": ("<=", 1.25),
    "round_overhead": ("<=", 0.05),
    "speedup_over_formula_error": ("<=", 0.10),
}
FIXED_RATES = (0.80, 0.75, 0.70, 0.65, 0.60)  # by draft position; nobody's: about what EAGLE-3 heads are said to reach


def read_acceptance(path: Path | None) -> dict[str, dict[str, Any]]:
    """Of each family `rates`, acceptance by draft position, and `source`, in words. Raises BadInput.

    Args: path: a report.json, for the families of which it has a greedy chain; the rest have FIXED_RATES.
    """
    results: list[dict[str, Any]] = []
    if path is not None:
        try:
            results = json.loads(path.read_text(encoding="utf-8"))["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"--acceptance {path}: no report.json: {type(error).__name__}: {error}") from error
    found = {family: {"rates": list(FIXED_RATES), "source": "fixed, not measured"} for family in HEADS}
    for one in results[::-1]:  # of several, the first stands
        family = one["drafter"].split(":")[0].split("#")[0]
        if family in HEADS and one["engine"] == "headstart" and one["tree"] == "chain" and one["temperature"] == 0:
            reached = [rate for rate in one["acceptance_rate"] if rate is not None]  # a prefix
            source = f"measured: {one['drafter']} on {one['suite']}, batch {one['batch_size']}"
            found[family] = {"rates": reached, "source": source} if reached else found[family]
    return found


def resumed(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The document of an earlier run, or a new one. Raises BadInput where that run was another's."""
    if not path.is_file():
        return {**header, "cells": {}}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: no JSON: {error}: remove it, or name another --output") from error
    for key, value in header.items():
        found = document.get(key) if isinstance(document, dict) else None
        if found != value:
            raise BadInput(f"{path}: measured with {key} {found}, now {value}: remove it, or name another --output")
    return document


def asked(cell: Cell) -> dict[str, Any]:
    """All that a cell's figures depend on, as JSON has it."""
    return json.loads(json.dumps(asdict(cell)))


def is_there(cell: Cell, document: dict[str, Any]) -> bool:
    entry = document["cells"].get(cell.name, {})
    return entry.get("asked") == asked(cell) and "failed" not in entry


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What the bars are about: of the baseline, captured and compiled, and of each family whose rounds were timed."""
    cells, found = document["cells"], []
    for of, name in (("baseline", "baseline"), ("baseline, compiled", f"compile {MAIN}")):
        base = cells.get(name, {})
        if "baseline_ms" in base:
            read = base["baseline_gigabytes_per_second"]["median"]
            share = read / document["environment"]["copy_gigabytes_per_second"]
            speed = base["baseline_tokens_per_second"]["median"]
            found.append({"of": of, "baseline_tokens_per_second": speed, "share_of_copy_bandwidth": round(share, 4)})
    for family in HEADS:
        timed, decoded = cells.get(f"draft {family}", {}), cells.get(f"synthetic {family}", {})
        if "round_ms" not in timed:
            continue
        parts = ("draft_in_baseline_steps", "verify_in_baseline_steps", "round_in_baseline_steps", "round_overhead")
        one = {"of": family, **{key: timed[key]["median"] for key in parts}}
        found.append({**one, **predictions(timed, decoded)})
    return found


def predictions(timed: dict[str, Any], decoded: dict[str, Any]) -> dict[str, Any]:
    """Measured speedup beside what step times predict: from the rates given, and from the rounds that were decoded.

    The first is acceptance_length * baseline step / round (Leviathan et al. 2023, section 3.3), and its error has the
    luck of few rounds in it. The second counts the rounds, and the drafter's reading of the prompts.
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


def other_ways(cells: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Times of a baseline step and a round, eager and compiled, over those of captured graphs; none that is missing."""
    graph, found = cells.get(f"draft {MAIN}", {}), {}
    for way in ("eager", "compile"):
        other = cells.get(f"{way} {MAIN}", {})
        if "round_ms" in graph and "round_ms" in other:
            base = other["baseline_ms"]["median"] / graph["baseline_ms"]["median"]
            found[way] = {"baseline": round(base, 4), "round": round(other["round_ms"] / graph["round_ms"], 4)}
    return found


def verify_costs(cells: dict[str, Any]) -> dict[str, float]:
    """By tokens per row: a forward over them and what a round has besides, in baseline steps, which read one."""
    found = {name.split()[1]: entry for name, entry in cells.items() if name.startswith("verify ")}
    costs = {number: one["verify_in_baseline_steps"] for number, one in found.items() if "round_ms" in one}
    return {"1": 1.0, **{number: one["median"] for number, one in costs.items()}}


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what follows from its cells."""
    found = figures(document)
    return {
        **document,
        "bars": {name: " ".join(map(str, bar)) for name, bar in BARS.items()},
        "figures": found,
        "verify_in_baseline_steps": verify_costs(document["cells"]),
        "over_captured_graphs": other_ways(document["cells"]),
        "holds": {one["of"]: judge(one, BARS) for one in found},
    }


def words(entry: dict[str, Any]) -> str:
    """A cell in a line."""
    for key in ("left_out", "failed"):
        if key in entry:
            return f"{key.replace('_', ' ')}: {entry[key]}"
    if entry.get("speedup") is not None:
        return f"speedup {entry['speedup']:.2f}, synthetic acceptance length {entry['acceptance_length']:.2f}"
    speed = entry["baseline_tokens_per_second"]["median"]
    line = f"baseline {entry['baseline_ms']['median']:.2f} ms, {speed:.0f} tokens/s"
    if "round_ms" in entry:
        parts = ", ".join(f"{key} {entry[f'{key}_ms']:.2f}" for key in ("draft", "verify", "overhead"))
        line += f"; round {entry['round_in_baseline_steps']['median']:.2f} of it ({parts})"
    return line


def run(size: str, shape: Shape, output: Path, device: torch.device, acceptance: Path | None) -> dict[str, Any]:
    """Measure what the output lacks; returns the whole document. Raises BadInput."""
    started = time.perf_counter()
    accepted = read_acceptance(acceptance)
    header = {"size": size, "shape": asdict(shape), "device": device_name(device), "torch": torch.__version__}
    document = resumed(output, json.loads(json.dumps(header)))
    rates = {family: one["rates"] for family, one in accepted.items()}
    cells = cells_of(shape, "graph" if device.type == "cuda" else "eager", rates)
    missing = [cell for cell in cells if not is_there(cell, document)]
    print(f"{len(missing)} of {len(cells)} cells to measure on {header['device']}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    bench = Workbench(random_target(shape, device), shape) if missing else None
    for cell in missing:
        assert bench is not None
        if "environment" not in document:
            document["environment"] = environment(bench.target)
        begun = time.perf_counter()
        entry = bench.attempt(cell)
        seconds = time.perf_counter() - begun
        document["cells"][cell.name] = {"asked": asked(cell), "seconds": round(seconds, 2), **entry}
        document["acceptance"] = {"synthetic": True, **accepted}
        document = judged(document)
        write_whole(output, json.dumps(document, indent=2) + "\n")
        print(f"[{time.perf_counter() - started:4.0f} s] {cell.name}: {words(entry)} ({seconds:.1f} s)", flush=True)
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a cell failed otherwise than for memory, 2 on bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SHAPES), default="toy")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write, or to go on with")
    parser.add_argument(
        "--acceptance", type=Path, metavar="REPORT.json", help="rates of synthetic acceptance, by family"
    )
    parser.add_argument("--device", default=default_device())
    options = parser.parse_args(arguments)
    try:
        document = run(
            options.size, SHAPES[options.size], options.output, torch.device(options.device), options.acceptance
        )
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    print("bars, asked of an H200 at 8B shape:")
    for of, held in document["holds"].items():
        for name, holds in held.items():
            value = next(one[name] for one in document["figures"] if one["of"] == of)
            print(f"{'holds ' if holds else 'MISSED'} {of}: {name} {value}, bar {document['bars'][name]}")
    failed = [entry["failed"] for entry in document["cells"].values() if "failed" in entry]
    return 1 if any("out of memory" not in reason.lower() for reason in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
