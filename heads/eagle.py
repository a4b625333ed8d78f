"""EAGLE-1, EAGLE-2 and HASS: decoder layers that extrapolate the target's own last state (Li et al. 2024; Zhang 2024).

The head reads, at position t, the embedding of x_{t+1} beside a feature: at depth 0 the target's post-norm state at t,
at depth k > 0 its own output of depth k - 1. Its output estimates the target's post-norm state at the next position,
and the target's own frozen output layer turns it into logits.

EAGLE-1 (num_depths 1) trains one step from true features, against which noise stands in for the head's own errors.
HASS (num_depths 3) trains in the context of decoding: the chain at start t is unrolled on its own features, whose
gradient stops between depths (`detach`; section 3.2). EAGLE-2 drafts dynamic trees from the same weights.

Served conventions (vLLM 0.32, SGLang 0.5): the feature is the state AFTER the target's final norm; embedding first in
the concatenation; positions from 0 (x_{t+1} at rotary position t); no input norm in layer 0 and none behind the last;
embedding and output layer are the target's, so no cut draft vocabulary. SGLang needs fc.bias, vLLM leaves it out:
without `bias` it is served as zeros, and trained ones are SGLang's alone.
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
from .nn.layers import Attention, GatedMLP, RMSNorm, Rotary, llama_config
from .recurrent import Context, Queries, RecurrentState, advance, attend
from .target import Target


@dataclass(kw_only=True)
class EagleConfig(HeadConfig):
    """num_depths: 1 is EAGLE-1, 3 is HASS; the default is as deep as the head drafts. num_layers: decoder layers.

    bias: whether `fc` has a trained one. detach: stop the gradient between depths. architecture: what of the layers is
    not as in the target (`layers.ARCHITECTURE`), as heads that others trained have it; empty: nothing.
    noise: width of the uniform noise on the target's features in training, U(-noise/2, noise/2) in feature units. The
    papers take 0.2; their code also scales it by 512 / tokens of the row, which we do not: rows are padded.
    """

    type: str = "eagle"
    num_depths: int = 5
    loss: dict[str, float] = field(default_factory=lambda: {"feature": 1.0, "soft_ce": 0.1})
    num_layers: int = 1
    bias: bool = False
    detach: bool = True
    noise: float = 0.0
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


class EagleLayer(nn.Module):
    """A Llama decoder layer; the first one reads what `fc` fused and does not normalise it."""

    def __init__(self, *, config: Any, is_first: bool):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.Identity() if is_first else RMSNorm(size, eps=eps)
        self.self_attn = Attention(
            in_size=size,
            hidden_size=size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(hidden_size=size, intermediate_size=config.intermediate_size)

    def keys_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, Q, D] -> two of [B, Nkv, Q, H]."""
        return self.self_attn.keys_values(self.input_layernorm(hidden), rotary)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """[B, Q, D] -> [B, Q, D]."""
        hidden = hidden + attend(self.self_attn, self.input_layernorm(hidden), rotary, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


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
        self.layers = nn.ModuleList(EagleLayer(config=self.llama, is_first=i == 0) for i in range(config.num_layers))
        self.rotary = Rotary(self.llama)

    def serving_config(self) -> dict[str, Any]:
        llama = self.llama.to_dict()
        keys = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
        keys += " rms_norm_eps max_position_embeddings hidden_act rope_parameters bos_token_id eos_token_id"
        rope = llama["rope_parameters"]
        return {
            # SGLang reads the first; vLLM, told `method: eagle`, finds the second
            "architectures": ["LlamaForCausalLMEagle", "LlamaForCausalLM"],
            "model_type": "llama",
            **{key: llama[key] for key in keys.split()},
            "num_hidden_layers": self.config.num_layers,
            "rope_theta": rope.get("rope_theta", 10000.0),
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "vocab_size": self.target.vocab_size,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    @property
    def has_one_output(self) -> bool:
        return True

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        num_depths = starts.num_depths
        limit = batch.input_ids.shape[1] + num_depths
        features = batch.output.post_norm.to(self.fc.weight.dtype)  # [B, T, D]
        if self.training and self.config.noise:
            features = features + (torch.rand_like(features) - 0.5) * self.config.noise
        fused = self._fuse(batch.input_ids.roll(-1, 1), features)  # x_{t+1}; the last is never supervised
        contexts = self._contexts(fused, batch, starts, limit)
        x, hidden = starts.take(fused), fused  # [B, S, D]
        how = {"contexts": contexts, "config": self.llama, "num_depths": num_depths}
        for depth in range(num_depths):
            rotary = self.rotary(starts.take(batch.positions) + depth, like=x, num_positions=limit)
            if depth == 0:
                hidden, _ = advance(self._step, x, rotary, **how)  # [B, S, D]
            else:
                tokens = starts.take(batch.input_ids, offset=depth + 1)
                hidden = hidden.detach() if self.config.detach else hidden
                hidden, drafted = advance(self._draft, hidden, tokens, rotary, **how)
                for context, keys in zip(contexts, drafted, strict=True):
                    context.drafted.append(keys)
            yield hidden

    def _draft(self, hidden: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context]) -> Any:
        """A depth of chains behind the first: tokens [B, S] beside the last one's hidden [B, S, D]."""
        return self._step(self._fuse(tokens, hidden), rotary, contexts, is_drafted=True)

    def _step(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], contexts: list[Context], is_drafted: bool = False
    ) -> Any:
        """[B, S, D] through all layers: [B, S, D], and each layer's keys and values of it where it is drafted."""
        for layer, context in zip(self._layers, contexts, strict=True):
            if is_drafted:
                context.draft(*layer.keys_values(hidden, rotary))
            hidden = layer(hidden, rotary, context)
        return hidden, [context.drafted[-1] for context in contexts if is_drafted]

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    def begin(self, *, batch_size: int, max_length: int) -> RecurrentState:
        how = {"num_layers": len(self.layers), "like": self.fc.weight}
        return RecurrentState.empty(batch_size=batch_size, max_length=max_length, **how)

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
    def _layers(self) -> list[EagleLayer]:
        return cast(list[EagleLayer], list(self.layers))

    def _fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[B, Q] and [B, Q, D] -> [B, Q, D]."""
        return self.fc(torch.cat([self.target.embed(token_ids).to(hidden.dtype), hidden], -1))

    def _contexts(self, fused: Tensor, batch: DraftBatch, starts: ChainStarts, limit: int) -> list[Context]:
        """For each layer, the keys and values of true features at every position, seen up to each chain's start."""
        rotary = self.rotary(batch.positions, like=fused, num_positions=limit)
        seen = batch.visibility(starts.positions, dtype=fused.dtype)  # [B, 1, S, T]
        contexts, hidden = [], fused
        for i, layer in enumerate(self._layers):
            if i > 0:
                below, causal = contexts[-1], batch.visibility(batch.every, dtype=fused.dtype)
                every = blocks_of(range(fused.shape[1]), fused.device)
                hidden = self._layers[i - 1](hidden, rotary, Context(below.keys, below.values, causal, every))
            contexts.append(Context(*layer.keys_values(hidden, rotary), seen, starts.blocks))
        return contexts

    def _decode(self, state: RecurrentState, token_ids: Tensor, queries: Queries) -> Tensor:
        """One forward over the cache. token_ids [B, Q] -> [B, Q, D]."""
        hidden = self._fuse(token_ids, queries.hidden)
        rotary = self.rotary(queries.positions, like=hidden, num_positions=state.cache.max_length)
        for i, layer in enumerate(self._layers):
            keys, values = state.cache.update(*layer.keys_values(hidden, rotary), i)
            hidden = layer(hidden, rotary, Context(keys, values, queries.mask))
        return hidden
