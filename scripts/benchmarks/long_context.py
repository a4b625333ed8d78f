"""Where the target's own sparse drafts overtake a head's: a sweep over context length x batch size.

    python -m headstart.scripts.benchmarks.long_context --target MODEL --head HEAD --prompts ROWS.jsonl \
        --contexts 512 1920 \
        --batch-sizes 1 8 --output FILE.json
    python -m headstart.scripts.benchmarks.long_context --target random --contexts 4096 16384 \
        --batch-sizes 1 8 --output FILE.json

`--target random`: random weights, whose keys and values are most of what a step reads, and whose attention is near by
construction. So their acceptance says nothing of a real target; their times, and the length to break even, do.
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
from ...eval.drafters.registry import build_drafters
from ...eval.generate import Generation
from ...eval.measurement.config import MeasureConfig
from ...eval.measurement.metrics import acceptance, bootstrap_ratio
from ...eval.measurement.passes import runner
from ...eval.measurement.summary import rounded
from ...eval.report.document import environment, number, write_whole
from ...eval.suites.prompts import prompt_ids
from ...heads.drafter import Drafter
from ...heads.loading import default_device
from ...heads.target import Target

SPARSE = "sparse-self"
NEARNESS = 1.5
RANDOM: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, vocab_size=512
)


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
        return [sum(one.seconds for one in run.rounds[1:]) for run in self.runs]

    def mean_ms(self, part: str) -> float:
        """Of a round; its first, in which the drafter reads the prompt, is left to `seconds`."""
        rounds = [one for run in self.runs for one in run.rounds[2:] or run.rounds[1:]]
        return 1000 * statistics.fmean(getattr(one, part) for one in rounds)


def random_target(device: str) -> Target:
    """Queries and keys share a constant part, which the rotary embedding turns away with distance."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**RANDOM, max_position_embeddings=2**17, attention_bias=True))
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


def measure_cell(
    target: Target,
    contenders: list[Contender],
    prompts: list[list[int]],
    *,
    batch_size: int,
    max_new: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """One context and batch size: all contenders in turns over each batch, the order rotated from turn to turn."""
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    runs = []
    for one in contenders:
        config = MeasureConfig(
            max_new_tokens=max_new, batch_size=batch_size, num_draft_tokens=one.num_draft_tokens or None
        )
        runs.append(runner(target, one.drafter, prompts, config))
    for turn, batch in enumerate(batches * repeats):
        for i in range(len(contenders)):
            which = (turn + i) % len(contenders)
            contenders[which].runs.append(runs[which](batch, contenders[which].drafter, 0))
    return [entry_of(one, contenders[0]) for one in contenders[1:]]


def entry_of(one: Contender, baseline: Contender) -> dict[str, Any]:
    """The figures of a contender. All wrote the same texts, so times compare as they are."""
    speedup, interval = bootstrap_ratio(baseline.seconds, one.seconds)
    counted = acceptance([r for run in one.runs for r in run.rounds], num_draft_tokens=one.num_draft_tokens)
    draft, verify, step = one.mean_ms("draft_seconds"), one.mean_ms("verify_seconds"), baseline.mean_ms("seconds")
    return {
        "drafter": one.name,
        "num_draft_tokens": one.num_draft_tokens,
        "acceptance_length": rounded(counted.length),
        "speedup": rounded(speedup),
        "speedup_ci95": [rounded(x) for x in interval],
        "draft_ms": rounded(draft, 3),
        "verify_ms": rounded(verify, 3),
        "baseline_ms": rounded(step, 3),
        "break_even_length": rounded((draft + verify) / step),
        "same_text": all(a.token_ids == b.token_ids for a, b in zip(one.runs, baseline.runs, strict=True)),
    }


def crossover(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per batch size, the shortest context at which the best sparse entry beats the best other, and the baseline."""
    found = []
    for size in sorted({cell["batch_size"] for cell in cells}):
        contexts: dict[int, dict[bool, float]] = {}
        for cell in (one for one in cells if one["batch_size"] == size):
            best, is_sparse = contexts.setdefault(cell["context"], {True: 0.0, False: 1.0}), cell["drafter"] == SPARSE
            best[is_sparse] = max(best[is_sparse], cell["speedup"])
        ahead = [context for context, best in sorted(contexts.items()) if best[True] > best[False]]
        found.append({"batch_size": size, "sparse_self_ahead_from": ahead[0] if ahead else None, "ahead_at": ahead})
    return found


def show(cells: list[dict[str, Any]]) -> None:
    print("context batch drafter      K  length to pay speedup [95 %]         draft  verify    base ms")
    for c in cells:
        low, high = (number(x) for x in c["speedup_ci95"])
        print(
            f"{c['context']:7} {c['batch_size']:5} {c['drafter']:11} {c['num_draft_tokens']:2} "
            f"{number(c['acceptance_length']):>6} {number(c['break_even_length']):>6} {number(c['speedup']):>7} "
            f"[{low}, {high}] {c['draft_ms']:10.2f} {c['verify_ms']:7.2f} {c['baseline_ms']:7.2f}",
            flush=True,
        )


def parsed() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> None:
    options = parsed()
    device = options.device
    dtype = "float32" if device == "cpu" else "auto"
    is_random = options.target == "random"
    target = random_target(device) if is_random else Target.load(options.target, dtype=dtype, device=device)
    target.model.generation_config.eos_token_id = target.config.eos_token_id = None  # all rows run to the end
    rows = read_rows(options.prompts, target)
    specs = [f"{SPARSE}:{options.budget}", "ngram", *([f"head:{options.head}"] if options.head else [])]
    drafters = build_drafters(specs, target)
    cells: list[dict[str, Any]] = []
    for context in options.contexts:
        for size in options.batch_sizes:
            prompts = prompts_of(rows, length=context, count=size * options.num_batches)
            contenders = [Contender("baseline", None)]
            contenders += [Contender(name, one, k) for name, one in drafters for k in options.num_draft_tokens]
            how = {"batch_size": size, "max_new": options.max_new_tokens, "repeats": options.repeats}
            found = measure_cell(target, contenders, prompts, **how)
            cells += [{"context": context, "batch_size": size, **entry} for entry in found]
            show(cells[-len(found) :])
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
