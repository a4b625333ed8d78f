"""Sliding windows in an exported folder: whether engines would draft with the one that the head was trained with.

vLLM 0.33 reads `layer_types` and `sliding_window` of both families, and lets all slots of a block see each other where
`is_causal` is false. SGLang 0.5.23 reads them of block drafters only, whose slots then see earlier slots alone. Source:
their code (llama.py, llama_eagle3.py, qwen3_dflash.py, flash_attn.py; dflash.py), not run.
"""

from collections.abc import Mapping
from typing import Any

from .contracts import trained_config

FULL, SLIDING = "full_attention", "sliding_attention"
IN_SGLANG = {
    "eagle3": "SGLang drafts over all positions",
    "block": "SGLang lets a slot see earlier slots only",
}


def window_of(config: Mapping[str, Any]) -> int | None:
    """The window that vLLM reads, in tokens; None: it sees all positions."""
    layer = config.get("transformer_layer_config") or config
    return layer.get("sliding_window") if SLIDING in (layer.get("layer_types") or ()) else None


def window_problems(config: Mapping[str, Any], family: str, *, to: str = "") -> list[str]:
    """Problems of an EAGLE-3 or block drafter's config, for one engine or for those that read this layout."""
    if family not in IN_SGLANG:
        return []
    layer, problems = config.get("transformer_layer_config") or config, list[str]()
    kinds, window, read = layer.get("layer_types"), layer.get("sliding_window"), window_of(config)
    num_layers = layer.get("num_hidden_layers")
    if kinds not in (None, [FULL] * (num_layers or 0), [SLIDING] * (num_layers or 0)):
        problems.append(f"layer_types: {kinds}: expected one kind, {FULL} or {SLIDING}, for all {num_layers} layers")
    if SLIDING in (kinds or ()) and (type(window) is not int or window < 1):
        problems.append(f"sliding_window: {window!r}: expected a number of tokens beside layers of {SLIDING}")
    trained = trained_config(config)
    if trained and trained.get("sliding_window") != read:
        problems.append(f"sliding_window: {read}, but the head was trained with {trained.get('sliding_window')}")
    if to == "sglang" and read is not None:
        problems.append(f"sliding_window {read}: {IN_SGLANG[family]}")
    return problems
