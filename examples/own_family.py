"""A family of heads of your own in one file: `python examples/own_family.py MODEL ROWS.jsonl OUT`.

It is Hydra (Ankner et al. 2024, arXiv 2402.05109), which no serving engine loads: head k predicts x_{t+2+k} from the
target's last state at t and the embeddings of x_{t+1}, ..., x_{t+1+k}, the tokens drafted before it. Training,
checkpoints, validation, chains, trees and measuring come with the contract.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from headstart.engines.heads import HEADS, load_head
from headstart.eval.measurement.measure import MeasureConfig, measure
from headstart.eval.suites.prompts import Suite
from headstart.heads.base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from headstart.heads.drafting.drafter import Reading
from headstart.targets.target import Target
from headstart.train.inputs.config import load_run
from headstart.train.trainer import train_head
from torch import Tensor, nn


@dataclass(kw_only=True)
class HydraConfig(HeadConfig):
    """The family's own keys and defaults."""

    type: str = "hydra"
    loss: dict[str, float] = field(default_factory=lambda: {"hard_ce": 1.0})
    bias: bool = True  # of each depth's linear map


@dataclass
class HydraState:
    """The state of drafting: tensors with an entry per row."""

    hidden: Tensor  # [B, 1, D] the target's state at the last position it has read
    anchor: Tensor  # [B, 1] the token that follows it
    path: Tensor  # [B, F, n] for each token of the last expansion, all tokens from the anchor up to it


class HydraHead(DraftHead):
    """Depth k corrects the target's last state, h_t + silu(W_k [h_t; e_{t+1}; ...; e_{t+1+k}]), first by nothing; and
    asks the target's own output layer."""

    config_class = HydraConfig
    has_one_output = True

    def __init__(self, config: HydraConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.max_draft_tokens = config.num_depths
        size, depths = target.hidden_size, range(config.num_depths)
        self.mix = nn.ModuleList(nn.Linear((depth + 2) * size, size, bias=config.bias) for depth in depths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def serving_config(self) -> dict[str, Any]:
        return {"model_type": "hydra"}

    def corrected(self, hidden: Tensor, drafted: Tensor, depth: int) -> Tensor:
        """[..., D] of the state [..., D] and the embeddings [..., (depth + 1) * D] of the tokens behind it."""
        read = torch.cat([hidden, drafted], -1)
        read = read.to(next(self.parameters()).dtype)  # in training fp32, whatever the target computes in
        return hidden + nn.functional.silu(self.mix[depth](read))

    # on given text

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        hidden = starts.take(batch.output.post_norm)  # [B, S, D]
        drafted = hidden[..., :0]
        for depth in range(starts.num_depths):
            embedded = self.target.embed(starts.take(batch.input_ids, offset=depth + 1))  # [B, S, D]
            drafted = torch.cat([drafted, embedded], -1)  # [B, S, (depth + 1) * D]
            yield self.corrected(hidden, drafted, depth)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    # live

    def begin(self, *, batch_size: int, max_length: int) -> HydraState:
        ids = torch.zeros(batch_size, 1, dtype=torch.long, device=self.target.device)
        hidden = torch.zeros(batch_size, 1, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        return HydraState(hidden, ids, ids[..., None])

    def commit(self, state: HydraState, read: Reading) -> None:
        state.hidden = read.output.at(read.last).post_norm  # [B, 1, D]
        state.anchor = read.next_tokens.gather(1, read.last[:, None])

    def first_logits(self, state: HydraState) -> Tensor:
        state.path = state.anchor[..., None]  # [B, 1, 1]
        return self.score(state, 0)[:, 0]  # [B, V]

    def expand(self, state: HydraState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        path = state.path  # [B, F of the last depth, depth]
        if parents is not None:
            path = path.gather(1, parents[..., None].expand(-1, -1, path.shape[-1]))
        state.path = torch.cat([path, tokens[..., None]], -1)  # [B, F, depth + 1]
        return self.score(state, depth)

    def score(self, state: HydraState, depth: int) -> Tensor:
        """[B, F, V] draft logits of the token after each path."""
        num_rows, num_nodes, _ = state.path.shape
        drafted = self.target.embed(state.path.flatten(1)).reshape(num_rows, num_nodes, -1)  # [B, F, (depth + 1) * D]
        return self.draft_logits(self.corrected(state.hidden.expand(-1, num_nodes, -1), drafted, depth), depth)


HEADS["hydra"] = HydraHead


def main(model: str, rows: str, output: str, *overrides: str) -> None:
    run = {
        "target": {"path": model},
        "head": {"type": "hydra", "num_depths": 3},
        "data": {"train": rows},
        "train": {"max_steps": 200, "batch_size": 8, "learning_rate": 3e-3, "output_dir": output},
    }
    path = Path(output).with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(run))
    train_head(load_run(path, overrides))

    target = Target.load(model)
    head = load_head(Path(output) / "final", target)
    with open(rows, encoding="utf-8") as file:
        first = [json.loads(line) for line, _ in zip(file, range(8), strict=False)]
    prompts = [row["input_ids"][: row["prompt_length"]] for row in first]
    config = MeasureConfig(max_new_tokens=48, num_repeats=1)
    result, _ = measure(target, head, Suite("training prompts", prompts), config, name="hydra")
    size = sum(parameter.numel() for parameter in head.parameters())
    print(f"{size:,} parameters, {result.acceptance_length:.2f} tokens per forward")


if __name__ == "__main__":
    main(*sys.argv[1:])
