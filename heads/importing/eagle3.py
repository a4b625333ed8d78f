"""Importing EAGLE-3 as its authors, SpecForge, vLLM and the speculators library write it."""

import re
from typing import Any

from ...configs.errors import BadInput
from ...configs.typed import TypedKeys
from ..target import Target
from .imported import ForeignFolder, Imported, Tensors, draft_ids
from .published import architecture_of, window_of

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # names that vLLM knows the mask token by
FEATURE_IDS = "eagle_aux_hidden_state_layer_ids"


def import_eagle3(folder: ForeignFolder) -> Imported:
    """EAGLE-3, also of speculators, which nests the layer's config and has norm_before_residual as default."""
    config, target = folder.config, folder.target
    layer = config.inner_or_self("transformer_layer_config")
    num_layers = layer.read("num_hidden_layers", int) or 1
    tensors = folder.bare_tensors("embed_tokens.weight")
    for i in range(1, num_layers):  # the same norm under two names
        hidden, given = (f"layers.{i}.{name}.weight" for name in ("hidden_norm", "input_layernorm"))
        if hidden in tensors:
            tensors.setdefault(given, tensors.pop(hidden))
    if num_layers == 1:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()}
    ids = draft_ids(tensors, target)
    keys: dict[str, Any] = {
        "feature_layers": feature_layers(config, layer, tensors, target),
        "num_layers": num_layers,
        **{key: bool(config.read(key, bool)) for key in ("fc_norm", "norm_output")},
    }
    is_speculators, in_speculators = "speculators_config" in config.values, config.inner("speculators_config")
    if methods := in_speculators.read("proposal_methods", list[dict]):
        first = TypedKeys(methods[0], f"{in_speculators.where}proposal_methods.0.")
        keys |= {"num_depths": num} if (num := first.read("speculative_tokens", int)) else {}
    before_residual = config.read("norm_before_residual", bool)
    before_fc = [part.read("norm_before_fc", bool) for part in (config, config.inner("eagle_config"))]
    keys |= {
        "norm_before_residual": is_speculators if before_residual is None else before_residual,
        "norm_before_fc": bool(before_fc[1] if before_fc[0] is None else before_fc[0]),
        "sliding_window": window_of(layer),
        "architecture": architecture_of(TypedKeys({**layer.values, "sliding_window": None}, layer.where), target),
    }
    if "mask_hidden" in tensors:
        token = next((token for key in MASK_KEYS if (token := config.read(key, int)) is not None), None)
        if token is None:
            raise BadInput("pard_token: missing, and there is a mask_hidden")
        keys |= {"parallel": True, "mask_token_id": token}
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    if "lm_head.weight" not in tensors:
        if ids is not None:
            raise BadInput("tensor lm_head.weight: missing, and the draft vocabulary is cut")
        tensors["lm_head.weight"] = target.output_layer.weight
    return Imported(keys, tensors, ids)


def feature_layers(config: TypedKeys, layer: TypedKeys, tensors: Tensors, target: Target) -> list[int]:
    """The feature layers as HF `hidden_states` indices: vLLM's top-level key as it is, SGLang's nested one plus 1.

    Raises: BadInput if their number does not match fc.weight.
    """
    num = tensors["fc.weight"].shape[1] // target.hidden_size if "fc.weight" in tensors else 3
    layers = config.read(FEATURE_IDS, list[int]) or layer.read(FEATURE_IDS, list[int])
    if layers is None and (nested := config.inner("eagle_config").read(FEATURE_IDS, list[int])) is not None:
        layers = [i + 1 for i in nested]
    if layers is None:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    if len(layers) == num + 1 and layers[-1] == target.num_layers:  # the final state, listed for labels, not a feature
        layers = layers[:-1]
    if len(layers) != num:
        raise BadInput(f"{FEATURE_IDS}: {layers} for the {num} features that fc.weight reads")
    return list(layers)
