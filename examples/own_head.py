"""A head family of your own in one file: `python examples/own_head.py MODEL ROWS.jsonl OUT`.

Depth k adds a low-rank correction to the target's last state and asks the target's own output layer: a few thousand
parameters per depth. Training, checkpoints, validation, chains, trees and measuring come with the contract.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from headstart.eval.measurement.measure import MeasureConfig, measure
from headstart.eval.suites.prompts import Suite
from headstart.heads.base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from headstart.heads.drafter import Reading
from headstart.heads.registry import HEADS, load_head
from headstart.heads.target import Target
from headstart.train.config import load_run
from headstart.train.trainer import train
from torch import Tensor, nn


@dataclass(kw_only=True)
class LowRankConfig(HeadConfig):
    """The family's own key."""

    type: str = "low_rank"
    loss: dict[str, float] = field(default_factory=lambda: {"hard_ce": 1.0})
    rank: int = 16  # of each depth's correction


class LowRankHead(DraftHead):
    """Depth k predicts x_{t+2+k} from h_t + up_k(down_k(h_t))."""

    config_class = LowRankConfig
    has_one_output = True

    def __init__(self, config: LowRankConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.max_draft_tokens = config.num_depths
        size, depths = target.hidden_size, range(config.num_depths)
        self.down = nn.ModuleList(nn.Linear(size, config.rank, bias=False) for _ in depths)
        self.up = nn.ModuleList(nn.Linear(config.rank, size, bias=False) for _ in depths)

    def serving_config(self) -> dict[str, Any]:
        return {"model_type": "low_rank"}

    def corrected(self, hidden: Tensor, depth: int) -> Tensor:  # [..., D] -> [..., D]
        return hidden + self.up[depth](self.down[depth](hidden))

    # on given text

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        hidden = starts.take(batch.output.post_norm)  # [B, S, D]
        for depth in range(starts.num_depths):
            yield self.corrected(hidden, depth)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    # live

    def begin(self, *, batch_size: int, max_length: int) -> dict[str, Tensor]:
        return {}

    def commit(self, state: dict[str, Tensor], read: Reading) -> None:
        state["hidden"] = read.output.at(read.last).post_norm[:, 0]  # [B, D]

    def first_logits(self, state: dict[str, Tensor]) -> Tensor:
        return self.draft_logits(self.corrected(state["hidden"], 0), 0)  # [B, V]

    def expand(self, state: dict[str, Tensor], tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        logits = self.draft_logits(self.corrected(state["hidden"], depth), depth)  # [B, V]
        return logits[:, None].expand(-1, tokens.shape[1], -1)


HEADS["low_rank"] = LowRankHead


def main(model: str, rows: str, output: str, *overrides: str) -> None:
    run = {
        "target": {"path": model},
        "head": {"type": "low_rank", "num_depths": 3},
        "data": {"train": rows},
        "train": {"max_steps": 200, "batch_size": 8, "learning_rate": 3e-3, "output_dir": output},
    }
    path = Path(output).with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(run))
    train(load_run(path, overrides))

    target = Target.load(model)
    head = load_head(Path(output) / "final", target)
    with open(rows, encoding="utf-8") as file:
        first = [json.loads(line) for line, _ in zip(file, range(8), strict=False)]
    prompts = [row["input_ids"][: row["prompt_length"]] for row in first]
    config = MeasureConfig(max_new_tokens=48, num_repeats=1)
    result, _ = measure(target, head, Suite("training prompts", prompts), config, name="low_rank")
    size = sum(parameter.numel() for parameter in head.parameters())
    print(f"{size:,} parameters, {result.acceptance_length:.2f} tokens per forward")


if __name__ == "__main__":
    main(*sys.argv[1:])
