"""`make served`: heads and look-ups at 1, 4, 8 and 16 requests at a time, in our engine and in vLLM, in one table.

    python -m headstart.benchmarks.served --vllm-python .venv-vllm/bin/python [--run runs/quickstart ...]

A run is a folder of `make quickstart`: target/, data/DOMAIN.jsonl, and NAME/final of every head that was trained there.
What is measured is kept beside it, in RUN/served; the same command goes on. Writes docs/results/served.json and
served.md. The machine must be quiet.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.files import write_json, write_text

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SIZES = (1, 4, 8, 16)
K, LENGTH = 4, 96
DOMAINS = ("orders", "functions")
VLLM_ARGS = "--max-model-len 1024 --max-num-seqs 16"
PAGE = """# What does a head save in the engine that serves it?

Made by `make served` on {machine}: 12 held-out prompts of the quickstart's domain, {length} tokens, greedy, K {k};
`quickstart` is SmolLM2-135M-Instruct. A cell is tokens/s without drafts -> with them, and the speedup with its 95 %
interval; over fewer than four batches our engine has none. Our engine's speedups leave prefills out, vLLM's hold them.
Only vLLM's column says what vLLM does; its lengths leave out rounds without a draft, of which look-ups have many.

"""
COLUMNS = (
    "| target | drafts | at a time | our engine | vLLM | length, ours | length, vLLM |\n|---|---|---|---|---|---|---|\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", action="append", help="a folder of make quickstart; default: both targets', if there")
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--repeats", default="3")
    told = parser.parse_args()
    given = told.run or ["runs/quickstart", "runs/quickstart-qwen2.5-coder-0.5b-instruct"]
    runs = [Path(run) for run in given if (Path(run) / "target").is_dir()]
    if not runs:
        sys.exit(f"served.py: {' '.join(given)}: no run of make quickstart; run that first")
    entries = [entry for run in runs for entry in measured(run, told.vllm_python, told.repeats)]
    write_json(RESULTS / "served.json", entries)
    write_text(RESULTS / "served.md", PAGE.format(machine=entries[0]["machine"], length=LENGTH, k=K) + table(entries))


def measured(run: Path, python: str, repeats: str) -> list[dict[str, Any]]:
    """An entry per way of drafting and load."""
    drafters = {path.parents[1].name: f"head:{path.parent}@{K}" for path in sorted(run.glob("*/final/config.json"))}
    found = (
        side_by_side(run, name, spec, python, repeats) for name, spec in (drafters | {"ngram": f"ngram@{K}"}).items()
    )
    return [entry for entries in found for entry in entries]


def side_by_side(run: Path, name: str, spec: str, python: str, repeats: str) -> Iterator[dict[str, Any]]:
    """Of a way of drafting, an entry per load."""
    prompts = next(path for domain in DOMAINS if (path := run / "data" / f"{domain}.jsonl").is_file())
    command = ["eval", "--target", str(run / "target"), "--prompts", str(prompts), "--max-new-tokens", str(LENGTH)]
    command += ["--repeats", repeats, "--drafter", spec]
    sizes = [word for size in SIZES for word in ("--batch-size", str(size))]
    loads = [word for size in SIZES for word in ("--concurrency", str(size))]
    ours = report(command + sizes, run / "served" / "headstart" / name)
    vllm = ["--engine", "vllm", "--engine-python", python, "--engine-args", VLLM_ARGS]
    theirs = report(command + loads + vllm, run / "served" / "vllm" / name)
    for mine, its in zip(ours["results"], theirs["served"], strict=True):
        size, accepted = its["load"]["concurrency"], its["acceptance"] or {}
        assert mine["batch_size"] == size
        vllm_figures = {key: its[key] for key in ("speedup", "speedup_ci95")}
        vllm_figures |= {"baseline_tokens_per_second": its["baseline"]["tokens_per_second"]}
        vllm_figures |= {"tokens_per_second": its["drafted"]["tokens_per_second"]}
        vllm_figures |= {"acceptance_length": accepted.get("acceptance_length")}
        what = {"machine": theirs["environment"]["device"], "target": run.name, "drafter": name, "at_a_time": size}
        figures = {"headstart": {key: mine[key] for key in vllm_figures}, "vllm": vllm_figures}
        yield {**what, "num_draft_tokens": K, **figures}


def report(command: list[str], output: Path) -> dict[str, Any]:
    """report.json of a command, which is not run again where it has finished."""
    path = output / "report.json"
    if not path.is_file():
        words = [sys.executable, "-m", "headstart.scripts.cli", *command, "--output", str(output)]
        done = subprocess.run(words)
        if done.returncode not in (0, 1):
            sys.exit(done.returncode)
    return json.loads(path.read_text())


def table(entries: list[dict[str, Any]]) -> str:
    rows = []
    for entry in entries:
        ours, vllm = entry["headstart"], entry["vllm"]
        cells = [entry["target"], entry["drafter"], entry["at_a_time"], cell(ours), cell(vllm)]
        cells += [f"{side['acceptance_length'] or 0:.2f}" for side in (ours, vllm)]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return COLUMNS + "".join(rows)


def cell(side: dict[str, Any]) -> str:
    low, high = side["speedup_ci95"]
    ends = "" if low is None else f" [{low:.2f}, {high:.2f}]"
    return f"{side['baseline_tokens_per_second']:.0f} -> {side['tokens_per_second']:.0f}, {side['speedup']:.2f}{ends}"


if __name__ == "__main__":
    main()
