"""Assistants: a few narrow layers with queries only, which read the target's own last keys and values (Gemma 4).

At depth k the head reads the embedding of x_{t+1+k} beside a state, the target's after its final norm at t and then its
own output, through one projection into its width. Its queries, all at position t + 1, attend to keys and values of the
target at positions <= t: of the target's last layer of each kind that has its own. Engines store nothing for it; ours
computes these keys again from the states that enter the layers, and keeps those of the one or two. One output goes into
an output layer of its own width, another back into the next step, in the target's width.

Source: transformers' Gemma4AssistantForCausalLM and its candidate generator. Engines differ from it at two edges: vLLM
0.32 and SGLang rotate the queries to position t; of a sliding window of W tokens it sees W + 1 keys, vLLM W and
llama.cpp W - 1. Any target whose keys our layers can read from its states may have one; engines load those of Gemma 4
alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from ..targets.caches.attention import grouped_attention
from ..targets.caches.cache import placed
from ..targets.layers.target_output import TargetOutput
from ..targets.target import Target
from .base import ChainStarts, DraftBatch, HeadConfig
from .drafting.drafter import Reading
from .loss.functions import output_layer_rows
from .nn.chain_attention import attend_chains
from .nn.layers import EPSILONS, RMSNorm, first_of
from .nn.query_layer import CentroidOutput, QueryLayer, Rotation, TargetKeys
from .recurrent import ChainState, OwnOutputReader
from .start.closed_form import next_state_map

AHEAD = 1  # positions from t to the queries'
MORE = 1  # keys that a query sees in a sliding window, more than the target's own queries
FULL, SLIDING = "full_attention", "sliding_attention"
# keys of layers with full attention, as configs have them that know nothing of layers' own
LEGACY = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
WIDTH_STEP = 16  # a fresh head's width is a quarter of the target's, in steps of this

# queries [B, N, Q, H] of a layer, which reads the source of that index -> [B, Q, N, H]
Attend = Callable[[Tensor, int], Tensor]


@dataclass(kw_only=True)
class AssistantConfig(HeadConfig):
    """An assistant's keys."""

    type: str = "assistant"
    num_layers: int = 4
    hidden_size: int | None = None  # d, its width; None: a quarter of the target's
    intermediate_size: int | None = None  # of its MLPs; None: four times its width
    num_heads: int | None = None  # queries' heads; None: as many as the target's
    layer_types: list[str] | None = None  # whose keys each layer reads; None: the last full attention's, others sliding
    num_centroids: int | None = None  # of an imported head's output layer; None: all tokens are scored
    num_chosen: int | None = None  # groups of tokens that are scored

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_centroids", "num_chosen")
        self.check_least(1, *names)
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise BadInput(f"layer_types: {len(self.layer_types)} of them for num_layers {self.num_layers}")
        if (self.num_centroids is None) != (self.num_chosen is None):
            raise BadInput("num_centroids and num_chosen: one is set without the other")
        if self.num_centroids is not None and self.draft_vocab_size is not None:
            raise BadInput("num_centroids: groups the whole vocabulary, so draft_vocab_size must not be set")

    @property
    def reads_layers(self) -> bool:
        return True  # whose projections make the keys

    @property
    def is_fitted(self) -> bool:
        return True

    def resolved(self, target: Target) -> "AssistantConfig":
        """With all sizes, and the layers that are read. Raises BadInput if the target has no keys to read."""
        sources = sources_of(target)
        if self.layer_types is None:
            early = SLIDING if SLIDING in sources else FULL
            types = [early] * (self.num_layers - 1) + [FULL if FULL in sources else early]
        else:
            types = self.layer_types
        if missing := sorted(set(types) - sources.keys()):
            raise BadInput(f"layer_types: {', '.join(missing)}: {target.name} has {', '.join(sources)}")
        layers = sorted(sources[kind] for kind in set(types))
        if self.feature_layers not in (None, layers):
            raise BadInput(f"feature_layers: an assistant reads those whose keys it uses, {layers}")
        width = self.hidden_size or -(-target.hidden_size // (4 * WIDTH_STEP)) * WIDTH_STEP
        return replace(
            self,
            hidden_size=width,
            intermediate_size=self.intermediate_size or 4 * width,
            num_heads=self.num_heads or target.config.num_attention_heads,
            layer_types=types,
            feature_layers=layers,
        )


def sources_of(target: Target) -> dict[str, int]:
    """By kind of attention, the last layer of the target that makes keys and values of its own. Raises BadInput if
    there is none that can be read."""
    windowed = getattr(target.config, "sliding_window", None)
    types = target.layer_types or [SLIDING if windowed else FULL] * target.num_layers
    found = {
        kind: i
        for i, (kind, layer) in enumerate(zip(types, target.layers, strict=True))
        if kind in (FULL, SLIDING) and hasattr(getattr(layer, "self_attn", None), "k_proj")
        if hasattr(layer, "input_layernorm")
    }
    if not found or not hasattr(target.base, "rotary_emb"):
        needed = "layers with a norm before attention, keys of their own and rotary positions"
        raise BadInput(f"target {target.name}: an assistant needs {needed}")
    return found


@dataclass
class AssistantState(ChainState):
    """The state of drafting, whose cache holds the target's keys and values."""

    rotations: tuple[Rotation, ...] = ()  # by source, of the place of a round's queries
    masks: tuple[Tensor, ...] = ()  # by source, [B, 1, 1, extent]


class AssistantHead(OwnOutputReader):
    """An assistant under the tensor names of `gemma4_assistant`, without their prefix `model.`; `lm_head` is the table
    that is called an embedding there, and embeds nothing."""

    config_class, title = AssistantConfig, "assistant"
    has_one_output = True

    def __init__(self, config: AssistantConfig, target: Target, draft_token_ids: Tensor | None = None):
        config = config.resolved(target)
        super().__init__(config, target, draft_token_ids)
        self.config: AssistantConfig = config
        self.reads_post_norm = True
        self.sources = [TargetKeys(target, i) for i in self.feature_layers]
        self.window = next((source.window for source in self.sources if source.window is not None), None)
        width, inner, types = config.hidden_size, config.intermediate_size, config.layer_types
        assert width and inner and types and config.num_heads
        by_kind = {source.kind or types[0]: i for i, source in enumerate(self.sources)}
        self.read_by = [by_kind[kind] for kind in types]  # the source that each layer reads
        for source in self.sources:
            if config.num_heads % source.num_heads:
                raise BadInput(f"num_heads {config.num_heads}: the keys that it reads have {source.num_heads} heads")
        eps = first_of(target.config.to_dict(), EPSILONS) or 1e-6
        self.pre_projection = nn.Linear(2 * target.hidden_size, width, bias=False)
        dims = [self.sources[i].head_dim for i in self.read_by]
        self.layers = nn.ModuleList(
            QueryLayer(width, inner, num_heads=config.num_heads, head_dim=dim, eps=eps) for dim in dims
        )
        for layer, i in zip(self.query_layers, self.read_by, strict=True):  # scores as large as the target's own
            nn.init.constant_(layer.self_attn.q_norm.weight, self.sources[i].query_size)
        self.norm = RMSNorm(width, eps=eps)
        self.post_projection = nn.Linear(width, target.hidden_size, bias=False)
        self.lm_head = nn.Linear(width, self.num_drafted, bias=False)
        self.masked_embedding: CentroidOutput | None = None
        if config.num_centroids and config.num_chosen:
            groups = {"num_centroids": config.num_centroids, "num_chosen": config.num_chosen}
            self.masked_embedding = CentroidOutput(width, target.vocab_size, **groups)

    @property
    def query_layers(self) -> list[QueryLayer]:
        return cast(list[QueryLayer], list(self.layers))

    def serving_config(self) -> dict[str, Any]:
        config, theirs = self.config, self.target.config.to_dict()
        kept = "vocab_size rms_norm_eps max_position_embeddings rope_parameters sliding_window".split()
        kept += "head_dim num_key_value_heads attention_k_eq_v per_layer_config".split()
        text = {key: theirs[key] for key in kept if theirs.get(key) is not None}
        told: dict[str, Any] = {"num_hidden_layers": config.num_layers, "num_kv_shared_layers": config.num_layers}
        told |= {"num_attention_heads": config.num_heads, "layer_types": config.layer_types}
        told |= {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
        told |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "tie_word_embeddings": True}
        full = [str(i) for i, kind in enumerate(cast(list[str], config.layer_types)) if kind == FULL]
        if own := next(iter(text.get("per_layer_config", {}).values()), None):  # of layers with full attention
            told["per_layer_config"] = dict.fromkeys(full, own)
            told |= {LEGACY[key]: value for key, value in own.items() if key in LEGACY}
        groups: dict[str, Any] = {"use_ordered_embeddings": config.num_centroids is not None}
        if config.num_centroids is not None:
            groups |= {"num_centroids": config.num_centroids, "centroid_intermediate_top_k": config.num_chosen}
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.target.hidden_size,
            **groups,
            "tie_word_embeddings": True,
            "text_config": {"model_type": "gemma4_text", **text, **told},
        }

    # training

    def begin_training(self, batches: Iterable[DraftBatch], *, fits: bool = True) -> str | None:
        if self.masked_embedding is not None:
            raise BadInput("head.num_centroids: groups of tokens are an imported head's; a fresh one has none")
        return super().begin_training(batches, fits=fits)

    @torch.no_grad()
    def fit(self, batches: Sequence[DraftBatch]) -> None:
        """Fit the two projections to the target's next state, as well as so few channels can, and the output layer to
        its logits of that. The layers add nothing at first."""
        found = next_state_map(self.target, batches)
        if found is None:
            return
        weight, predicted = found  # [2D, D], [n, D]
        values, vectors = torch.linalg.eigh((predicted.T @ predicted).double())
        basis = vectors[:, values.argsort(descending=True)[: self.lm_head.in_features]].float()  # [D, d]
        self.pre_projection.weight.copy_((weight @ basis).T)
        self.post_projection.weight.copy_(basis)
        rows = output_layer_rows(self.target.output_layer, self.vocabulary)["weight"]  # [Vd, D]
        self.lm_head.weight.copy_(rows.float() @ basis * self.target.logit_scale)
        self.norm.weight.fill_((predicted @ basis).square().mean(-1).sqrt().mean())
        for layer in self.query_layers:
            nn.init.zeros_(layer.post_attention_layernorm.weight)
            nn.init.zeros_(layer.post_feedforward_layernorm.weight)

    def scale_outputs(self, factors: Sequence[float]) -> None:
        self.lm_head.weight.mul_(factors[0])

    def kept_bytes(self, num_chains: int, *, itemsize: int, num_depths: int) -> int:
        width, inner = self.lm_head.in_features, cast(int, self.config.intermediate_size)
        mixed = sum(layer.self_attn.q_proj.out_features for layer in self.query_layers)
        return num_chains * num_depths * (len(self.layers) * (16 * width + 4 * inner) + 4 * mixed) * itemsize

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        ids, hidden = batch.input_ids, starts.take(self.features(batch.output))  # [B, S, D]
        places, entering = starts.take(batch.places) + AHEAD, batch.output.features.unbind(2)
        known = [source(x, batch.places) for source, x in zip(self.sources, entering, strict=True)]
        rotations = [source.rotation(places, like=hidden) for source in self.sources]
        sights = [batch.sight(starts, window=self.num_seen(source)) for source in self.sources]

        def attend(queries: Tensor, i: int) -> Tensor:
            keys, values = (part.to(queries.dtype) for part in known[i])
            return attend_chains(queries, keys, values, sights[i], scale=1.0).transpose(1, 2)

        run = self.runner(starts, like=hidden)
        for depth in range(starts.num_depths):
            tokens = starts.take(ids, offset=depth + 1)
            drafted = run(self._step, tokens, hidden, rotations, attend)  # [B, S, d]
            yield drafted
            hidden = self.fed_back(drafted)

    def _step(self, tokens: Tensor, hidden: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        """tokens [B, Q] beside the previous outputs [B, Q, D] -> [B, Q, d], what the output layer reads."""
        embedded = self.target.embed(tokens).to(hidden.dtype)
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        for layer, i in zip(self.query_layers, self.read_by, strict=True):
            x = layer(x, attend(layer.queries(x, rotations[i]), i))
        return self.norm(x)

    def num_seen(self, source: TargetKeys) -> int | None:
        """How many keys, the last at t, a query sees of a source; None: all."""
        return None if source.window is None else source.window + MORE

    def features(self, output: TargetOutput) -> Tensor:
        return output.post_norm.to(self.pre_projection.weight.dtype)

    def fed_back(self, hidden: Tensor) -> Tensor:
        return self.post_projection(hidden)

    def predicted_state(self, hidden: Tensor, depth: int) -> Tensor:
        return self.post_projection(hidden)

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        logits = self.lm_head(hidden)
        if self.masked_embedding is None or self.training:  # which learns the rows of tokens that are not scored too
            return logits
        return self.masked_embedding.keep_chosen(hidden, logits)

    # drafting

    def begin(self, *, batch_size: int, max_length: int) -> AssistantState:
        cache = self.new_cache(len(self.sources), max_length)
        state = ChainState.of(cache, batch_size=batch_size, like=self.pre_projection.weight)
        return AssistantState(**vars(state))

    def _last_output(self, state: ChainState, read: Reading) -> Tensor:
        state, positions = cast(AssistantState, state), read.positions  # [B, Q]
        state.cache.seek(positions, extent=state.extent)
        where = placed(positions, state.shift)
        for i, source in enumerate(self.sources):
            keys, values = source(read.output.features[:, :, i], where)
            state.cache.update(keys.to(self.dtype), values.to(self.dtype), i)
        rows, last = torch.arange(len(positions), device=positions.device)[:, None], read.last[:, None]
        told = [{"dtype": self.dtype, "window": self.num_seen(source)} for source in self.sources]
        state.masks = tuple(state.cache.mask(positions[rows, last], **one) for one in told)
        hidden = self.features(read.output)[rows, last]
        place = where[rows, last] + AHEAD  # [B, 1]
        state.rotations = tuple(source.rotation(place, like=hidden) for source in self.sources)
        return self._decode(state, read.next_tokens[rows, last], hidden, positions[rows, last])

    @property
    def dtype(self) -> torch.dtype:
        return self.pre_projection.weight.dtype

    def _decode(
        self, state: ChainState, token_ids: Tensor, hidden: Tensor, positions: Tensor, *, in_tree: bool = False
    ) -> Tensor:
        state = cast(AssistantState, state)

        def attend(queries: Tensor, i: int) -> Tensor:
            keys, values = state.cache.layer(i, queries, queries).readable_slots(state.cache.extent)
            mask = state.masks[i].expand(-1, -1, queries.shape[2], -1)
            return grouped_attention(self, queries, keys, values, mask, scaling=1.0)[0]

        return self._step(token_ids, hidden, state.rotations, attend)
