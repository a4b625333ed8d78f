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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...configs.errors import BadInput
from ...configs.files import write_json
from ...configs.jsonl import iter_jsonl
from ...eval.drafters.registry import build_drafters
from ...eval.measurement.config import MeasureConfig, chain
from ...eval.measurement.environment import Environment
from ...eval.measurement.measure import measure
from ...eval.suites.prompts import Suite
from ...heads.chat.prompts import prompt_ids
from ...heads.drafter import Drafter
from ...heads.loading import default_device
from ...heads.target import Target
from .store import Figures, describe, picked

SPARSE = "sparse-self"
NEARNESS = 1.5  # of the random target's attention


def random_target(device: str) -> Target:
    """Queries and keys share a constant part, which the rotary embedding turns away with distance."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, vocab_size=512,
        max_position_embeddings=2**17, attention_bias=True,
    )  # fmt: skip
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


def measured(target: Target, drafter: Drafter, suite: Suite, config: MeasureConfig, *, name: str) -> Figures:
    """A drafter at one context and batch size, interleaved with the baseline: docs/results/README.md has the keys."""
    result, rows = measure(target, drafter, suite, config, name=name)
    if result.failed:
        raise RuntimeError(result.failed[0].reason)

    def mean_ms(side: str, part: str) -> float:
        """Of a round; the first, in which the drafter reads the prompt, counts in the speedup alone."""
        runs = [row["rounds"] for row in rows if row["side"] == side]
        return 1000 * statistics.fmean(done[part] for run in runs for done in run[2:] or run[1:])

    draft, verify = (mean_ms("speculative", part) for part in ("draft_seconds", "verify_seconds"))
    step = mean_ms("baseline", "seconds")
    return {
        "drafter": name,
        **picked(result, "num_draft_tokens acceptance_length speedup speedup_ci95"),
        "draft_ms": round(draft, 3),
        "verify_ms": round(verify, 3),
        "baseline_ms": round(step, 3),
        "break_even_length": round((draft + verify) / step, 4),
        "same_text": result.lossless.identical == result.lossless.checked,
    }


def sweep(target: Target, options: argparse.Namespace) -> Iterator[Figures]:
    """The cells, one per context, batch size, drafter and K."""
    rows = read_rows(options.prompts, target)
    specs = [f"{SPARSE}:{options.budget}", "ngram", *([f"head:{options.head}"] if options.head else [])]
    drafters = build_drafters(specs, target)
    for context in options.contexts:
        for size in options.batch_sizes:
            suite = Suite(str(context), prompts_of(rows, length=context, count=size * options.num_batches))
            for name, drafter in drafters:
                for length in options.num_draft_tokens:
                    how = {"max_new_tokens": options.max_new_tokens, "num_repeats": options.repeats}
                    config = MeasureConfig(setting=chain(length), batch_size=size, **how)
                    figures = measured(target, drafter, suite, config, name=name)
                    yield {"context": context, "batch_size": size, **figures}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="folder, hub id, or `random`")
    parser.add_argument("--head", help="folder or hub id of a head to overtake")
    parser.add_argument("--prompts", help="JSONL rows with input_ids, prompt or messages; default: random tokens")
    parser.add_argument("--contexts", type=int, nargs="+", required=True, help="prompt tokens")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4], help="each is measured")
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
    cells: list[Figures] = []
    for cell in sweep(target, options):
        cells.append(cell)
        print(describe(cell), flush=True)
    document = {
        "environment": asdict(Environment.of(target)),
        "target": {"name": target.name, "num_parameters": sum(p.numel() for p in target.model.parameters())},
        "settings": picked(options, "contexts batch_sizes budget max_new_tokens num_batches repeats"),
        "crossover": crossover(cells),
        "cells": cells,
    }
    write_json(options.output, document)
    print(json.dumps(document["crossover"], indent=2))


if __name__ == "__main__":
    main()
