"""Medusa-1: independent heads, each a stack of residual blocks on the target's last state (Cai et al. 2024)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig, Reading
from .target import Target


@dataclass(kw_only=True)
class MedusaConfig(HeadConfig):
    """num_blocks: residual blocks per head. output: `own`, each head has an output layer that starts as a copy of the
    target's lm_head, or `shared`, all use the target's frozen one."""

    type: str = "medusa"
    loss: dict[str, float] = field(default_factory=lambda: {"hard_ce": 1.0})
    loss_eta: float = 10.0
    num_blocks: int = 1
    output: str = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in ("own", "shared"):
            raise BadInput(f"output {self.output!r}: expected own or shared")
        if self.draft_vocab_size is not None:
            raise BadInput("draft_vocab_size: medusa drafts the target's whole vocabulary")
        if self.feature_layers:
            raise BadInput("feature_layers: medusa reads the state after the final norm only")


class ResidualBlock(nn.Module):
    """x + silu(W x + b), with W and b zero at the start: then the block is the identity (eq. 1)."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class MedusaState:
    """hidden: [B, D] the target's post-norm state at the last position it has read."""

    hidden: Tensor | None = None


class MedusaHead(DraftHead):
    """Head k reads the post-norm state h_t and predicts x_{t+2+k}; x_{t+1} comes from the target's own lm_head.

    Parameters are named as in the FasterDecoding layout: `{k}.{j}.linear` for block j of head k, and for own output
    layers `{k}.{num_blocks}`.
    """

    config_class = MedusaConfig
    default_draft_tokens = 4

    def __init__(self, config: MedusaConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: MedusaConfig = config
        size = target.hidden_size
        for k in range(config.num_depths):
            parts: list[nn.Module] = [ResidualBlock(size) for _ in range(config.num_blocks)]
            if config.output == "own":
                layer = nn.Linear(size, target.vocab_size, bias=target.output_layer.bias is not None)
                layer.load_state_dict(target.output_layer.state_dict())
                parts.append(layer)
            self.add_module(str(k), nn.ModuleList(parts))

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_depths

    def serving_config(self) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "num_heads": self.num_depths,
            "num_hidden_layers": self.config.num_blocks,
            "medusa_num_heads": self.num_depths,
            "medusa_num_layers": self.config.num_blocks,
            "medusa_fc_bias": True,
        }

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        hidden = starts.take(batch.output.post_norm)  # [B, S, D]
        for k in range(self.num_depths):
            yield self._blocks(hidden, k)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        if self.config.output == "shared":
            return self.target.logits(hidden)
        return self._parts(depth)[-1](hidden)

    def begin(self, *, batch_size: int, max_length: int) -> MedusaState:
        return MedusaState()

    def commit(self, state: MedusaState, read: Reading) -> None:
        state.hidden = read.output.at(read.last).post_norm[:, 0]  # [B, D]

    @torch.no_grad()
    def first_logits(self, state: MedusaState) -> Tensor:
        return self.draft_logits(self._blocks(cast(Tensor, state.hidden), 0), 0)  # [B, V]

    @torch.no_grad()
    def expand(self, state: MedusaState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        """Heads do not read drafted tokens: all nodes of a depth share its scores."""
        logits = self.draft_logits(self._blocks(cast(Tensor, state.hidden), depth), depth)  # [B, V]
        return logits[:, None].expand(-1, tokens.shape[1], -1)

    def _parts(self, k: int) -> nn.ModuleList:
        return cast(nn.ModuleList, self.get_submodule(str(k)))

    def _blocks(self, hidden: Tensor, k: int) -> Tensor:
        blocks = list(self._parts(k))[: self.config.num_blocks]
        hidden = hidden.to(next(blocks[0].parameters()).dtype)
        for block in blocks:
            hidden = block(hidden)
        return hidden
