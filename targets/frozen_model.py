"""A Hugging Face model in evaluation mode: its parts under uniform names, and what its config says of them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..base.errors import BadInput
from .caches.attention import NAME as GROUPED_ATTENTION
from .caches.cache import SlotCache, cache_argument
from .caches.rounds import carries_states, own_cache, read_states
from .caches.state_cache import StateCache, keeps_states, kept_by_layers, unknown_kind
from .cpu.products import product
from .end_tokens import as_ids, contradiction, said_ends
from .layers.distances import read_distances
from .layers.own_masks import MaskOf, OwnMasks
from .layers.runs import LAYER_LISTS, Entering, layer_list
from .layers.temperature import Temperature
from .loading import TargetConfig, load_tokenizer, text_decoder, use_attention
from .weights.served_adapter import ServedWeights

TWO_SETS = "longrope"  # transformers' word for frequencies of which there are two sets, for short and for long texts
BY_LENGTH = (TWO_SETS, "dynamic")  # rotary frequencies that depend on the length of a text
CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length")  # config keys
# attention of these kinds is computed as the model wants it only by kernels with transformers' own names
SPARSE_ATTENTION = {"indexed_attention", "minimax_m3_sparse"}
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # config keys


@dataclass(frozen=True)
class OutputUse:
    """How a model uses its output layer, as `check_target` found: what a target without its layers cannot find out."""

    logit_scale: float = 1.0
    caps_wide: bool = False
    is_capped: bool = True  # False: its config names a cap of the logits that it does not apply


def cap_in(config: Any) -> float | None:
    """What the config of a text model says that the logits are capped by; None: nothing."""
    caps = (getattr(config, name, None) for name in LOGIT_CAPS)
    return next((cap for cap in caps if cap), None)


def check_output(name: str, layer: nn.Module, hidden_size: int) -> None:
    """Raises BadInput if the output layer of a target of this name is not one weight [V, D], perhaps with a bias."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or (
        weight.ndim == 2 and weight.is_floating_point() and weight.shape[1] != hidden_size
    ):
        width = "" if not isinstance(weight, Tensor) else f", as it reads states of {weight.shape[1]} channels"
        raise BadInput(f"target {name}: heads cannot use its output layer{width}: they need one of {hidden_size}")
    own = [key for key, _ in layer.named_parameters() if key not in ("weight", "bias")]
    if own and type(layer).__module__.startswith("transformers.models"):
        raise BadInput(f"target {name}: its output layer has parameters of its own ({own[0]}), which heads cannot use")


class FrozenModel:
    """A Hugging Face causal language model in evaluation mode, and its parts under uniform names."""

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        fingerprint: str,
        source: TargetConfig | None = None,
        adapter: ServedWeights | None = None,
    ):
        """Takes the model apart and runs nothing.

        Args:
            fingerprint: of the weights as stored, without the adapter.
            source: the config that it was loaded by; None: it was made in memory.
            adapter: that was merged into the weights, if any.

        Raises: BadInput if no decoder layers are found.
        """
        self.model = model.eval().requires_grad_(False)
        self.name, self.adapter = name, adapter
        self.stored_fingerprint = fingerprint  # of the weights without the adapter, by which heads know their target
        self._tokenizer: Any = None
        self._source = source
        self.has_vision = source is None  # whether the parts that read images are there, see `Target.load_vision`
        self._ends: dict[Any, frozenset[int]] = {}  # by what the configs say: `eos_token_ids`
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.base = text_decoder(model)
        layers = layer_list(self.base)
        if layers is None:
            raise BadInput(f"target {name}: no decoder layers found under {', '.join(LAYER_LISTS)}")
        self.layers: nn.ModuleList = layers
        self.num_layers = len(layers)  # not what the config says: LongCat's has two entries per layer
        norms = (module for key, module in self.base.named_children() if "norm" in key or key == "ln_f")
        self.final_norm: nn.Module | None = next(norms, None)
        self.output_layer: nn.Linear = model.get_output_embeddings()
        check_output(name, self.output_layer, self.hidden_size)
        # layers that a text alone does not pass, as those of Llama 3.2 Vision that read images
        self.skipped_layers = frozenset[int](getattr(self.config, "cross_attention_layers", None) or ())
        self.input_embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size: int = self.output_layer.weight.shape[0]
        self.own_cache, self.kept = own_cache(self.base), kept_by_layers(self.config)
        self.has_states, self.undecodable = any(map(keeps_states, self.kept)), unknown_kind(self.kept)
        if carries_states(self.base):
            self.has_states, self.undecodable = True, "its layers keep states in an unknown way"
        elif self.has_states and self.undecodable is None:
            self.undecodable = read_states(self.base, self.kept)
        read_distances(self.base)
        Temperature(self.base)
        self.decodes_trees = not self.has_states  # they would need a state per path
        self.packs = True  # whether a mask can keep the texts of a row apart
        self.continues_prompts = True  # whether its recurrent layers read many tokens behind a state
        self.state_bytes = 0  # of a row's states in its recurrent layers
        self.logit_scale = 1.0
        self.logit_cap = cap_in(self.config)
        self.caps_wide = False  # whether it caps its logits in fp32, not in its own dtype
        has_window = any("sliding" in kind for kind in self.layer_types or ["sliding_attention"])
        self._window: int | None = getattr(self.config, "sliding_window", None) if has_window else None
        self.own_masks = OwnMasks(self.layers)
        has_chunks = "chunked_attention" in self.layer_types
        self.chunk: int | None = getattr(self.config, "attention_chunk_size", None) if has_chunks else None
        is_sparse = bool(SPARSE_ATTENTION & set(self.layer_types))
        self._needs_mask = bool(self._window or self.chunk or is_sparse)  # even where a token sees the whole cache
        self.own_attention: str = self.config._attn_implementation  # the model's, before ours takes its place
        if self.own_attention == "sdpa" and not is_sparse:
            use_attention(model, GROUPED_ATTENTION)
        self._cache_argument, self._entering = cache_argument(self.base), Entering(self.layers)

    @property
    def fingerprint(self) -> str:
        """The hash of the weights that it computes with, an adapter's included."""
        return self.adapter.fingerprint_on(self.stored_fingerprint) if self.adapter else self.stored_fingerprint

    @property
    def full_name(self) -> str:
        """Its name, and its adapter's."""
        return self.name if self.adapter is None else f"{self.name} with adapter {self.adapter.path}"

    @property
    def output_use(self) -> OutputUse:
        """What the check at load found of the output layer."""
        return OutputUse(self.logit_scale, self.caps_wide, is_capped=self.logit_cap == cap_in(self.config))

    @property
    def tokenizer(self) -> Any:
        """The target's own tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.source)
        return self._tokenizer

    @property
    def source(self) -> TargetConfig:
        """What it is loaded by, without an adapter."""
        return replace(self._source or TargetConfig(path=self.name), path=self.name, adapter=None)

    @property
    def is_spread(self) -> bool:
        """Whether its layers are on several devices, or offloaded to host memory or disk."""
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1

    @property
    def device(self) -> torch.device:
        """The device of its inputs and outputs, also for a target on several devices."""
        if not self.is_spread:
            return self.output_layer.weight.device
        devices = [device for device in self.model.hf_device_map.values() if device not in ("cpu", "disk")]
        return torch.device(devices[0] if devices else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.output_layer.weight.dtype

    @property
    def can_decode(self) -> bool:
        return self.undecodable is None

    def new_cache(self, max_length: int, *, num_rows: int = 1, width: int = 1) -> SlotCache:
        """An empty cache with `max_length` slots (tokens) per row.

        Args: num_rows, width: as in `StateCache`, for a target with recurrent layers.
        Raises: BadInput if this target cannot be decoded.
        """
        if self.undecodable is not None:
            why = f"{self.undecodable}, so this target can be trained on, but not decoded"
            raise BadInput(f"target {self.name}: {why}")
        if not self.has_states:
            return SlotCache(num_layers=len(self.kept), max_length=max_length, num_rows=num_rows)
        sizes: dict[str, Any] = {"max_length": max_length, "num_rows": num_rows, "width": width}
        return StateCache(self.kept, **sizes, continues_prompts=self.continues_prompts, device=self.device)

    @property
    def num_positions(self) -> int:
        """The longest text in tokens: the context window, or the length at which its rotary frequencies change."""
        own = getattr(self.config, "original_max_position_embeddings", None)
        ropes = [rope for rope in self.length_ropes if rope["rope_type"] == TWO_SETS]
        lengths = (rope.get("original_max_position_embeddings") or own for rope in ropes)
        changes = [int(length) for length in lengths if length]
        given = (getattr(self.config, name, None) for name in CONTEXTS)
        return min([next((length for length in given if length), 2**31 - 1), *changes])

    @property
    def length_ropes(self) -> list[dict[str, Any]]:
        """The parameters of rotary frequencies that depend on the length of a text, of which there may be several by
        attention type."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = (rope, *(part for part in rope.values() if isinstance(part, dict)))
        return [kind for kind in kinds if kind.get("rope_type") in BY_LENGTH]

    @property
    def context(self) -> str:
        """`num_positions` in words, for messages."""
        kinds = {rope["rope_type"] for rope in self.length_ropes}
        why = ", where its rotary frequencies change with every token (dynamic)" if "dynamic" in kinds else ""
        why = f", where its rotary frequencies change ({TWO_SETS})" if TWO_SETS in kinds else why
        return f"{self.num_positions}{why}"

    def final_norm_scale(self) -> Tensor:
        """[D] fp32 gain of the final norm, for heads that start from it; ones if it is not an RMSNorm."""
        norm = self.final_norm
        if norm is None or "RMSNorm" not in type(norm).__name__:
            return torch.ones(self.hidden_size, device=self.device)
        # an RMSNorm maps the all-ones vector to its gain, whether that is stored as w or as 1 + w
        return norm(torch.ones(1, self.hidden_size, device=self.device, dtype=self.dtype))[0].float()

    @property
    def passed_layers(self) -> tuple[int, ...]:
        """The layers that a text alone passes, in order."""
        return tuple(i for i in range(self.num_layers) if i not in self.skipped_layers)

    def nearest_passed(self, layers: Sequence[int]) -> list[int]:
        """These layers, ascending, with each that a text does not pass replaced by the next one that it does."""
        passed = self.passed_layers
        return sorted({next((i for i in passed if i >= layer), passed[-1]) for layer in layers})

    def check_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Raises BadInput on an index outside 0..num_layers-1, and on a layer that a text does not pass."""
        for i in feature_layers:
            if i in self.skipped_layers:
                raise BadInput(f"feature layer {i}: a text alone does not pass this layer of {self.name}, take another")
            if not 0 <= i < self.num_layers:
                why = "the state after the last one is read as post_norm, not by index"
                raise BadInput(f"feature layer {i}: {self.name} has layers 0..{self.num_layers - 1} ({why})")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer, see `end_tokens`. Warns where two who name them contradict each other."""
        generation, config = self.model.generation_config, self.config
        by_configs = as_ids(getattr(generation, "eos_token_id", None)), as_ids(getattr(config, "eos_token_id", None))
        if by_configs not in self._ends:
            said = said_ends(*by_configs, self._own_tokenizer())
            self._ends[by_configs] = frozenset[int]().union(*said.values())
            if line := contradiction(said, self.name):
                warnings.warn(line, stacklevel=2)
        return self._ends[by_configs]

    def _own_tokenizer(self) -> Any:
        """`tokenizer`, or None if there is none."""
        try:
            return None if self._tokenizer is None and self._source is None else self.tokenizer
        except BadInput:
            return None

    @property
    def layer_types(self) -> list[str]:
        """The attention type of each layer, in Hugging Face's terms; empty if the config does not list them."""
        return getattr(self.config, "layer_types", None) or []

    def output_values(self, post_norm: Tensor) -> Tensor:
        """[..., D] -> [..., V] what the output layer makes of post-norm states."""
        return product(self.output_layer, post_norm.to(self.dtype))

    @property
    def embedding_scale(self) -> float:
        """The factor by which the embedding module multiplies its table: sqrt(hidden size) in Gemma, mostly 1.

        A head reads what the module gives, without the factor by which a model like Granite multiplies that later.
        """
        module = self.input_embedding
        return float(getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)))

    def as_logits(self, values: Tensor) -> Tensor:
        """The output layer's values [..., V] as the model's logits: scaled and capped, where it does that."""
        values = values if self.logit_scale == 1 else values * self.logit_scale
        cap = self.logit_cap
        return values if cap is None else torch.tanh((values.float() if self.caps_wide else values) / cap) * cap

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, the query's own included; None: it has full attention."""
        return self._window if not self.layer_types or "sliding" in self.layer_types[layer] else None

    def by_attention_type(self, mask: MaskOf) -> Any:
        """The mask, or the masks by attention type, that the model takes."""
        if self._window is None and self.chunk is None:
            return mask()
        if not self.layer_types:
            return mask(window=self._window)
        masks: dict[str, Any] = {**dict.fromkeys(self.layer_types), "full_attention": mask()}
        if self._window is not None:
            masks["sliding_attention"] = mask(window=self._window)
        if self.chunk is not None:
            masks["chunked_attention"] = mask(chunk=self.chunk)
        return {**masks, "linear_attention": None}

    def to(self, device: str | torch.device) -> Self:
        """Move the weights, unless they are spread over devices; returns itself."""
        if not self.is_spread:
            self.model.to(device)
        return self
