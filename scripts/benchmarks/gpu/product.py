"""The GPU suite's product stages: Headstart's own commands as a user gives them, on a target that the suite pretrained.

    python -m headstart.scripts.benchmarks.gpu.product STAGE [--target runs/gpu/llama] [--runs runs/gpu] \
        [--size toy|full]

answers: the target answers its prompts, and its states are extracted. heads: five families learn from that, each in
its own time. evaluate: greedy, one row, chains and trees. sampled: at temperature 1. conditions: more rows, long
contexts. plan: what to serve. Every command is printed. A stage leaves RUNS/STAGE.json; stopped, it goes on.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ....configs.errors import BadInput
from ....configs.files import write_json
from ....eval.measurement.environment import device_name
from ....eval.measurement.result import Result
from ....eval.report.document import read_report
from ....eval.report.recommendation import deviates
from ....heads.loading import default_device, release_memory
from ....train.tracking import read_rows
from ...cli import app
from ..store import Figures, judge

FAMILIES = ("medusa", "eagle", "eagle3", "mtp", "draft_lm")
TREES = ("static", "dynamic")
WARM_UP = 3  # steps of a run whose speed is not counted
# what is asked of the whole product on a GPU of the H200 class
BARS = {
    "eagle3_chain_acceptance_length": (">=", 3.0),
    "eagle3_chain_speedup": (">=", 2.0),
    "medusa_tree_speedup": (">=", 1.5),
    "texts_unexplained": ("<=", 0),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The workload of the stages."""

    answer_tokens: int  # of an answer at most
    answer_rows: int  # answered at a time
    max_length: int  # of a packed training row
    rows: int  # of a training step
    learning_rate: float  # AdamW's
    matrix_learning_rate: float  # Muon's
    speed_steps: int  # a first look at how fast a family trains,
    train_seconds: float  # so that its run takes about this
    prompts: int  # of each file, measured
    new_tokens: int  # of each answer, measured
    repeats: int
    batch_sizes: tuple[int, ...]  # beside one row,
    crowd: int  # with so many prompts
    lengths: tuple[int, ...]  # each K that is planned


SIZES = {
    "toy": Work(
        answer_tokens=24, answer_rows=16, max_length=192, rows=1, learning_rate=3e-3, matrix_learning_rate=1e-2,
        speed_steps=5, train_seconds=1.0, prompts=2, new_tokens=12, repeats=1, batch_sizes=(2,), crowd=3,
        lengths=(1, 2),
    ),
    "full": Work(
        answer_tokens=192, answer_rows=256, max_length=4608, rows=2, learning_rate=1e-3, matrix_learning_rate=4e-3,
        speed_steps=25, train_seconds=70.0, prompts=10, new_tokens=96, repeats=2, batch_sizes=(8, 32), crowd=64,
        lengths=(1, 2, 3, 4, 5, 7),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Where a stage reads and writes."""

    runs: Path  # the suite's folder
    target: Path  # that of the pretrained target
    work: Work

    @property
    def prompts(self) -> Path:
        return self.target / "prompts"

    @property
    def features(self) -> Path:
        return self.runs / "features"

    def head(self, family: str) -> Path:
        return self.runs / "heads" / family


def headstart(*words: object) -> float:
    """Run a command in this process; returns its seconds. Raises SystemExit where it does not succeed.

    Exit code 1 of `eval`, of texts that are not the target's, is no failure: its report is what the stage is about.
    """
    line = [str(word) for word in words]
    print("$ headstart", shlex.join(line), flush=True)
    started = time.perf_counter()
    code = app(line, standalone_mode=False)
    if code and (code, line[0]) != (1, "eval"):
        sys.exit(code)
    release_memory()
    return round(time.perf_counter() - started, 1)


def answer(suite: Suite) -> Figures:
    """The target answers greedily, as it is then measured; EAGLE-3's share of its states goes to disk."""
    work, output = suite.work, suite.runs / "answers"
    seconds = headstart(
        "data", "regenerate", "data/regenerate_local.yaml", f"sources=[{suite.prompts / 'train.jsonl'}]",
        f"output={output}", f"target={suite.target}", "sampling.temperature=0",
        f"sampling.max_tokens={work.answer_tokens}", f"engine.batch_size={work.answer_rows}",
    )  # fmt: skip
    extract_seconds = headstart("data", "extract", *run_of(suite, "eagle3"), "--output", suite.features)
    counts = json.loads((output / "manifest.json").read_text())["counts"]
    features = json.loads((suite.features / "manifest.json").read_text())
    kept = ("num_rows", "num_tokens", "num_supervised_tokens", "bytes_per_token", "storage_dtype")
    rate = round(counts["completion_tokens"] / seconds, 1)
    stored = {"seconds": extract_seconds, **{key: features[key] for key in kept}}
    return {"seconds": seconds, "counts": counts, "tokens_per_second": rate, "features": stored}


def run_of(suite: Suite, family: str, **train: object) -> list[str]:
    """A family's run as `headstart train` and `data extract` take it. train: keys of that section, max_steps first."""
    work = suite.work
    precision = "bf16" if default_device() == "cuda" else "fp32"
    keys = {"output_dir": suite.head(family), "max_steps": 1, "batch_size": work.rows, "precision": precision}
    keys |= {"optimizer": "muon", "learning_rate": work.learning_rate, "max_grad_norm": 0.5, "warmup_steps": 0}
    keys |= {"matrix_learning_rate": work.matrix_learning_rate, **train}
    return [
        f"configs/heads/{family}.yaml",
        f"target.path={suite.target}",
        f"target.dtype={'bfloat16' if precision == 'bf16' else 'float32'}",
        f"data.train={suite.runs / 'answers' / 'answers.jsonl'}",
        f"data.max_length={work.max_length}",
        "data.layout=packed",
        *(f"train.{key}={value}" for key, value in keys.items()),
    ]


def train_heads(suite: Suite) -> Figures:
    """Each family for about train_seconds, EAGLE-3 from extracted states, the others beside the live target.

    How many steps a family takes is decided once, and kept: a run that was stopped goes on to the same end.
    """
    path = suite.runs / "heads.partial"
    done: Figures = json.loads(path.read_text()) if path.is_file() else {}
    for family in FAMILIES:
        figures = done.setdefault(family, {})
        features = [f"data.features={suite.features}"] if family == "eagle3" else []
        if not figures:
            folder = suite.head(f"{family}-speed")
            headstart("train", *run_of(suite, family, output_dir=folder, max_steps=suite.work.speed_steps), *features)
            figures["max_steps"] = max(WARM_UP, round(suite.work.train_seconds / step_seconds(folder, suite.work)))
            write_json(path, done)
        if "seconds" not in figures:
            steps = {"max_steps": figures["max_steps"], "warmup_steps": max(1, figures["max_steps"] // 20)}
            seconds = headstart("train", *run_of(suite, family, **steps), *features)
            rows = read_rows(suite.head(family) / "metrics.jsonl")
            for key in ("tokens_per_second", "mfu"):
                figures[key] = statistics.median(row[key] for row in rows[WARM_UP:] or rows)
            last = {key: rows[-1][key] for key in ("loss", "depth_accuracy", "epoch", "peak_bytes")}
            figures |= {"seconds": seconds, **last}
            write_json(path, done)
    return done


def step_seconds(folder: Path, work: Work) -> float:
    """Of a step, by a run's own figures; packed rows are as long as may be."""
    rates = [row["tokens_per_second"] for row in read_rows(folder / "metrics.jsonl")[WARM_UP:]]
    return work.rows * work.max_length / statistics.median(rates)


def evaluated(
    suite: Suite, output: str, files: Iterable[str], *options: object, limit: int | None = None
) -> list[Result]:
    """`headstart eval` of all heads on these prompts; its results."""
    work, folder = suite.work, suite.runs / output
    heads = (word for family in FAMILIES for word in ("--head", suite.head(family) / "final"))
    prompts = (word for name in files for word in ("--prompts", suite.prompts / f"{name}.jsonl"))
    headstart(
        "eval", "--target", suite.target, *heads, *prompts, "--output", folder,
        "--limit", limit or work.prompts, "--max-new-tokens", work.new_tokens, "--repeats", work.repeats, *options,
    )  # fmt: skip
    return read_report(folder / "report.json").results


def evaluate(suite: Suite) -> Figures:
    """Both domains, greedy, one row at a time: the figures that the bars are about."""
    trees = [word for tree in ("chain", *TREES) for word in ("--tree", tree)]
    results = evaluated(suite, "eval", ("code", "reasoning"), *trees)
    figures = bar_figures(results)
    holds = judge(figures, BARS) if default_device() == "cuda" else None
    return {"results": [result.to_json() for result in results], "figures": figures, "bars": BARS, "holds": holds}


def bar_figures(results: Sequence[Result]) -> Figures:
    """What the bars are about; of several domains the worst."""
    chains = [result for result in results if result.drafter == "eagle3" and result.tree == "chain"]
    trees = [result for result in results if result.drafter == "medusa" and result.tree in TREES]
    return {
        "eagle3_chain_acceptance_length": worst((result.suite, result.acceptance_length) for result in chains),
        "eagle3_chain_speedup": worst((result.suite, result.speedup) for result in chains),
        "medusa_tree_speedup": worst((result.suite, result.speedup) for result in trees),
        "texts_unexplained": sum(result.lossless.unexplained for result in results),
    }


def worst(figures: Iterable[tuple[str, float | None]]) -> float | None:
    """The smallest over the suites of each suite's best figure."""
    best: dict[str, float] = {}
    for suite, value in figures:
        if value is not None:
            best[suite] = max(value, best.get(suite, 0.0))
    return min(best.values(), default=None)


def sampled(suite: Suite) -> Figures:
    """At temperature 1, chains and sampled trees: every text must follow the target's distribution."""
    limit = max(3, suite.work.prompts)  # of which some shape the tree
    trees = "--tree", "chain", "--tree", "sampled"
    results = evaluated(suite, "sampled", ("code",), "--temperature", 1, *trees, limit=limit)
    num_deviating = sum(map(deviates, results))
    figures = {"results_that_deviate": num_deviating}
    return {"results": [result.to_json() for result in results], "figures": figures, "holds": num_deviating == 0}


def conditions(suite: Suite) -> Figures:
    """More rows at a time; contexts eight times as long. All texts must be the target's."""
    work = suite.work
    sizes = [word for size in work.batch_sizes for word in ("--batch-size", size)]
    batches = evaluated(suite, "batches", ("code",), *sizes, limit=work.crowd)
    long = evaluated(suite, "long", ("code_long",), "--batch-size", 1, "--batch-size", work.batch_sizes[0])
    figures = {"texts_unexplained": sum(result.lossless.unexplained for result in (*batches, *long))}
    holds = figures["texts_unexplained"] == 0
    entries = {"batches": [each.to_json() for each in batches], "long": [each.to_json() for each in long]}
    return {**entries, "figures": figures, "holds": holds}


def plan(suite: Suite) -> Figures:
    """What `headstart plan` advises for EAGLE-3 on code, and how far its predictions lie from measurement."""
    work, folder = suite.work, suite.runs / "plan"
    lengths = (word for length in work.lengths for word in ("--num-draft-tokens", length))
    sizes = (word for size in (1, *work.batch_sizes) for word in ("--batch-size", size))
    headstart(
        "plan", "--target", suite.target, "--head", suite.head("eagle3") / "final",
        "--prompts", suite.prompts / "code.jsonl", "--output", folder, "--limit", work.prompts,
        "--max-new-tokens", work.new_tokens, "--tree", "none", *lengths, *sizes,
    )  # fmt: skip
    return json.loads((folder / "plan.json").read_text())


STAGES: dict[str, Callable[[Suite], Figures]] = {
    "answers": answer,
    "heads": train_heads,
    "evaluate": evaluate,
    "sampled": sampled,
    "conditions": conditions,
    "plan": plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--target", type=Path, default=Path("runs/gpu/llama"), help="what the stage pretrain left")
    parser.add_argument("--runs", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--size", choices=sorted(SIZES), default="toy")
    options = parser.parse_args()
    path, work = options.runs / f"{options.stage}.json", SIZES[options.size]
    if path.is_file():
        print(f"{path} is there already")
        return
    try:
        if not (options.target / "pretrain.json").is_file():
            raise BadInput(f"--target {options.target}: no pretrained target; the stage pretrain makes one")
        figures = STAGES[options.stage](Suite(options.runs, options.target, work))
    except BadInput as error:
        print(f"gpu_product: {error}", file=sys.stderr)
        sys.exit(2)
    header = {"size": options.size, "work": asdict(work), "device": device_name(torch.device(default_device()))}
    write_json(path, {**header, **figures})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
