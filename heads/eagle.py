"""EAGLE-1, EAGLE-2 and HASS: decoder layers that extrapolate the target's own last state (Li et al. 2024; Zhang 2024).

The head reads, at position t, the embedding of x_{t+1} beside a feature: at depth 0 the target's post-norm state at t,
at depth k > 0 its own output of depth k - 1. Its output estimates the target's post-norm state at the next position,
from which the target's own frozen output layer makes logits.

EAGLE-1 (num_depths 1) trains one step from true features, with noise in place of the head's own errors. HASS
(num_depths 3) trains in the context of decoding: the chain at start t is unrolled on its own features, whose gradient
stops between depths (`detach`; section 3.2). EAGLE-2 drafts dynamic trees from the same weights.

Served conventions (vLLM 0.32, SGLang 0.5): the feature is the state AFTER the target's final norm; embedding first in
the concatenation; positions from 0 (x_{t+1} at rotary position t); no input norm in layer 0 and none behind the last;
embedding and output layer are the target's, so no cut draft vocabulary. SGLang needs fc.bias, vLLM ignores it: without
`bias` zeros are saved, and a trained one is served by SGLang alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafter import Reading
from .nn.chain_attention import blocks_of
from .nn.layers import Rotary, llama_config, serving_keys
from .recurrent import Chains, Context, KeysValues, LlamaLayer, Queries, RecurrentState
from .target import Target


@dataclass(kw_only=True)
class EagleConfig(HeadConfig):
    """An EAGLE head's keys."""

    type: str = "eagle"
    num_depths: int = 5  # 1 is EAGLE-1, 3 is HASS; the default is as deep as the head drafts
    loss: dict[str, float] = field(default_factory=lambda: {"feature": 1.0, "soft_ce": 0.1})
    num_layers: int = 1  # decoder layers
    bias: bool = False  # whether `fc` has a trained one
    detach: bool = True  # stop the gradient between depths
    # width of the uniform noise on the target's features in training, U(-noise/2, noise/2) in feature units. The papers
    # take 0.2; their code also scales it by 512 / tokens of the row, which we do not: rows are padded
    noise: float = 0.0
    # values of the layers that differ from the target's (keys: `layers.ARCHITECTURE`), of heads that others trained
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1:
            raise BadInput(f"num_layers {self.num_layers}: expected at least 1")
        if self.noise < 0:
            raise BadInput(f"noise {self.noise}: expected 0 or more")
        if self.draft_vocab_size is not None:
            raise BadInput("draft_vocab_size: eagle drafts with the target's own output layer, its whole vocabulary")
        if self.feature_layers:
            raise BadInput("feature_layers: eagle reads the state after the final norm only")


class EagleHead(DraftHead):
    """EAGLE with the tensor names that vLLM and SGLang load: fc, layers.{i}.*; no embedding, norm or lm_head."""

    config_class = EagleConfig

    def __init__(self, config: EagleConfig, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: EagleConfig = config
        self.llama = llama_config(target.config, config.architecture)
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        if not config.bias:  # zeros in the file, which SGLang would otherwise leave at random values
            del self.fc.bias
            self.fc.register_buffer("bias", torch.zeros(size))
        self.layers = nn.ModuleList(LlamaLayer(self.llama, normalises_input=i > 0) for i in range(config.num_layers))
        self.rotary = Rotary(self.llama)

    def serving_config(self) -> dict[str, Any]:
        return {
            # SGLang reads the first; vLLM, told `method: eagle`, finds the second
            "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
            "model_type": "llama",
            **serving_keys(self.llama, num_layers=self.config.num_layers),
            "vocab_size": self.target.vocab_size,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    @property
    def has_one_output(self) -> bool:
        return True

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        limit = batch.input_ids.shape[1] + starts.num_depths
        features = batch.output.post_norm.to(self.fc.weight.dtype)  # [B, T, D]
        if self.training and self.config.noise:
            features = features + (torch.rand_like(features) - 0.5) * self.config.noise
        fused = self._fuse(batch.input_ids.roll(-1, 1), features)  # x_{t+1}; the last is never supervised
        chains = Chains(self._contexts(fused, batch, starts, limit), self.llama, starts.num_depths)
        x = hidden = starts.take(fused)  # [B, S, D]
        for depth in range(starts.num_depths):
            rotary = self.rotary(starts.take(batch.positions) + depth, like=x, num_positions=limit)
            if depth == 0:
                hidden = chains.advance(self._step, x, rotary)  # [B, S, D]
            else:
                tokens = starts.take(batch.input_ids, offset=depth + 1)
                hidden = hidden.detach() if self.config.detach else hidden
                hidden = chains.advance(self._draft, hidden, tokens, rotary)
            yield hidden

    def _draft(
        self, hidden: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context]
    ) -> tuple[Tensor, list[KeysValues]]:
        """A depth of chains behind the first: tokens [B, S] beside the output [B, S, D] of the depth before."""
        return self._step(self._fuse(tokens, hidden), rotary, contexts, is_drafted=True)

    def _step(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context], is_drafted: bool = False
    ) -> tuple[Tensor, list[KeysValues]]:
        """[B, S, D] through all layers: [B, S, D], and the keys and values that each layer added to its context."""
        for layer, context in zip(self._layers, contexts, strict=True):
            if is_drafted:
                context.draft(*layer.keys_values(hidden, rotary))
            hidden = layer(hidden, rotary, context)
        return hidden, [context.drafted[-1] for context in contexts if is_drafted]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    def begin(self, *, batch_size: int, max_length: int) -> RecurrentState:
        return RecurrentState.empty(
            batch_size=batch_size, max_length=max_length, num_layers=len(self.layers), like=self.fc.weight
        )

    @torch.no_grad()
    def commit(self, state: RecurrentState, read: Reading) -> None:
        features = read.output.post_norm.to(self.fc.weight.dtype)
        state.commit(read, self._decode(state, read.next_tokens, state.reading(read, features)))

    @torch.no_grad()
    def first_logits(self, state: RecurrentState) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: RecurrentState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        state.hidden = self._decode(state, tokens, state.drafting(tokens, parents, depth=depth))  # [B, F, D]
        return self.draft_logits(state.hidden, depth)

    @property
    def _layers(self) -> list[LlamaLayer]:
        return cast(list[LlamaLayer], list(self.layers))

    def _fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[B, Q] and [B, Q, D] -> [B, Q, D]."""
        return self.fc(torch.cat([self.target.embed(token_ids).to(hidden.dtype), hidden], -1))

    def _contexts(self, fused: Tensor, batch: DraftBatch, starts: ChainStarts, limit: int) -> list[Context]:
        """For each layer, the keys and values of true features at all positions, seen up to each chain's start."""
        rotary = self.rotary(batch.positions, like=fused, num_positions=limit)
        mask = batch.visibility(starts.positions, dtype=fused.dtype)  # [B, 1, S, T]
        contexts, hidden = [], fused
        for i, layer in enumerate(self._layers):
            if i > 0:  # what a further layer reads at all positions
                below, causal = contexts[-1], batch.visibility(batch.row_positions, dtype=fused.dtype)
                blocks = blocks_of(range(fused.shape[1]), fused.device)
                hidden = self._layers[i - 1](hidden, rotary, Context(below.keys, below.values, causal, blocks))
            contexts.append(Context(*layer.keys_values(hidden, rotary), mask, starts.blocks))
        return contexts

    def _decode(self, state: RecurrentState, token_ids: Tensor, queries: Queries) -> Tensor:
        """One forward over the cache. token_ids [B, Q] -> [B, Q, D]."""
        hidden = self._fuse(token_ids, queries.hidden)
        rotary = self.rotary(queries.positions, like=hidden, num_positions=state.cache.max_length)
        for i, layer in enumerate(self._layers):
            keys, values = state.cache.update(*layer.keys_values(hidden, rotary), i)
            hidden = layer(hidden, rotary, Context(keys, values, queries.mask))
        return hidden
