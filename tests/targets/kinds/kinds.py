"""All kinds of targets by group, and those among them that `make test` walks."""

from dataclasses import replace

from dense import NOT_ROTARY, ROTARY
from experts import EXPERTS
from kind import Kind
from latent import LATENT
from recurrent import HYBRID, STATES_ONLY
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from wrappers import WRAPPERS

GROUPS: dict[str, dict[str, Kind]] = {
    "Rotary positions, dense": ROTARY,
    "Other positions": NOT_ROTARY,
    "Mixtures of experts": EXPERTS,
    "Latent attention": LATENT,
    "Hybrids: recurrent layers and attention": HYBRID,
    "Recurrent layers alone": STATES_ONLY,
    "Several modalities": WRAPPERS,
}
KINDS: dict[str, Kind] = {
    name: replace(kind, model_type=kind.model_type or name) for group in GROUPS.values() for name, kind in group.items()
}
FAST = ["gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5_text"]  # as unlike each other as possible


def without_recipe() -> list[str]:
    """Causal language models, and models of images and text, of the installed transformers that no kind here is of."""
    tried = {kind.model_type for kind in KINDS.values()} | {k.text.model_type for k in KINDS.values() if k.text}
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(known & set(CONFIG_MAPPING) - tried)
