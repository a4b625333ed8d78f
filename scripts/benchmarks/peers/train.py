"""Trains a peer's EAGLE-3 head on the rows that `headstart train` had, and notes speed and memory.

    PYTHONPATH=.typings python -m headstart.scripts.benchmarks.peers.train speculators --target T --rows ROWS.jsonl \
        --draft-vocabulary 2816 --feature-layers 2 15 27 --output DIR

In an environment that holds the peer. Each step is a line of DIR/metrics.jsonl; the head lies in DIR/head.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch

from ....configs.errors import BadInput
from .specforge_head import SpecForgeTrainer
from .speculators_head import SpeculatorsTrainer
from .work import FrozenTarget, Trainer, batches, frequent_tokens, read_rows

PEERS: dict[str, Callable[..., Trainer]] = {"speculators": SpeculatorsTrainer, "specforge": SpecForgeTrainer}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--target", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL of input_ids and prompt_length")
    parser.add_argument("--draft-vocabulary", type=int, required=True, help="the answers' N most frequent tokens")
    parser.add_argument("--feature-layers", type=int, nargs="+", required=True, help="HF hidden_states indices")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-after", type=int, help="steps of a run whose speed alone is asked; saves no head")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, help="instead of the peer's default")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    try:
        train(asked)
    except BadInput as error:
        print(f"headstart: {error}", file=sys.stderr)
        return 2
    return 0


def train(asked: argparse.Namespace) -> None:
    """Train, note each step, and save the head unless only the speed is asked."""
    rows = read_rows(asked.rows)
    target = FrozenTarget(asked.target, asked.feature_layers)
    torch.manual_seed(asked.seed)
    tokens = frequent_tokens(rows, asked.draft_vocabulary, target.model.config.vocab_size)
    trainer = PEERS[asked.peer](target, tokens, steps=asked.steps, learning_rate=asked.learning_rate)
    num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"{asked.peer}: {num_trained:,} trained parameters", flush=True)
    asked.output.mkdir(parents=True)
    with (asked.output / "metrics.jsonl").open("w") as metrics:
        num_steps = asked.steps if asked.stop_after is None else asked.stop_after
        for step, chosen in enumerate(islice(batches(rows, asked.batch_size, seed=asked.seed), num_steps), 1):
            started = time.perf_counter()
            batch = target.read(chosen)
            read = time.perf_counter()
            loss = trainer.step(batch)
            ended = time.perf_counter()
            line = {
                "step": step,
                "loss": loss,
                "tokens": sum(batch.lengths),
                "seconds": ended - started,
                "target_seconds": read - started,
                "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
    if asked.stop_after is None:
        trainer.save(asked.output / "head")


if __name__ == "__main__":
    sys.exit(main())
