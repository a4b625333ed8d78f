"""The GPU suite's product stages: Headstart's own commands as a user gives them, on a target that the suite pretrained.

    python -m headstart.scripts.benchmarks.gpu.product STAGE [--target runs/gpu/llama] [--runs runs/gpu] \
        [--size toy|full]

answers: the target answers its prompts, and its states are extracted. heads: five families learn from that, each in
its own time. evaluate: greedy, one row, chains and trees. sampled: at temperature 1. conditions: more rows, long
contexts. plan: what to serve.

Every command is printed. A stage leaves RUNS/STAGE.json; stopped, it goes on where it was.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ....configs.errors import BadInput
from ....eval.report.document import device_name, write_whole
from ....eval.report.recommendation import deviates
from ....heads.loading import default_device, release_memory
from ....train.tracking import read_rows
from ...cli import app
from .bars import BARS, TREES, asked_of, figures, judge

FAMILIES = ("medusa", "eagle", "eagle3", "mtp", "draft_lm")
WARM_UP = 3  # steps of a run whose speed is not counted


@dataclass(frozen=True, kw_only=True)
class Work:
    """answer_tokens: of an answer at most. answer_rows: answered at a time.

    max_length, rows: of a training step, packed. learning_rate: AdamW's; matrix_learning_rate: Muon's. speed_steps: a
    first look at how fast a family trains, so that its run takes about train_seconds.

    prompts: of each file, and new_tokens: of each answer, measured. batch_sizes: beside one row, with crowd prompts.
    lengths: each K that is planned.
    """

    answer_tokens: int
    answer_rows: int
    max_length: int
    rows: int
    learning_rate: float
    matrix_learning_rate: float
    speed_steps: int
    train_seconds: float
    prompts: int
    new_tokens: int
    repeats: int
    batch_sizes: tuple[int, ...]
    crowd: int
    lengths: tuple[int, ...]


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
class Place:
    """Where a stage reads and writes. target: folder of the pretrained target. runs: the suite's."""

    runs: Path
    target: Path
    work: Work

    @property
    def prompts(self) -> Path:
        return self.target / "prompts"

    @property
    def answers(self) -> Path:
        return self.runs / "answers" / "answers.jsonl"

    @property
    def features(self) -> Path:
        return self.runs / "features"

    def head(self, family: str) -> Path:
        return self.runs / "heads" / family

    def json(self, stage: str) -> Path:
        """What the stage found."""
        return self.runs / f"{stage}.json"


def headstart(*words: object) -> float:
    """Run a command in this process; returns its seconds. Raises SystemExit where it does not succeed.

    A measurement of texts that are not the target's (exit code 1) is one: its report is what the stage is about.
    """
    line = [str(word) for word in words]
    print("$ headstart", shlex.join(line), flush=True)
    started = time.perf_counter()
    code = app(line, standalone_mode=False)
    if code and (code, line[0]) != (1, "eval"):
        sys.exit(code)
    release_memory()
    return round(time.perf_counter() - started, 1)


def answer(place: Place) -> dict[str, Any]:
    """The target answers greedily, as it is then measured; EAGLE-3's share of its states goes to disk."""
    work, output = place.work, place.runs / "answers"
    seconds = headstart(
        "data", "regenerate", "data/regenerate_local.yaml", f"sources=[{place.prompts / 'train.jsonl'}]",
        f"output={output}", f"target={place.target}", "sampling.temperature=0",
        f"sampling.max_tokens={work.answer_tokens}", f"engine.batch_size={work.answer_rows}",
    )  # fmt: skip
    extract_seconds = headstart("data", "extract", *run_of(place, "eagle3"), "--output", place.features)
    manifest = json.loads((output / "manifest.json").read_text())
    features = json.loads((place.features / "manifest.json").read_text())
    kept = ("num_rows", "num_tokens", "num_supervised_tokens", "bytes_per_token", "storage_dtype")
    return {
        "seconds": seconds,
        "counts": manifest["counts"],
        "tokens_per_second": round(manifest["counts"]["completion_tokens"] / seconds, 1),
        "features": {"seconds": extract_seconds, **{key: features[key] for key in kept}},
    }


def run_of(place: Place, family: str, **train: Any) -> list[str]:
    """A family's run as `headstart train` and `data extract` take it; train: keys of that section, max_steps first."""
    work = place.work
    precision = "bf16" if default_device() == "cuda" else "fp32"
    keys = {"output_dir": place.head(family), "max_steps": 1, "batch_size": work.rows, "precision": precision}
    keys |= {"optimizer": "muon", "learning_rate": work.learning_rate, "max_grad_norm": 0.5, "warmup_steps": 0}
    keys |= {"matrix_learning_rate": work.matrix_learning_rate, **train}
    return [
        f"configs/heads/{family}.yaml",
        f"target.path={place.target}",
        f"target.dtype={'bfloat16' if precision == 'bf16' else 'float32'}",
        f"data.train={place.answers}",
        f"data.max_length={work.max_length}",
        "data.layout=packed",
        *(f"train.{key}={value}" for key, value in keys.items()),
    ]


def train_heads(place: Place) -> dict[str, Any]:
    """Each family for about train_seconds, EAGLE-3 from extracted states, the others beside the live target.

    How many steps a family takes is decided once, and kept: a run that was stopped goes on to the same end.
    """
    path = place.json("heads").with_suffix(".partial")
    done: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for family in FAMILIES:
        stored = [f"data.features={place.features}"] if family == "eagle3" else []
        if family not in done:
            folder = place.runs / "heads" / f"{family}-speed"
            headstart("train", *run_of(place, family, output_dir=folder, max_steps=place.work.speed_steps), *stored)
            steps = max(WARM_UP, round(place.work.train_seconds / step_seconds(folder, place.work)))
            done[family] = {"max_steps": steps}
            write_whole(path, json.dumps(done))
        steps = done[family]["max_steps"]
        folder, warmup = place.head(family), max(1, steps // 20)
        seconds = headstart("train", *run_of(place, family, max_steps=steps, warmup_steps=warmup), *stored)
        if "seconds" not in done[family]:
            done[family] |= {"seconds": seconds, **learned(folder)}
            write_whole(path, json.dumps(done))
    return done


def step_seconds(folder: Path, work: Work) -> float:
    """Of a step, by a run's own figures; packed rows are as long as may be."""
    rates = [row["tokens_per_second"] for row in read_rows(folder / "metrics.jsonl")[WARM_UP:]]
    return work.rows * work.max_length / statistics.median(rates)


def learned(folder: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    rows = read_rows(folder / "metrics.jsonl")
    median = {
        key: statistics.median(row[key] for row in rows[WARM_UP:] or rows) for key in ("tokens_per_second", "mfu")
    }
    last = rows[-1]
    return {**median, **{key: last[key] for key in ("loss", "depth_accuracy", "epoch", "peak_bytes")}}


def evaluated(
    place: Place, output: str, files: Iterable[str], *options: object, limit: int | None = None
) -> list[dict[str, Any]]:
    """`headstart eval` of all heads on these prompts; its results, without what only the page needs."""
    work, folder = place.work, place.runs / output
    heads = (word for family in FAMILIES for word in ("--head", place.head(family) / "final"))
    asked = (word for name in files for word in ("--prompts", place.prompts / f"{name}.jsonl"))
    headstart(
        "eval", "--target", place.target, *heads, *asked, "--output", folder,
        "--limit", limit or work.prompts, "--max-new-tokens", work.new_tokens, "--repeats", work.repeats, *options,
    )  # fmt: skip
    return [figures(entry) for entry in json.loads((folder / "report.json").read_text())["results"]]


def evaluate(place: Place) -> dict[str, Any]:
    """Both domains, greedy, one row at a time: the figures that the bars are about."""
    trees = [word for tree in ("chain", *TREES) for word in ("--tree", tree)]
    results = evaluated(place, "eval", ("code", "reasoning"), *trees)
    found = asked_of(results)
    return {"results": results, "figures": found, "bars": BARS, "holds": judge(found) if on_gpu() else None}


def sampled(place: Place) -> dict[str, Any]:
    """At temperature 1, chains and sampled trees: every text must follow the target's distribution."""
    results = evaluated(place, "sampled", ("code",), "--temperature", 1, "--tree", "chain", "--tree", "sampled")
    found = {"results_that_deviate": sum(map(deviates, results))}
    return {"results": results, "figures": found, "holds": found["results_that_deviate"] == 0}


def conditions(place: Place) -> dict[str, Any]:
    """More rows at a time; contexts eight times as long. All texts must be the target's."""
    work = place.work
    sizes = [word for size in work.batch_sizes for word in ("--batch-size", size)]
    batches = evaluated(place, "batches", ("code",), *sizes, limit=work.crowd)
    long = evaluated(place, "long", ("code_long",), "--batch-size", 1, "--batch-size", work.batch_sizes[0])
    found = {"texts_unexplained": sum(entry["lossless"]["unexplained"] for entry in (*batches, *long))}
    return {"batches": batches, "long": long, "figures": found, "holds": found["texts_unexplained"] == 0}


def plan(place: Place) -> dict[str, Any]:
    """What `headstart plan` advises for EAGLE-3 on code, and how far its predictions lie from measurement."""
    work, folder = place.work, place.runs / "plan"
    lengths = (word for length in work.lengths for word in ("--num-draft-tokens", length))
    sizes = (word for size in (1, *work.batch_sizes) for word in ("--batch-size", size))
    headstart(
        "plan", "--target", place.target, "--head", place.head("eagle3") / "final",
        "--prompts", place.prompts / "code.jsonl", "--output", folder, "--limit", work.prompts,
        "--max-new-tokens", work.new_tokens, "--tree", "none", *lengths, *sizes,
    )  # fmt: skip
    return json.loads((folder / "plan.json").read_text())


def on_gpu() -> bool:
    return default_device() == "cuda"


STAGES: dict[str, Callable[[Place], dict[str, Any]]] = {
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
    place = Place(options.runs, options.target, SIZES[options.size])
    path = place.json(options.stage)
    if path.is_file():
        print(f"{path} is there already")
        return
    try:
        if not (place.target / "pretrain.json").is_file():
            raise BadInput(f"--target {place.target}: no pretrained target; the stage pretrain makes one")
        found = STAGES[options.stage](place)
    except BadInput as error:
        print(f"gpu_product: {error}", file=sys.stderr)
        sys.exit(2)
    about = {"size": options.size, "work": asdict(place.work), "device": device_name(torch.device(default_device()))}
    write_whole(path, json.dumps({**about, **found}, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
