"""`make bench-heads`: every family of heads at the same budget on the same targets, trained, measured, in one table."""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...configs.errors import BadInput
from ...configs.loader import build, read_config, shipped
from ...data_pipelines.config import DataConfig
from ...eval.measurement.measure import MeasureConfig, measure
from ...eval.suites.prompts import load_suite
from ...heads.base import HeadConfig
from ...heads.fit import head_size, load_skeleton
from ...heads.loading import TargetConfig, default_device
from ...heads.registry import head_class, load_head
from ...heads.target import Target
from ...train.config import RunConfig, TrainConfig
from ...train.tracking import read_rows
from ...train.trainer import train
from .bench_results import key_of, read_results, render_readme, table, write_results

RUNS = Path("runs/bench")
RESULTS = Path("docs/results/heads.json")
QUICKSTART = ("target", "data/train.jsonl", "data/reasoning.jsonl")  # under runs/quickstart
TOLERANCE = 0.25  # how far a head's size may be from the budget


@dataclass(kw_only=True)
class BenchedHead:
    """configs/bench/NAME.yaml: a head at the budget's size, and what the table calls it.

    num_draft_tokens: K in decoding. in_budget: whether it has that size; else it is benched only when named.
    """

    title: str
    idea: str
    head: dict[str, Any]
    num_draft_tokens: int = 5
    in_budget: bool = True

    @property
    def config(self) -> HeadConfig:
        """A fresh config: families write defaults for the target into it."""
        return build(head_class(self.head["type"]).config_class, self.head, where="head")


@dataclass(kw_only=True)
class Work:
    """One target with what its heads learn from and are measured on. num_steps: optimizer steps."""

    target: str
    train: str
    prompts: str
    num_steps: int

    @property
    def name(self) -> str:
        """The folder's name, or its parent's where it is just called target."""
        path = Path(self.target)
        return path.parent.name if path.name == "target" else path.name


@dataclass(kw_only=True)
class Bench:
    """What to bench, and how to measure it."""

    heads: list[str]
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    limit: int | None = None
    budget: int | None = None
    output: Path = RESULTS
    runs: Path = RUNS
    max_new_tokens: int = 96
    num_repeats: int = 3


def bench_names() -> list[str]:
    """The heads of configs/bench, by file name."""
    return [path.stem for path in shipped("bench/*.yaml") if path.stem != "train"]


def read_bench(name: str) -> BenchedHead:
    """Raises BadInput with the names there are."""
    if name not in bench_names():
        raise BadInput(f"--heads {name}: expected some of {', '.join(bench_names())}")
    return build(BenchedHead, read_config(f"bench/{name}.yaml"), where=f"bench/{name}.yaml")


def training_run(work: Work, benched: BenchedHead, *, seed: int, folder: str) -> RunConfig:
    """configs/bench/train.yaml with this target, head and seed."""
    raw = read_config("bench/train.yaml")
    how = {"seed": seed, "max_steps": work.num_steps, "output_dir": folder}
    return RunConfig(
        target=build(TargetConfig, {**raw["target"], "path": work.target}, where="target"),
        head=benched.config,
        data=build(DataConfig, {**raw["data"], "train": work.train}, where="data"),
        train=build(TrainConfig, {**raw["train"], **how}, where="train"),
    )


def count_parameters(work: Work, names: Sequence[str], *, budget: int | None) -> dict[str, int]:
    """Trained parameters of each head on the target, from its config alone.

    Raises: BadInput where one does not fit the target, or is further from the budget than TOLERANCE.
    """
    configs = {name: read_bench(name).config for name in names}
    skeleton = load_skeleton(TargetConfig(path=work.target))
    counts = {name: head_size(config, skeleton).parameters for name, config in configs.items()}
    for name, count in counts.items():
        if budget is not None and abs(count / budget - 1) > TOLERANCE:
            raise BadInput(
                f"configs/bench/{name}.yaml: {count:,} parameters on {work.name}: expected {budget:,} within "
                f"{TOLERANCE:.0%}"
            )
    return counts


def settings_of(work: Work, name: str, *, seed: int, target: Target, bench: Bench) -> str:
    """A digest of all that the figures of one entry depend on, machine and code apart."""
    run = training_run(work, read_bench(name), seed=seed, folder="")
    changes_nothing = "output_dir device log_every checkpoint_every keep_checkpoints wandb_project tensorboard".split()
    changes_nothing += ["decode_prompts", "decode_tokens", "patience"]  # nothing is validated
    parts = {
        "target": target.fingerprint,
        "head": run.head.as_dict(),
        "train": {key: value for key, value in asdict(run.train).items() if key not in changes_nothing},
        "max_length": run.data.max_length,
        "rows": digest(Path(work.train).read_bytes()),
        "prompts": digest(Path(work.prompts).read_bytes()),
        "num_draft_tokens": read_bench(name).num_draft_tokens,
        "measured": [bench.limit, bench.max_new_tokens, bench.num_repeats],
    }
    return digest(json.dumps(parts, sort_keys=True).encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def run_bench(works: Sequence[Work], bench: Bench, console: Console) -> list[dict[str, Any]]:
    """Train and measure whatever the output does not hold yet with these settings; returns all its entries.

    Raises: BadInput on anything that the user can mend, before the first training.
    """
    entries = read_results(bench.output)
    for work in works:
        check_files(work)
    counts = {work.name: count_parameters(work, bench.heads, budget=bench.budget) for work in works}
    for work in works:
        sizes = ", ".join(f"{name} {count:,}" for name, count in counts[work.name].items())
        console.print(f"{work.name}: trained parameters: {sizes}")
    for work in works:
        target = Target.load(work.target, dtype="float32", device=default_device())
        for seed in bench.seeds:
            settings = {name: settings_of(work, name, seed=seed, target=target, bench=bench) for name in bench.heads}
            done = {(*key_of(one), one["settings"]) for one in entries}
            missing = [name for name, value in settings.items() if (work.name, name, seed, value) not in done]
            folders = {name: bench.runs / work.name / f"{name}-{seed}-{settings[name][:8]}" for name in missing}
            for name, folder in folders.items():
                train(training_run(work, read_bench(name), seed=seed, folder=str(folder)), console=console)
            for name, folder in folders.items():  # one after another, so that a drifting machine slows all
                figures = measured(target, work, name, folder, bench)
                entry = {
                    "target": work.name,
                    "head": name,
                    "seed": seed,
                    "parameters": counts[work.name][name],
                    "optimizer_steps": work.num_steps,
                    "train_tokens_per_second": training_speed(folder),
                    **figures,
                    "settings": settings[name],
                }
                entries = [one for one in entries if key_of(one) != key_of(entry)] + [entry]
                write_results(bench.output, entries)
                console.print(f"{work.name}, {name}, seed {seed}: acceptance length {entry['acceptance_length']}")
    return entries


def measured(target: Target, work: Work, name: str, folder: Path, bench: Bench) -> dict[str, Any]:
    """What a trained head saves: greedy chains, one row at a time, interleaved with the baseline."""
    benched = read_bench(name)
    head = load_head(folder / "final", target)
    suite = load_suite(work.prompts, target, max_new_tokens=bench.max_new_tokens, limit=bench.limit)
    config = MeasureConfig(
        num_draft_tokens=benched.num_draft_tokens,
        max_new_tokens=bench.max_new_tokens,
        steps="eager" if target.device.type == "cpu" else "graph",
        num_repeats=bench.num_repeats,
    )
    result, _ = measure(target, head, suite, config, name=name)
    kept = (
        "acceptance_length acceptance_rate num_draft_tokens speedup speedup_ci95 num_prompts max_new_tokens temperature"
    )
    lossless = {key: result["lossless"][key] for key in ("checked", "identical", "explained", "unexplained")}
    return {
        **{key: result[key] for key in kept.split()},
        "draft_ms": result["timing"]["draft_ms"],
        "baseline_ms": result["timing"]["baseline_ms"],
        "loss": head.config.loss,
        "lossless": lossless,
        "device": target.device.type,
        "num_threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }


def training_speed(folder: Path) -> float:
    """Tokens per second, padding included: the median over the steps after warm-up; of all where none are."""
    warmup = read_config(folder / "config.yaml")["train"]["warmup_steps"]
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "tokens_per_second" in row]
    warm = [row["tokens_per_second"] for row in rows if row["step"] > warmup]
    return round(statistics.median(warm or [row["tokens_per_second"] for row in rows]), 1)


def check_files(work: Work) -> None:
    for option, path in (("--train", work.train), ("--prompts", work.prompts)):
        if not Path(path).is_file():
            raise BadInput(f"{option} {path}: no such file")


def works_of(options: argparse.Namespace) -> list[Work]:
    """The targets asked for, or the quickstart's. Raises BadInput where the options do not pair up."""
    targets, rows, prompts = options.target, options.train, options.prompts
    if not targets and not rows and not prompts:
        paths = [Path("runs/quickstart", part) for part in QUICKSTART]
        for path in paths:
            if not path.exists():
                raise BadInput(f"{path}: not there: run make quickstart first, or give --target, --train and --prompts")
        targets, rows, prompts = ([str(path)] for path in paths)
    steps = options.steps if len(options.steps) != 1 else options.steps * len(targets)
    numbers = [len(part) for part in (targets, rows, prompts, steps)]
    if len(set(numbers)) > 1:
        raise BadInput(
            "--target {}, --train {}, --prompts {}, --steps {}: expected as many of each, or one --steps".format(
                *numbers
            )
        )
    works = [
        Work(target=target, train=train, prompts=prompt, num_steps=num_steps)
        for target, train, prompt, num_steps in zip(targets, rows, prompts, steps, strict=True)
    ]
    names = [work.name for work in works]
    if len(set(names)) < len(names):
        raise BadInput(f"--target: two folders of the same name: {', '.join(names)}")
    return works


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headstart.scripts.benchmarks.bench_heads", description=__doc__)
    default = "[default: what make quickstart left]"
    parser.add_argument("--target", action="append", default=[], metavar="PATH", help=f"repeatable {default}")
    parser.add_argument("--train", action="append", default=[], metavar="ROWS.jsonl", help="one per target")
    parser.add_argument("--prompts", action="append", default=[], metavar="PROMPTS.jsonl", help="one per target")
    parser.add_argument("--steps", type=int, action="append", metavar="N", help="one, or one per target [default: 240]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--heads", nargs="+", help=f"[default: those of one size] of {', '.join(bench_names())}")
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--budget", type=int, help=f"refuse heads whose size is not N within {TOLERANCE:.0%}")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"[default: {RESULTS}]")
    parser.add_argument("--table", action="store_true", help="only write the README's table anew, from --output")
    options = parser.parse_args(arguments)
    options.steps = options.steps or [240]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where a greedy text was not the target's own, 2 on bad input."""
    options, console = parse(sys.argv[1:] if arguments is None else arguments), Console(stderr=True)
    try:
        if options.table:
            render_readme(Path("README.md"), read_results(options.output), describe)
            return 0
        heads = options.heads or [name for name in bench_names() if read_bench(name).in_budget]
        kept = {f.name for f in fields(Bench)} & set(vars(options)) - {"heads"}
        bench = Bench(heads=heads, **{name: getattr(options, name) for name in kept})
        entries = run_bench(works_of(options), bench, console)
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    print(table(entries, describe))
    return 1 if any(entry["lossless"]["unexplained"] for entry in entries) else 0


def describe(name: str) -> tuple[str, str]:
    """Title and idea of a head."""
    benched = read_bench(name)
    return benched.title, benched.idea


if __name__ == "__main__":
    sys.exit(main())
