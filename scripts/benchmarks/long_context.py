"""Where the target's own sparse drafts overtake a head's: a sweep over context length x batch size.

    python -m headstart.scripts.benchmarks.long_context --target MODEL --head HEAD --prompts ROWS.jsonl \
        --contexts 512 1920 --batch-sizes 1 8 --output FILE.json
    python -m headstart.scripts.benchmarks.long_context --target random --contexts 4096 16384 \
        --batch-sizes 1 8 --output FILE.json

`--target random`: random weights, whose keys and values are most of what a step reads, and whose attention is near by
construction. So their acceptance shows nothing of a real target; their times, and the length to break even, do.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...configs.errors import BadInput
from ...configs.jsonl import iter_jsonl
from ...eval.drafters.lookup import build_drafters
from ...eval.generate import Generation, Round
from ...eval.measurement.config import MeasureConfig
from ...eval.measurement.metrics import acceptance, bootstrap_ratio
from ...eval.measurement.passes import runner
from ...eval.measurement.summary import rounded
from ...eval.report.document import environment, number, write_whole
from ...eval.suites.prompts import prompt_ids
from ...heads.drafter import Drafter
from ...heads.loading import default_device
from ...heads.target import Target
from .store import Figures

SPARSE = "sparse-self"
NEARNESS = 1.5  # of the random target's attention


@dataclass
class Contender:
    """What is timed in a cell: a drafter with a number of drafts, or the baseline, and what it did."""

    name: str
    drafter: Drafter | None
    num_draft_tokens: int = 0
    runs: list[Generation] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of decoding, per run."""
        return [sum(each.seconds for each in run.rounds[1:]) for run in self.runs]

    @property
    def rounds(self) -> list[Round]:
        """All but the first of each run, in which the drafter reads the prompt."""
        return [each for run in self.runs for each in run.rounds[2:] or run.rounds[1:]]


def figures_of(contender: Contender, baseline: Contender) -> Figures:
    """The figures of a contender in a cell. All wrote the same texts, so times compare as they are."""
    speedup, interval = bootstrap_ratio(baseline.seconds, contender.seconds)
    rounds = [each for run in contender.runs for each in run.rounds]
    accepted = acceptance(rounds, num_draft_tokens=contender.num_draft_tokens)
    draft = statistics.fmean(1000 * each.draft_seconds for each in contender.rounds)
    verify = statistics.fmean(1000 * each.verify_seconds for each in contender.rounds)
    step = statistics.fmean(1000 * each.seconds for each in baseline.rounds)
    pairs = zip(contender.runs, baseline.runs, strict=True)
    return {
        "drafter": contender.name,
        "num_draft_tokens": contender.num_draft_tokens,
        "acceptance_length": rounded(accepted.length),
        "speedup": round(speedup, 4),
        "speedup_ci95": [round(end, 4) for end in interval],
        "draft_ms": round(draft, 3),
        "verify_ms": round(verify, 3),
        "baseline_ms": round(step, 3),
        "break_even_length": round((draft + verify) / step, 4),
        "same_text": all(run.token_ids == other.token_ids for run, other in pairs),
    }


def random_target(device: str) -> Target:
    """Queries and keys share a constant part, which the rotary embedding turns away with distance."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=512,
        max_position_embeddings=2**17,
        attention_bias=True,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.fill_(NEARNESS)
            layer.self_attn.k_proj.bias.fill_(NEARNESS)
    return Target(model.to(device), name="random Llama", fingerprint="random")


def read_rows(path: str | None, target: Target) -> list[tuple[list[int], int]]:
    """Rows as token ids, and how many of them are the prompt; random tokens where there is no file."""
    if path is None:
        ids = torch.randint(3, target.vocab_size, (256, 512), generator=torch.Generator().manual_seed(1))
        return [(row, 512) for row in ids.tolist()]
    rows = []
    for line, row in iter_jsonl(path):
        prompt = prompt_ids(row, target.tokenizer, origin=f"{path}:{line}")
        rows.append((row.get("input_ids", prompt), len(prompt)))
    return rows


def prompts_of(rows: Sequence[tuple[list[int], int]], *, length: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: the prompt of a row and, before it, the end of the rows before it."""
    ends, stream = [], []
    for ids, num_prompt in rows:
        ends.append(len(stream) + num_prompt)
        stream += ids
    ends = [end for end in ends if end >= length]
    if len(ends) < count:
        raise BadInput(f"contexts {length}: the prompts make {len(ends)} of that length, expected {count}")
    return [stream[end - length : end] for end in ends[:: len(ends) // count][:count]]


def decode_in_turns(
    target: Target, contenders: list[Contender], prompts: list[list[int]], *, batch_size: int, max_new: int, turns: int
) -> None:
    """All contenders over each batch, `turns` times, the order rotated from turn to turn."""
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    runs = []
    for contender in contenders:
        num_draft = contender.num_draft_tokens or None
        config = MeasureConfig(max_new_tokens=max_new, batch_size=batch_size, num_draft_tokens=num_draft)
        runs.append(runner(target, contender.drafter, prompts, config))
    for turn, batch in enumerate(batches * turns):
        for i in range(len(contenders)):
            which = (turn + i) % len(contenders)
            contenders[which].runs.append(runs[which](batch, contenders[which].drafter, 0))


def crossover(cells: Sequence[Figures]) -> list[Figures]:
    """Per batch size, the shortest context at which the best sparse entry beats the best other, and the baseline."""
    best: dict[tuple[int, int], dict[bool, float]] = {}  # by batch size and context, of others and of sparse drafts
    for cell in cells:
        speedups = best.setdefault((cell["batch_size"], cell["context"]), {True: 0.0, False: 1.0})
        is_sparse = cell["drafter"] == SPARSE
        speedups[is_sparse] = max(speedups[is_sparse], cell["speedup"])
    rows = []
    for size in sorted({size for size, _ in best}):
        ahead = sorted(context for (at, context), each in best.items() if at == size and each[True] > each[False])
        rows.append({"batch_size": size, "sparse_self_ahead_from": ahead[0] if ahead else None, "ahead_at": ahead})
    return rows


def describe(cell: Figures) -> str:
    """A line of the table."""
    low, high = map(number, cell["speedup_ci95"])
    return (
        f"{cell['context']:7} {cell['batch_size']:5} {cell['drafter']:11} {cell['num_draft_tokens']:2} "
        f"{number(cell['acceptance_length']):>6} {number(cell['break_even_length']):>6} {number(cell['speedup']):>7} "
        f"[{low}, {high}] {cell['draft_ms']:10.2f} {cell['verify_ms']:7.2f} {cell['baseline_ms']:7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="folder, hub id, or `random`")
    parser.add_argument("--head", help="folder or hub id of a head to overtake")
    parser.add_argument("--prompts", help="JSONL rows with input_ids, prompt or messages; default: random tokens")
    parser.add_argument("--contexts", type=int, nargs="+", required=True, help="prompt tokens")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4], help="each is a contender")
    parser.add_argument("--budget", type=int, default=256, help="keys that sparse drafts read")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-batches", type=int, default=2, help="of prompts, per cell")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if options.target == "random":
        target = random_target(options.device)
    else:
        dtype = "float32" if options.device == "cpu" else "auto"
        target = Target.load(options.target, dtype=dtype, device=options.device)
    target.model.generation_config.eos_token_id = target.config.eos_token_id = None  # all rows run to the end
    rows = read_rows(options.prompts, target)
    specs = [f"{SPARSE}:{options.budget}", "ngram", *([f"head:{options.head}"] if options.head else [])]
    drafters = build_drafters(specs, target)
    cells: list[Figures] = []
    print("context batch drafter      K  length to pay speedup [95 %]         draft  verify    base ms")
    for context in options.contexts:
        for size in options.batch_sizes:
            prompts = prompts_of(rows, length=context, count=size * options.num_batches)
            baseline = Contender("baseline", None)
            contenders = [Contender(name, drafter, k) for name, drafter in drafters for k in options.num_draft_tokens]
            decode_in_turns(
                target,
                [baseline, *contenders],
                prompts,
                batch_size=size,
                max_new=options.max_new_tokens,
                turns=options.repeats,
            )
            for contender in contenders:
                figures = figures_of(contender, baseline)
                cells.append({"context": context, "batch_size": size, **figures})
                print(describe(cells[-1]), flush=True)
    keys = ("contexts", "batch_sizes", "budget", "max_new_tokens", "num_batches", "repeats")
    document = {
        "environment": environment(target),
        "target": {"name": target.name, "num_parameters": sum(p.numel() for p in target.model.parameters())},
        "settings": {key: getattr(options, key) for key in keys},
        "crossover": crossover(cells),
        "cells": cells,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.output, json.dumps(document, indent=2) + "\n")
    print(json.dumps(document["crossover"], indent=2))


if __name__ == "__main__":
    main()
