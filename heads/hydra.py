"""Hydra and Hydra++: draft heads that also read the tokens drafted before them (Ankner et al. 2024, arXiv 2402.05109).

Head k predicts x_{t+2+k} from the concatenation of the target's post-norm state at t and the embeddings of x_{t+1},
..., x_{t+1+k}: unlike Medusa's heads it is conditioned on the drafted path. Hydra++ adds prefix attention: one decoder
layer over the target's post-norm states of the whole prefix, whose output at t replaces the state.

Differences from the published code: the skip of a head's first block starts as the selection of the state, and the
prefix layer as the identity, so that a fresh head scores as the target's output layer does; deeper blocks have their
own weights; the prefix layer's output is not normalised again.

We know of no serving engine that loads Hydra heads: tensor names and config keys are our own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .base import ChainStarts, DraftBatch
from .decoders.cache import SlotCache
from .drafter import Reading
from .medusa import BlocksConfig, BlocksHead, ResidualBlock
from .nn.layers import Rotary, llama_config
from .recurrent import Context, LlamaLayer
from .target import Target


@dataclass(kw_only=True)
class HydraConfig(BlocksConfig):
    """A Hydra head's keys."""

    type: str = "hydra"
    prefix_attention: bool = False  # Hydra++


@dataclass
class HydraState:
    """The state of drafting."""

    cache: SlotCache | None  # the prefix layer's keys and values, by position; None without prefix attention
    hidden: Tensor  # [B, 1, D] the target's state at the last position it has read, or the prefix layer's output there
    anchor: Tensor  # [B, 1] the token that follows it
    path: Tensor  # [B, F, n] for each token of the last expansion, all tokens from the anchor up to it


class HydraHead(BlocksHead):
    """Tensors: `blocks.{k}.{j}` block j of head k, `lm_heads.{k}` its own output layer, `prefix.*` the prefix layer."""

    config_class = HydraConfig

    def __init__(self, config: HydraConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: HydraConfig = config
        self.reads_context = config.prefix_attention
        self.prefix: LlamaLayer | None = None
        if config.prefix_attention:
            llama = llama_config(target.config)
            self.prefix, self.rotary = LlamaLayer(llama), Rotary(llama)
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)  # so that the layer is the identity
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
        size = target.hidden_size
        self.blocks, self.lm_heads = nn.ModuleList(), nn.ModuleList()
        for k in range(config.num_depths):
            widths = [(k + 2) * size] + [size] * (config.num_blocks - 1)  # the state and k + 1 embeddings come in
            self.blocks.append(nn.Sequential(*[ResidualBlock(size, in_size=width) for width in widths]))
            if config.output == "own":
                self.lm_heads.append(self.new_output_layer())

    def serving_config(self) -> dict[str, Any]:
        return {
            "model_type": "hydra",
            "architectures": ["HydraModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": self.config.draft_vocab_size or self.target.vocab_size,
            "num_depths": self.num_depths,
            "num_hidden_layers": self.config.num_blocks,
            "prefix_attention": self.config.prefix_attention,
        }

    def inputs(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        states = self._cast(batch.output.post_norm)  # [B, T, D]
        x = starts.take(states)  # [B, S, D]
        if self.prefix is not None:
            limit = batch.input_ids.shape[1]
            rotary = self.rotary(batch.positions, like=states, num_positions=limit)
            keys, values = self.prefix.keys_values(states, rotary)
            context = Context(keys, values, batch.visibility(starts.positions, dtype=x.dtype))
            x = self.prefix(x, x, self.rotary(starts.take(batch.positions), like=x, num_positions=limit), context)
        for depth in range(starts.num_depths):
            embedded = self.target.embed(starts.take(batch.input_ids, offset=depth + 1))  # [B, S, D]
            x = torch.cat([x, self._cast(embedded)], -1)  # [B, S, (depth + 2) * D]
            yield x

    def blocks_of(self, depth: int) -> nn.Module:
        return self.blocks[depth]

    def output_of(self, depth: int) -> nn.Module:
        return self.lm_heads[depth]

    def set_map(self, depth: int, weight: Tensor) -> None:
        self._skip(depth).weight.copy_(weight.T)

    def scale_outputs(self, factors: Sequence[float]) -> None:
        """Scale the state that goes into the output layer."""
        for depth, factor in enumerate(factors):
            self._skip(depth).weight.mul_(factor)

    def _skip(self, depth: int) -> nn.Linear:
        """The skip connection of a depth's first block; a fresh head's other blocks are the identity."""
        return cast(nn.Linear, cast(nn.Sequential, self.blocks[depth])[0].skip)

    def begin(self, *, batch_size: int, max_length: int) -> HydraState:
        cache = SlotCache(num_layers=1, max_length=max_length) if self.config.prefix_attention else None
        ids = torch.zeros(batch_size, 1, dtype=torch.long, device=self._weight.device)
        hidden = self._weight.new_zeros(batch_size, 1, self.target.hidden_size)
        return HydraState(cache, hidden, ids, ids[..., None])

    @torch.no_grad()
    def commit(self, state: HydraState, read: Reading) -> None:
        state.hidden = self._cast(read.output.at(read.last).post_norm)  # [B, 1, D]
        state.anchor = read.next_tokens.gather(1, read.last[:, None])
        if self.prefix is None or state.cache is None:
            return
        states, positions, last = self._cast(read.output.post_norm), read.positions, (read.start + read.last)[:, None]
        num_slots = state.cache.max_length
        state.cache.seek(positions, extent=num_slots)
        rotary = self.rotary(positions, like=states, num_positions=num_slots)
        keys, values = state.cache.update(*self.prefix.keys_values(states, rotary), 0)
        context = Context(keys, values, state.cache.mask(last, dtype=keys.dtype))
        rotary = self.rotary(last, like=states, num_positions=num_slots)
        state.hidden = self.prefix(state.hidden, state.hidden, rotary, context)

    @torch.no_grad()
    def first_logits(self, state: HydraState) -> Tensor:
        state.path = state.anchor[..., None]  # [B, 1, 1]
        return self._score(state, 0)[:, 0]

    @torch.no_grad()
    def expand(self, state: HydraState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        path = state.path  # [B, F of the last depth, depth]
        if parents is not None:
            path = path.gather(1, parents[..., None].expand(-1, -1, path.shape[-1]))
        state.path = torch.cat([path, tokens[..., None]], -1)  # [B, F, depth + 1]
        return self._score(state, depth)

    def _score(self, state: HydraState, depth: int) -> Tensor:
        """[B, F, Vd] draft logits of head `depth` for the token after each path."""
        num_rows, num_nodes, _ = state.path.shape
        embedded = self._cast(self.target.embed(state.path.flatten(1)))  # [B, F * (depth + 1), D]
        embedded = embedded.reshape(num_rows, num_nodes, -1)  # [B, F, (depth + 1) * D]
        x = torch.cat([state.hidden.expand(-1, num_nodes, -1), embedded], -1)
        return self.draft_logits(self.blocks[depth](x), depth)
