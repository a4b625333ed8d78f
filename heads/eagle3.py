"""EAGLE-3: one decoder layer that extrapolates fused target features, trained by its own unrolled drafting (Li 2025).

The layer reads, at position t, the embedding of x_{t+1} beside a hidden state: at depth 0 the fused low, middle and
high features of the target at t, at depth k > 0 the layer's own output of depth k - 1. Its output, normalised, goes
through an own output layer over the draft vocabulary.

Training-time test (section 3.2): each chain start t is unrolled num_depths times with gradients through all of them.
In decoding, a chain that starts at t sees keys of true features at positions <= t and its own drafted keys behind them.
So in training the keys of depth 0 are computed once, and at depth k a query at start t attends to those at positions
<= t and to its own keys of depths 1..k, one per depth: the diagonal of the attention, with one softmax over both.

Served conventions (vLLM 0.32, SGLang 0.5): embedding first in the concatenation, positions from 0 (x_{t+1} at rotary
position t), drafted hidden states fed back before the output norm, features in ascending layer order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..configs.errors import BadInput
from .base import ChainStarts, DraftBatch, DraftHead, HeadConfig, Reading
from .cache import SlotCache, tree_mask, visibility_mask
from .layers import Attention, GatedMLP, RMSNorm, Rotary, llama_config
from .target import Target, TargetOutput


@dataclass(kw_only=True)
class Eagle3Config(HeadConfig):
    """feature_layers None: [2, n/2, n-3] of n target layers, the engines' default; of few layers [1, n/2, n-1]."""

    type: str = "eagle3"
    num_depths: int = 7


def default_feature_layers(num_layers: int) -> list[int]:
    """Low, middle and high: the reference's choice where it gives three layers, else the widest ascending spread."""
    usual = [2, num_layers // 2, num_layers - 3]
    return usual if usual == sorted(set(usual)) else sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1})


@dataclass
class Context:
    """What the queries of one layer call may attend to: keys, values [B, Nkv, P, H] and an additive mask [B, 1, Q, P];
    and per query its own drafted keys and values, [B, Nkv, Q, H] for each depth."""

    keys: Tensor
    values: Tensor
    mask: Tensor
    drafted: list[tuple[Tensor, Tensor]]


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads [embedding, hidden], both normalised; the residual is the raw hidden."""

    def __init__(self, *, config: Any):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = Attention(
            in_size=2 * size,
            hidden_size=size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        self.post_attention_layernorm = RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(hidden_size=size, intermediate_size=config.intermediate_size)

    def read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[B, Q, D] twice -> [B, Q, 2D], what the projections read."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def forward(self, x: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """x [B, Q, 2D] and the residual hidden [B, Q, D] -> [B, Q, D]."""
        attention = self.self_attn
        num_queries = x.shape[1]
        queries = attention.group(attention.queries(x, rotary))  # [B, Nkv, G * Q, H] with G query heads per key head
        groups = attention.num_heads // attention.num_kv_heads
        mask = context.mask.to(x.dtype).repeat(1, 1, groups, 1)  # [B, 1, G * Q, P]
        if context.drafted:
            mixed = self._attend_with_diagonal(queries, mask, context, groups)
        else:
            mixed = F.scaled_dot_product_attention(queries, context.keys, context.values, attn_mask=mask)
        hidden = hidden + attention.output(mixed, num_queries)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _attend_with_diagonal(self, queries: Tensor, mask: Tensor, context: Context, groups: int) -> Tensor:
        """One softmax over the shared keys and each query's own drafted keys."""
        scale = 1 / math.sqrt(queries.shape[-1])
        shared = queries @ context.keys.transpose(-1, -2) * scale + mask  # [B, Nkv, G * Q, P]
        own_keys = torch.stack([keys for keys, _ in context.drafted], -2)  # [B, Nkv, Q, depths, H]
        own_values = torch.stack([values for _, values in context.drafted], -2)
        own_keys, own_values = own_keys.repeat(1, 1, groups, 1, 1), own_values.repeat(1, 1, groups, 1, 1)
        own = (queries[..., None, :] * own_keys).sum(-1) * scale  # [B, Nkv, G * Q, depths]
        weights = torch.cat([shared, own], -1).softmax(-1, dtype=torch.float32).to(queries.dtype)
        shared, own = weights.split([context.keys.shape[2], len(context.drafted)], -1)
        return shared @ context.values + (own[..., None] * own_values).sum(-2)  # [B, Nkv, G * Q, H]


@dataclass
class Eagle3State:
    """cache: keys and values of positions read, then of drafted tokens. position [B]: the last committed one.

    hidden [B, F, D]: the layer's output at the last committed position (F is 1), then for the tokens of the last
    expansion. seen [B, F, drafted] bool: which drafted slots each of them attends to.
    """

    cache: SlotCache
    max_length: int
    hidden: Tensor
    position: Tensor
    seen: Tensor


class Eagle3Head(DraftHead):
    """EAGLE-3 with the tensor names that vLLM, SGLang and TensorRT-LLM load: fc, midlayer.*, norm, lm_head."""

    config_class = Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target, draft_token_ids: Tensor | None = None):
        super().__init__(config, target, draft_token_ids)
        if config.feature_layers is None:
            config.feature_layers = default_feature_layers(target.num_layers)
        if not config.feature_layers or config.feature_layers != sorted(set(config.feature_layers)):
            raise BadInput(
                f"head.feature_layers: {config.feature_layers}: must ascend without repeats, as engines read"
            )
        self.llama = llama_config(target.config)
        size = target.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.midlayer = Eagle3Layer(config=self.llama)
        self.norm = RMSNorm(size, eps=self.llama.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or target.vocab_size, bias=False)
        self.rotary = Rotary(self.llama)
        with torch.no_grad():  # start from the target's own output: final norm gain and the drafted rows of lm_head
            self.norm.weight.copy_(target.final_norm_scale())
            rows = target.output_layer.weight
            self.lm_head.weight.copy_(rows if self.vocabulary is None else rows[self.vocabulary.to_target])

    def serving_config(self) -> dict[str, Any]:
        layers = self.feature_layers
        llama = self.llama.to_dict()
        keys = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        keys += " rms_norm_eps max_position_embeddings hidden_act rope_parameters bos_token_id eos_token_id"
        rope = llama["rope_parameters"]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: llama[key] for key in keys.split()},
            "rope_theta": rope.get("rope_theta", 10000.0),
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": self.lm_head.out_features,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "num_aux_hidden_states": len(layers),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            # vLLM counts layer inputs, as HF hidden_states does; SGLang counts layer outputs
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers],
                "use_aux_hidden_state": True,
                "norm_before_fc": False,
            },
        }

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        num_rows, num_positions = batch.input_ids.shape
        every = torch.arange(num_positions, device=batch.input_ids.device).expand(num_rows, -1)  # [B, T]
        limit = num_positions + self.num_depths
        fused = self._fuse(batch.output)  # [B, T, D]
        next_ids = batch.input_ids.roll(-1, 1)  # [B, T] x_{t+1}; the last is never supervised
        x = self._read(next_ids, fused)  # [B, T, 2D]
        keys, values = self._keys_values(x, every, limit)
        mask = visibility_mask(starts.positions, extent=num_positions, dtype=fused.dtype)  # [B, 1, S, T]
        context = Context(keys, values, mask, [])
        x, hidden = starts.take(x), starts.take(fused)  # [B, S, 2D], [B, S, D]
        for depth in range(self.num_depths):
            positions = starts.positions + depth
            if depth > 0:
                x = self._read(starts.take(batch.input_ids, offset=depth + 1), hidden)
                context.drafted.append(self._keys_values(x, positions, limit))
            rotary = self.rotary(positions, like=x, num_positions=limit)
            hidden = self.midlayer(x, hidden, rotary, context)  # [B, S, D]
            yield hidden

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return self.norm(hidden)

    def begin(self, *, batch_size: int, max_length: int) -> Eagle3State:
        nothing = self.fc.weight.new_zeros(batch_size, 1, 0)
        return Eagle3State(SlotCache(num_layers=1, max_length=max_length), max_length, nothing, nothing, nothing.bool())

    @torch.no_grad()
    def commit(self, state: Eagle3State, read: Reading) -> None:
        positions = read.start[:, None] + torch.arange(read.tokens.shape[1], device=read.start.device)  # [B, Q]
        mask = visibility_mask(positions, extent=state.max_length, dtype=self.fc.weight.dtype)
        out = self._decode(state, read.next_tokens, self._fuse(read.output), positions, positions, mask)  # [B, Q, D]
        state.hidden = out[torch.arange(len(out), device=out.device), read.last][:, None]  # [B, 1, D]
        state.position = read.start + read.last
        state.seen = state.seen[:, :1, :0]

    @torch.no_grad()
    def first_logits(self, state: Eagle3State) -> Tensor:
        return self.draft_logits(state.hidden[:, 0], 0)

    @torch.no_grad()
    def expand(self, state: Eagle3State, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        positions = (state.position + depth)[:, None].expand_as(tokens)  # [B, F] rotary
        how = {"extent": state.max_length, "dtype": self.fc.weight.dtype}
        if parents is None:  # a chain: slots and positions are the same, and all before is seen
            hidden, slots, mask = state.hidden, positions, visibility_mask(positions, **how)
        else:
            rows = torch.arange(len(tokens), device=tokens.device)[:, None]
            hidden = state.hidden[rows, parents]  # [B, F, D]
            itself = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
            state.seen = torch.cat([state.seen[rows, parents], itself], -1)  # [B, F, drafted]
            num_before = state.seen.shape[-1] - tokens.shape[1]
            slots = state.position[:, None] + 1 + num_before + torch.arange(tokens.shape[1], device=tokens.device)
            mask = tree_mask(state.position, state.seen, positions=positions, **how)
        state.hidden = self._decode(state, tokens, hidden, positions, slots, mask)  # [B, F, D]
        return self.draft_logits(state.hidden, depth)

    def _fuse(self, output: TargetOutput) -> Tensor:
        return self.fc(output.features.flatten(2).to(self.fc.weight.dtype))  # [B, T, L * D] -> [B, T, D]

    def _read(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        return self.midlayer.read(self.target.embed(token_ids).to(hidden.dtype), hidden)

    def _keys_values(self, x: Tensor, positions: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        return self.midlayer.self_attn.keys_values(x, self.rotary(positions, like=x, num_positions=limit))

    def _decode(
        self, state: Eagle3State, token_ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, mask: Tensor
    ) -> Tensor:
        """One forward over the cache. token_ids, positions, slots [B, Q]; hidden [B, Q, D] -> [B, Q, D]."""
        x = self._read(token_ids, hidden)
        rotary = self.rotary(positions, like=x, num_positions=state.max_length)
        state.cache.seek(slots, extent=state.max_length)
        keys, values = state.cache.update(*self.midlayer.self_attn.keys_values(x, rotary), 0)
        return self.midlayer(x, hidden, rotary, Context(keys, values, mask, []))
