"""Medusa-1 and Medusa-2: independent heads, residual blocks on the target's last state (Cai et al. 2024)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.adapters import TargetAdapter
from ..targets.target import Target
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig, LossOutput
from .drafting.drafter import Reading
from .loss.chains import chain_starts, mean_of
from .loss.chunked import chunk_size, summed_loss
from .loss.functions import output_layer_rows
from .start.closed_form import linear_map


@dataclass(kw_only=True)
class MedusaConfig(HeadConfig):
    """A Medusa head's keys."""

    type: str = "medusa"
    loss: dict[str, float] = field(default_factory=lambda: {"hard_ce": 1.0})
    num_residual_blocks: int = 1  # per head
    # own: an output layer per head, at first a copy of the target's (its drafted rows); shared: the target's, frozen
    output: str = "own"
    # above 0: Medusa-2. Low-rank adapters on the target's linear layers train with the heads, and the adapted target is
    # the one whose text is drafted and verified
    target_lora_rank: int = 0
    target_lora_alpha: float = 16.0  # adapters are scaled by target_lora_alpha / target_lora_rank
    # the target's own loss: KL divergence from the target without adapters, or cross entropy on the data's tokens
    self_distillation: bool = True
    head_weight: float = 0.2  # weight of the heads' loss, which is added to the target's own
    target_learning_rate_scale: float = 0.25  # the adapters' learning rate as a share of the heads'

    @property
    def reads_layers(self) -> bool:
        return self.target_lora_rank > 0  # it runs them with its adapters

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output not in ("own", "shared"):
            raise BadInput(f"output {self.output!r}: expected own or shared")
        if self.feature_layers:
            raise BadInput(f"feature_layers: {self.type} reads the state after the final norm only")
        self.check_least(1, "num_residual_blocks")
        self.check_least(0, "target_lora_rank")
        for name in ("target_lora_alpha", "head_weight", "target_learning_rate_scale"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise BadInput(f"{name} {value}: expected more than 0")


class ResidualBlock(nn.Module):
    """x + silu(W x + b) of states [..., D] (eq. 1). A new block is the identity."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass
class MedusaState:
    """The state of drafting."""

    hidden: Tensor  # [B, D] the target's post-norm state at the last position it has read


class MedusaHead(DraftHead):
    """Head k reads the post-norm state h_t and predicts x_{t+2+k}; x_{t+1} comes from the target's own lm_head.

    Parameters are named as in the FasterDecoding layout: `{k}.{j}.linear` for block j of head k, and for own output
    layers `{k}.{num_residual_blocks}`.
    """

    config_class, title = MedusaConfig, "Medusa"
    reads_context = False
    default_draft_tokens = 4

    def __init__(self, config: MedusaConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: MedusaConfig = config
        self.max_draft_tokens = config.num_depths
        self.has_one_output = config.output == "shared"
        for k in range(config.num_depths):
            parts: list[nn.Module] = [ResidualBlock(target.hidden_size) for _ in range(config.num_residual_blocks)]
            if config.output == "own":
                parts.append(self.new_output_layer())
            self.add_module(str(k), nn.Sequential(*parts))
        self.adapts_target = config.target_lora_rank > 0
        if self.adapts_target:
            self.adapter = TargetAdapter(target, rank=config.target_lora_rank, alpha=config.target_lora_alpha)

    def serving_config(self) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "num_heads": self.num_depths,
            "num_hidden_layers": self.config.num_residual_blocks,
            "medusa_num_heads": self.num_depths,
            "medusa_num_layers": self.config.num_residual_blocks,
            "medusa_fc_bias": True,
        }

    def learning_rate_scales(self) -> dict[str, float]:
        return {"adapter.": self.config.target_learning_rate_scale}

    def loss(
        self, batch: DraftBatch, denominators: Tensor | None = None, *, num_depths: int | None = None
    ) -> LossOutput:
        """The heads' loss; for Medusa-2 the target's own loss plus head_weight times it (section 2.2.2).

        The target's own is summed over all supervised tokens and divided by the first head's denominator, which has one
        token less per answer, so that it does not depend on how rows are split into batches.
        """
        out = super().loss(batch, denominators, num_depths=num_depths)
        if not self.adapts_target:
            return out
        counts = out.depth_count if denominators is None else denominators
        own = mean_of(self._target_loss(batch), counts[0])
        return replace(out, loss=own + self.config.head_weight * out.loss)

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        states = self._cast(starts.take(batch.output.post_norm))  # [B, S, D]
        for depth in range(starts.num_depths):
            yield self.blocks_of(depth)(states)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.restricted_logits(hidden) if self.has_one_output else self.output_of(depth)(hidden)

    def blocks_of(self, depth: int) -> nn.Module:
        """The residual blocks of a depth."""
        return self._parts(depth)[: self.config.num_residual_blocks]

    def output_of(self, depth: int) -> nn.Linear:
        """The output layer of a depth, where each has its own."""
        return cast(nn.Linear, self._parts(depth)[-1])

    def vocabulary_matrices(self) -> list[Tensor]:
        return [] if self.config.output == "shared" else [self.output_of(k).weight for k in range(self.num_depths)]

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> None:
        """For each depth, fit a linear map from the target's state to the one that predicts the drafted token, into its
        own output layer; the blocks are the identity then."""
        for depth in range(self.num_depths if self.config.output == "own" else 0):
            reads, wanted = list[Tensor](), list[Tensor]()
            for batch in batches:
                starts = chain_starts(batch.loss_mask, self.num_depths)
                at = starts.valid[..., depth]
                reads.append(self._cast(starts.take(batch.output.post_norm))[at])
                wanted.append(starts.take(batch.output.post_norm, offset=depth + 1)[at])
            weight = linear_map(torch.cat(reads), torch.cat(wanted))
            if weight is not None:
                rows = output_layer_rows(self.target.output_layer, self.vocabulary)["weight"]
                self.output_of(depth).weight.copy_(rows.float() @ weight.T)

    def new_output_layer(self) -> nn.Linear:
        """A trainable copy of the drafted rows of the target's output layer."""
        source = output_layer_rows(self.target.output_layer, self.vocabulary)
        layer = nn.Linear(self.target.hidden_size, len(source["weight"]), bias="bias" in source)
        layer.load_state_dict(source)
        return layer

    def scale_outputs(self, factors: Sequence[float]) -> None:
        """Scale each head's own output layer; a shared one cannot be scaled."""
        for depth, factor in enumerate(factors if self.config.output == "own" else []):
            for parameter in self.output_of(depth).parameters():
                parameter.mul_(factor)

    def begin(self, *, batch_size: int, max_length: int) -> MedusaState:
        return MedusaState(self._weight.new_zeros(batch_size, self.target.hidden_size))

    def commit(self, state: MedusaState, read: Reading) -> None:
        state.hidden = self._cast(read.output.at(read.last).post_norm[:, 0])  # [B, D]

    @torch.no_grad()
    def first_logits(self, state: MedusaState) -> Tensor:
        return self.draft_logits(self.blocks_of(0)(state.hidden), 0)  # [B, Vd]

    @torch.no_grad()
    def expand(self, state: MedusaState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        """Heads do not read drafted tokens: all nodes of a depth share its scores."""
        logits = self.draft_logits(self.blocks_of(depth)(state.hidden), depth)  # [B, Vd]
        return logits[:, None].expand(-1, tokens.shape[1], -1)

    def _target_loss(self, batch: DraftBatch) -> Tensor:
        """The adapted target's own loss on the supervised tokens, summed: a scalar."""
        states, supervised = batch.output.post_norm[:, :-1], batch.loss_mask[:, 1:]  # [B, T - 1, D], [B, T - 1]
        teacher = states.detach()
        if self.config.self_distillation:
            # without autocast, as the adapted target's states were computed
            with torch.no_grad(), self.adapter.off(), torch.autocast(states.device.type, enabled=False):
                teacher = self.target.forward(batch.input_ids).post_norm[:, :-1]
        mix = {"kl": 1.0} if self.config.self_distillation else {"hard_ce": 1.0}
        with torch.autocast(states.device.type, enabled=False):
            return summed_loss(
                states[supervised],
                replace(self.loss_spec(0), mix=mix, draft_logits=self.target.logits, vocabulary=None),
                labels=batch.input_ids[:, 1:][supervised],
                teacher_hidden=teacher[supervised],
                weights=None if batch.weights is None else batch.weights[:, 1:][supervised],
                size=chunk_size(2 * self.target.vocab_size, states.device),
            )

    def _parts(self, k: int) -> nn.Sequential:
        return cast(nn.Sequential, self.get_submodule(str(k)))

    @property
    def _weight(self) -> Tensor:
        return next(self.blocks_of(0).parameters())

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self._weight.dtype)
