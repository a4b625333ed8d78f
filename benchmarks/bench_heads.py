"""`make bench-heads`: every family of heads at the same budget on one target, trained, measured, in one table.

    python -m headstart.benchmarks.bench_heads [--target PATH --train ROWS.jsonl --prompts PROMPTS.jsonl]
    python -m headstart.benchmarks.bench_heads --table  (only writes the tables of docs/results/heads.md anew)

Entries of docs/results/heads.json that were measured with the same settings are not measured again.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
from rich.console import Console

from ..base.errors import BadInput
from ..base.jsonl import read_appended
from ..configs.loader import build, read_config
from ..data_pipelines.rows.config import DataConfig
from ..engines.heads import load_head
from ..eval.decoding.draft_setting import chain
from ..eval.figures.environment import device_name
from ..eval.measurement.measure import measure
from ..eval.proof.config import MeasureConfig
from ..eval.suites.prompts import load_suite
from ..heads.stored.fit import head_size
from ..targets.loading import TargetConfig, default_device
from ..targets.skeleton import load_skeleton
from ..targets.target import Target
from ..train.inputs.config import RunConfig, TrainConfig
from ..train.trainer import train_head
from .bench_results import Entry, bench_names, read_bench, read_results, render_page, table, write_results
from .store import picked

RESULTS = Path("docs/results/heads.json")
PAGE = RESULTS.with_suffix(".md")
QUICKSTART = Path("runs/smoke")
# of a run's configuration, what its figures do not depend on: no validation is run
IRRELEVANT = "output_dir device log_every checkpoint_every keep_checkpoints wandb_project".split()
IRRELEVANT += ["decode_prompts", "decode_tokens", "patience"]


@dataclass(kw_only=True)
class Bench:
    """What to benchmark, and how to measure it."""

    target: str
    train: str  # JSONL rows
    prompts: str
    heads: list[str]
    steps: int = 240
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    limit: int | None = None
    output: Path = RESULTS
    runs: Path = Path("runs/bench")
    max_new_tokens: int = 96
    num_repeats: int = 3

    @property
    def name(self) -> str:
        """The target folder's name, or its parent's where it is just called target."""
        path = Path(self.target)
        return path.parent.name if path.name == "target" else path.name


def training_run(bench: Bench, name: str, *, seed: int, folder: str) -> RunConfig:
    """configs/bench/train.yaml with this target, head and seed."""
    raw = read_config("bench/train.yaml")
    warmup_steps = min(raw["train"]["warmup_steps"], bench.steps // 2)
    changes = {"seed": seed, "max_steps": bench.steps, "warmup_steps": warmup_steps, "output_dir": folder}
    return RunConfig(
        target=build(TargetConfig, {**raw["target"], "path": bench.target}, where="target"),
        head=read_bench(name).config,
        data=build(DataConfig, {**raw["data"], "train": bench.train}, where="data"),
        train=build(TrainConfig, {**raw["train"], **changes}, where="train"),
    )


def count_parameters(bench: Bench) -> dict[str, int]:
    """Trained parameters of each head on the target, from its config alone. Raises BadInput if one does not fit it."""
    skeleton = load_skeleton(TargetConfig(path=bench.target))
    return {name: head_size(read_bench(name).config, skeleton).parameters for name in bench.heads}


def settings_of(bench: Bench, name: str, *, seed: int, target: Target) -> str:
    """A digest of everything that the figures of one entry depend on, except machine and code."""
    run = training_run(bench, name, seed=seed, folder="")
    parts = {
        "target": target.fingerprint,
        "head": run.head.as_dict(),
        "train": {key: value for key, value in asdict(run.train).items() if key not in IRRELEVANT},
        "max_length": run.data.max_length,
        "rows": digest(Path(bench.train).read_bytes()),
        "prompts": digest(Path(bench.prompts).read_bytes()),
        "num_draft_tokens": read_bench(name).num_draft_tokens,
        "measured": [bench.limit, bench.max_new_tokens, bench.num_repeats],
    }
    return digest(json.dumps(parts, sort_keys=True).encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def run_bench(bench: Bench, console: Console) -> list[Entry]:
    """Train and measure whatever the output does not hold yet with these settings; returns all its entries.

    Raises: BadInput on anything that the user can mend, before the first training.
    """
    entries = read_results(bench.output)
    for option, path in (("--train", bench.train), ("--prompts", bench.prompts)):
        if not Path(path).is_file():
            raise BadInput(f"{option} {path}: no such file")
    counts = count_parameters(bench)
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    console.print(f"{bench.name}: trained parameters: {sizes}")
    target = Target.load(bench.target, dtype="float32", device=default_device())
    for seed in bench.seeds:
        settings = {name: settings_of(bench, name, seed=seed, target=target) for name in bench.heads}
        done = {(entry.key, entry.settings) for entry in entries}
        device = device_name(target.device)
        missing = [name for name in bench.heads if ((bench.name, device, name, seed), settings[name]) not in done]
        folders = {name: bench.runs / bench.name / f"{name}-{seed}-{settings[name][:8]}" for name in missing}
        for name, folder in folders.items():
            train_head(training_run(bench, name, seed=seed, folder=str(folder)), console=console)
        for name, folder in folders.items():  # one after another, so that a drifting machine slows all
            entry = measured(bench, name, folder, target, seed, counts[name], settings[name])
            entries = [other for other in entries if other.key != entry.key] + [entry]
            write_results(bench.output, entries)
            console.print(f"{bench.name}, {name}, seed {seed}: acceptance length {entry.acceptance_length}")
    return entries


def measured(bench: Bench, name: str, folder: Path, target: Target, seed: int, parameters: int, settings: str) -> Entry:
    """What a trained head saves: greedy chains, one row at a time, interleaved with the baseline."""
    head = load_head(folder / "final", target)
    suite = load_suite(bench.prompts, target, max_new_tokens=bench.max_new_tokens, limit=bench.limit)
    steps, setting = "eager" if target.device.type == "cpu" else "graph", chain(read_bench(name).num_draft_tokens)
    config = MeasureConfig(setting=setting, steps=steps, **picked(bench, "max_new_tokens num_repeats"))
    result, _ = measure(target, head, suite, config, name=name)
    timing = result.timing
    assert result.acceptance_length and result.speedup and timing.draft_ms and timing.baseline_ms, result.failed
    return Entry(
        target=bench.name,
        head=name,
        seed=seed,
        parameters=parameters,
        optimizer_steps=bench.steps,
        train_tokens_per_second=training_speed(folder),
        **picked(result, "acceptance_length acceptance_rate num_draft_tokens speedup speedup_ci95 num_prompts"),
        **picked(result, "max_new_tokens temperature"),
        draft_ms=timing.draft_ms,
        baseline_ms=timing.baseline_ms,
        loss=head.config.loss,
        lossless=picked(result.lossless, "checked identical proved unexplained"),
        device=device_name(target.device),
        num_threads=torch.get_num_threads(),
        date=date.today().isoformat(),
        settings=settings,
    )


def training_speed(folder: Path) -> float:
    """Tokens per second, padding included: the median over the steps after warm-up; of all where none are."""
    warmup = read_config(folder / "config.yaml")["train"]["warmup_steps"]
    rows = [row for row in read_appended(folder / "metrics.jsonl") if "tokens_per_second" in row]
    counted = [row for row in rows if row["step"] > warmup] or rows
    return round(statistics.median(row["tokens_per_second"] for row in counted), 1)


def bench_of(options: argparse.Namespace) -> Bench:
    """The bench that is asked for, by default of what the smoke run left. Raises BadInput."""
    paths = {name: getattr(options, name) for name in ("target", "train", "prompts")}
    if not any(paths.values()):
        files = {"target": "target", "train": "data/train.jsonl", "prompts": "data/reasoning.jsonl"}
        paths = {name: str(QUICKSTART / part) for name, part in files.items()}
        for path in paths.values():
            if not Path(path).exists():
                raise BadInput(f"{path}: not there: run make smoke first, or give --target, --train and --prompts")
    if not all(paths.values()):
        raise BadInput("give all of --target, --train and --prompts, or none")
    others = {name: getattr(options, name) for name in ("steps", "seeds", "limit", "output")}
    heads = options.heads or [name for name in bench_names() if read_bench(name).in_budget]
    return Bench(heads=heads, **paths, **others)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a greedy text was not the target's own, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m headstart.benchmarks.bench_heads", description=__doc__)
    parser.add_argument("--target", metavar="PATH", help="[default: what make smoke left]")
    parser.add_argument("--train", metavar="ROWS.jsonl", help="what heads learn from")
    parser.add_argument("--prompts", metavar="PROMPTS.jsonl", help="what they are measured on")
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps [default: 240]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--heads", nargs="+", help=f"[default: those of one size] of {', '.join(bench_names())}")
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"[default: {RESULTS}]")
    parser.add_argument(
        "--table", action="store_true", help="only write the tables of docs/results/heads.md anew, from --output"
    )
    options = parser.parse_args(arguments)
    try:
        if options.table:
            render_page(PAGE, read_results(options.output))
            return 0
        entries = run_bench(bench_of(options), Console(stderr=True))
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    print(table(entries))
    return 1 if any(entry.lossless["unexplained"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
