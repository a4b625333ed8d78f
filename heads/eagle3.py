"""EAGLE-3: decoder layers that extrapolate fused target features, trained by their own unrolled drafting (Li 2025).

The first layer reads, at position t, the embedding of x_{t+1} beside a hidden state: at depth 0 the fused low, middle
and high features of the target at t, at depth k > 0 the head's own output of depth k - 1. The last layer's output,
normalised, goes through an own output layer over the draft vocabulary.

Training-time test (section 3.2): each chain start t is unrolled num_depths times with gradients through all of them.
In decoding, a chain that starts at t sees keys of true features at positions <= t and its own drafted keys behind them.
So in training the keys of depth 0 are computed once, and at depth k a query at start t attends to those at positions
<= t and to its own keys of depths 1..k, one per depth: the diagonal of the attention (recurrent.py).

Served conventions (vLLM 0.32, SGLang 0.5): embedding first in the concatenation, positions from 0 (x_{t+1} at rotary
position t), drafted hidden states fed back before the output norm (after it with norm_output, EAGLE 3.1), features in
ascending layer order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig
from .drafter import Reading
from .nn.chain_attention import blocks_of
from .nn.layers import Attention, GatedMLP, RMSNorm, Rotary, llama_config, serving_keys
from .recurrent import Chains, Context, KeysValues, LlamaLayer, Queries, RecurrentState, attend
from .target import Target, TargetOutput


@dataclass(kw_only=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head's keys; feature_layers None: see `default_feature_layers`."""

    type: str = "eagle3"
    num_depths: int = 7
    num_layers: int = 1  # decoder layers
    # EAGLE 3.1: an RMSNorm on each feature before they are fused, and drafted states fed back after the output norm
    fc_norm: bool = False
    norm_output: bool = False
    # of heads that others trained:
    # the first layer's residual is the normalised hidden state (the speculators library; SGLang serves no such head)
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one RMSNorm over all features side by side, before they are fused
    architecture: dict[str, Any] = field(default_factory=dict)  # values unlike the target's, by `layers.ARCHITECTURE`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise BadInput("norm_before_fc: not together with fc_norm")
        if self.num_layers < 1:
            raise BadInput(f"num_layers {self.num_layers}: expected at least 1")

    def resolved(self, target: Target) -> "Eagle3Config":
        layers = default_feature_layers(target.num_layers) if self.feature_layers is None else self.feature_layers
        return replace(self, feature_layers=layers)


def default_feature_layers(num_layers: int) -> list[int]:
    """Low, middle and high of n target layers: [2, n/2, n-3], the engines' default; of few layers [1, n/2, n-1]."""
    usual = [2, num_layers // 2, num_layers - 3]
    return usual if usual == sorted(set(usual)) else sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads [embedding, hidden], both normalised; the residual is the raw hidden."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.hidden_norm = RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, in_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(config)

    def read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[B, Q, D] twice -> [B, Q, 2D], what the projections read."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def forward(self, x: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """x [B, Q, 2D] and the residual hidden [B, Q, D] -> [B, Q, D]."""
        hidden = hidden + attend(self.self_attn, x, rotary, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NormedResidualLayer(Eagle3Layer):
    """The residual is the hidden state after `hidden_norm`."""

    def forward(self, x: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        return super().forward(x, self.hidden_norm(hidden), rotary, context)


class Eagle3Head(DraftHead):
    """EAGLE-3 with the tensor names that vLLM, SGLang and TensorRT-LLM load: fc, midlayer.*, norm, lm_head; of several
    layers layers.{i}.*; with fc_norm, fc_norm.{i}; with norm_before_fc, input_norm."""

    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        self.config: Eagle3Config = config.resolved(target)
        layers = list(self.feature_layers)
        if not layers or layers != sorted(set(layers)):
            raise BadInput(f"head.feature_layers: {layers}: must ascend without repeats, as engines read")
        self.llama = llama_config(target.config, config.architecture)
        size, eps, num_features = target.hidden_size, self.llama.rms_norm_eps, len(layers)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps=eps) for _ in range(num_features))
        self.fc = nn.Linear(num_features * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_features * size, eps=eps)
        first_class = NormedResidualLayer if config.norm_before_residual else Eagle3Layer
        first, more = first_class(self.llama), range(config.num_layers - 1)
        if config.num_layers == 1:
            self.midlayer = first
        else:
            self.layers = nn.ModuleList([first, *(LlamaLayer(self.llama) for _ in more)])
        self.norm = RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or target.vocab_size, bias=False)
        self.rotary = Rotary(self.llama)
        with torch.no_grad():  # start from the target's own output: final norm gain and the drafted rows of lm_head
            self.norm.weight.copy_(target.final_norm_scale())
            rows = target.output_layer.weight
            self.lm_head.weight.copy_(rows if self.vocabulary is None else rows[self.vocabulary.to_target])

    def serving_config(self) -> dict[str, Any]:
        layers = self.feature_layers
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **serving_keys(self.llama, num_layers=self.config.num_layers),
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": self.lm_head.out_features,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "num_aux_hidden_states": len(layers),
            "norm_before_residual": self.config.norm_before_residual,
            "norm_before_fc": self.config.norm_before_fc,
            "fc_norm": self.config.fc_norm,
            "norm_output": self.config.norm_output,
            # vLLM counts layer inputs, as HF hidden_states does; SGLang counts layer outputs
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers],
                "use_aux_hidden_state": True,
                "norm_before_fc": self.config.norm_before_fc,
            },
        }

    @property
    def has_one_output(self) -> bool:
        return True

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        limit = batch.input_ids.shape[1] + starts.num_depths
        fused = self._fuse(batch.output)  # [B, T, D]
        read = self._read(batch.input_ids.roll(-1, 1), fused)  # [B, T, 2D] x_{t+1}; the last is never supervised
        chains = Chains(self._contexts(read, fused, batch, starts, limit), self.llama, starts.num_depths)
        x, hidden = starts.take(read), starts.take(fused)  # [B, S, 2D], [B, S, D]
        for depth in range(starts.num_depths):
            rotary = self.rotary(starts.take(batch.positions) + depth, like=x, num_positions=limit)
            if depth == 0:
                hidden = chains.advance(self._step, hidden, x, rotary)  # [B, S, D]
            else:
                tokens = starts.take(batch.input_ids, offset=depth + 1)
                hidden = chains.advance(self._draft, hidden, tokens, rotary)
            yield hidden

    def _draft(
        self, hidden: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context]
    ) -> tuple[Tensor, list[KeysValues]]:
        """A depth of chains behind the first: tokens [B, S] beside the output [B, S, D] of the depth before."""
        hidden = self._fed_back(hidden)
        x = self._read(tokens, hidden)
        contexts[0].draft(*self._first.self_attn.keys_values(x, rotary))
        return self._step(hidden, x, rotary, contexts)

    def _step(
        self, hidden: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context]
    ) -> tuple[Tensor, list[KeysValues]]:
        """x [B, S, 2D] and the residual hidden [B, S, D] through all layers; returns as `recurrent.Step`."""
        hidden = self._first(x, hidden, rotary, contexts[0])
        for layer, context in zip(self._more, contexts[1:], strict=True):
            if len(contexts[0].drafted) > len(context.drafted):
                context.draft(*layer.keys_values(hidden, rotary))
            hidden = layer(hidden, rotary, context)
        return hidden, [context.drafted[-1] for context in contexts if context.drafted]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return self.norm(hidden)

    def begin(self, *, batch_size: int, max_length: int) -> RecurrentState:
        return RecurrentState.empty(
            batch_size=batch_size, max_length=max_length, num_layers=self.config.num_layers, like=self.fc.weight
        )

    @torch.no_grad()
    def commit(self, state: RecurrentState, read: Reading) -> None:
        queries = state.reading(read, self._fuse(read.output))
        state.commit(read, self._decode(state, read.next_tokens, queries))

    @torch.no_grad()
    def first_logits(self, state: RecurrentState) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: RecurrentState, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        queries = state.drafting(tokens, parents, depth=depth)
        queries.hidden = self._fed_back(queries.hidden)
        state.hidden = self._decode(state, tokens, queries)  # [B, F, D]
        return self.draft_logits(state.hidden, depth)

    @property
    def _first(self) -> Eagle3Layer:
        return self.midlayer if self.config.num_layers == 1 else cast(Eagle3Layer, self.layers[0])

    @property
    def _more(self) -> list[LlamaLayer]:
        return [] if self.config.num_layers == 1 else cast(list[LlamaLayer], list(self.layers)[1:])

    def _fuse(self, output: TargetOutput) -> Tensor:
        """The target's features [B, T, L, D] -> [B, T, D]."""
        features = output.features.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            features = torch.stack([norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)], 2)
        fused = features.flatten(2)  # [B, T, L * D]
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused)

    def _fed_back(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def _read(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        return self._first.read(self.target.embed(token_ids).to(hidden.dtype), hidden)

    def _contexts(self, x: Tensor, fused: Tensor, batch: DraftBatch, starts: ChainStarts, limit: int) -> list[Context]:
        """For each layer, keys and values of true features x [B, T, 2D] at all positions, seen up to each start."""
        rotary = self.rotary(batch.positions, like=fused, num_positions=limit)
        mask = batch.visibility(starts.positions, dtype=fused.dtype)  # [B, 1, S, T]
        contexts = [Context(*self._first.self_attn.keys_values(x, rotary), mask, starts.blocks)]
        hidden = fused
        for i, layer in enumerate(self._more):  # what a further layer reads at all positions
            causal = batch.visibility(batch.row_positions, dtype=fused.dtype)
            blocks = blocks_of(range(fused.shape[1]), fused.device)
            below = Context(contexts[-1].keys, contexts[-1].values, causal, blocks)
            hidden = self._first(x, hidden, rotary, below) if i == 0 else self._more[i - 1](hidden, rotary, below)
            contexts.append(Context(*layer.keys_values(hidden, rotary), mask, starts.blocks))
        return contexts

    def _decode(self, state: RecurrentState, token_ids: Tensor, queries: Queries) -> Tensor:
        """One forward over the cache. token_ids [B, Q] -> [B, Q, D]."""
        x = self._read(token_ids, queries.hidden)
        rotary = self.rotary(queries.positions, like=x, num_positions=state.cache.max_length)
        keys, values = state.cache.update(*self._first.self_attn.keys_values(x, rotary), 0)
        hidden = self._first(x, queries.hidden, rotary, Context(keys, values, queries.mask))
        for i, layer in enumerate(self._more, 1):
            keys, values = state.cache.update(*layer.keys_values(hidden, rotary), i)
            hidden = layer(hidden, rotary, Context(keys, values, queries.mask))
        return hidden
