"""A Hugging Face model in evaluation mode: its parts under uniform names, and what its config says of them."""

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...configs.errors import BadInput
from ..decoders.rounds import carries_states, own_cache, passed_states, passes_states, read_states
from ..decoders.state_cache import StateCache, keeps_states, kept_by_layers, unknown_kind
from ..loading import TargetConfig, load_tokenizer, text_decoder
from ..nn.cache import SlotCache
from .distances import read_distances

LAYER_LISTS = ("layers", "h", "blocks")  # names of the list of decoder layers in Hugging Face models
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # config keys


class FrozenModel:
    """A Hugging Face causal language model in evaluation mode, and its parts under uniform names."""

    def __init__(
        self, model: Any, *, name: str, fingerprint: str, tokenizer: Any = None, source: TargetConfig | None = None
    ):
        """Args: source: the config that it was loaded by. Raises: BadInput if no decoder layers are found."""
        self.model = model.eval().requires_grad_(False)
        self.name, self.fingerprint = name, fingerprint
        self._tokenizer, self._source = tokenizer, source or TargetConfig(path=name)
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.base = text_decoder(model)
        lists = (getattr(self.base, attribute, None) for attribute in LAYER_LISTS)
        layers = next((modules for modules in lists if isinstance(modules, nn.ModuleList)), None)
        if layers is None:
            raise BadInput(f"target {name}: no decoder layers found under {', '.join(LAYER_LISTS)}")
        self.layers: nn.ModuleList = layers
        self.num_layers = len(layers)  # not what the config says: LongCat's has two entries per layer
        norms = (module for key, module in self.base.named_children() if "norm" in key or key == "ln_f")
        self.final_norm: nn.Module | None = next(norms, None)
        self.output_layer: nn.Linear = model.get_output_embeddings()
        self.input_embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size: int = self.output_layer.weight.shape[0]
        self.own_cache, is_passed = own_cache(self.base), passes_states(self.base)
        self.kept = [passed_states() for _ in layers] if is_passed else kept_by_layers(self.config)
        self.has_states, self.undecodable = any(map(keeps_states, self.kept)), unknown_kind(self.kept)
        if carries_states(self.base) and not is_passed:
            self.has_states, self.undecodable = True, "its layers keep states in an unknown way"
        elif self.has_states and self.undecodable is None:
            self.undecodable = read_states(self.base, self.layers, self.kept)
        read_distances(self.base)
        self.decodes_trees = not self.has_states  # they would need a state per path
        self.continues_prompts = True  # whether its recurrent layers read many tokens behind a state
        self.state_bytes = 0  # of a row's states in its recurrent layers
        self.logit_scale = 1.0
        caps = (getattr(self.config, name, None) for name in LOGIT_CAPS)
        self.logit_cap: float | None = next((cap for cap in caps if cap), None)
        self.caps_wide = False  # whether it caps its logits in fp32, not in its own dtype
        has_window = any("sliding" in kind for kind in self.layer_types or ["sliding_attention"])
        self._window: int | None = getattr(self.config, "sliding_window", None) if has_window else None
        has_chunks = "chunked_attention" in self.layer_types
        self.chunk: int | None = getattr(self.config, "attention_chunk_size", None) if has_chunks else None

    @property
    def tokenizer(self) -> Any:
        """The target's own tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(replace(self._source, path=self.name))
        return self._tokenizer

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
            return SlotCache(num_layers=len(self.kept), max_length=max_length)
        sizes: dict[str, Any] = {"max_length": max_length, "num_rows": num_rows, "width": width}
        return StateCache(self.kept, **sizes, continues_prompts=self.continues_prompts, device=self.device)

    @property
    def max_positions(self) -> int:
        """The context window in tokens: rotary frequencies that change beyond some length (longrope) end it there, as
        else the longest text of a batch, or a draft, would change the states of the others."""
        whole = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        return min(whole, self.rotary_change or whole)

    @property
    def rotary_change(self) -> int | None:
        """The length in tokens beyond which the rotary frequencies are others; None: they are the same everywhere."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            if kind.get("rope_type") == "longrope":
                return kind.get("original_max_position_embeddings") or self.config.original_max_position_embeddings
        return None

    @property
    def context(self) -> str:
        """`max_positions` in words, for messages."""
        why = "" if self.rotary_change is None else ", where its rotary frequencies change (longrope)"
        return f"{self.max_positions}{why}"

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer, from the generation config, else the model config."""
        for config in (self.model.generation_config, self.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
        return frozenset()

    @property
    def layer_types(self) -> list[str]:
        """The attention type of each layer, in Hugging Face's terms; empty if the config does not list them."""
        return getattr(self.config, "layer_types", None) or []

    def as_logits(self, values: Tensor) -> Tensor:
        """The output layer's values [..., V] as the model's logits: scaled and capped, where it does that."""
        values = values if self.logit_scale == 1 else values * self.logit_scale
        cap = self.logit_cap
        return values if cap is None else torch.tanh((values.float() if self.caps_wide else values) / cap) * cap

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, the query's own included; None: it has full attention."""
        return self._window if not self.layer_types or "sliding" in self.layer_types[layer] else None

    def to(self, device: str | torch.device) -> Self:
        """Move the weights, unless they are spread over devices; returns itself."""
        if not self.is_spread:
            self.model.to(device)
        return self
