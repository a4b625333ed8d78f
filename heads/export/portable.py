"""EAGLE-1, EAGLE-2 and EAGLE-3 in one folder that vLLM and SGLang both load.

The two engines count feature layers differently and read different keys, so both are written (eagle3.py); they name the
norm of further layers differently, so it is written twice; SGLang's EAGLE-1 has a bias that vLLM leaves out, so it is
zeros. Embedding and, of EAGLE-1, output layer are the target's and not in the file.
"""

from pathlib import Path

from torch import Tensor

from ...configs.errors import BadInput
from .folder import HeadFolder, write_config, write_tensors

COUNTS_FROM_ONE = ("deepseek_v2", "glm4_moe_lite")  # targets for which SGLang adds 1 to ids only if the first is 1


def write_eagle(head: HeadFolder, folder: Path, *, to: str) -> None:
    """fc, layers.{i}. Raises BadInput on a trained bias for vLLM, which would leave it out."""
    check_target(head)
    if to == "vllm" and head.tensors["fc.bias"].any():
        raise BadInput(
            f"head {head.path}: fc.bias is trained and vLLM leaves it out: export to sglang, or head.bias false"
        )
    write_config(folder, {**head.config, **head.provenance})
    write_tensors(folder, head.tensors)


def write_eagle3(head: HeadFolder, folder: Path, *, to: str) -> None:
    """fc, midlayer or layers.{i}, norm, lm_head, d2t and t2d. Raises BadInput on what SGLang computes otherwise."""
    check_target(head)
    if to == "sglang" and head.config["norm_before_residual"]:
        raise BadInput(
            f"head {head.path}: norm_before_residual: SGLang has no such layer: export to vllm or speculators"
        )
    ids = head.config["eagle_aux_hidden_state_layer_ids"]
    kind = (head.target_config or {}).get("model_type")
    if to == "sglang" and kind in COUNTS_FROM_ONE and ids[0] != 2:
        raise BadInput(
            f"head {head.path}: of a {kind} target SGLang reads feature layers {ids} as other ones; start at 2"
        )
    write_config(folder, {**head.config, **head.provenance})
    write_tensors(folder, with_both_norms(head))


def with_both_norms(head: HeadFolder) -> dict[str, Tensor]:
    """Layers behind the first normalise what they read: `input_layernorm` in vLLM, `hidden_norm` in SGLang."""
    tensors = dict(head.tensors)
    for i in range(1, head.config["num_hidden_layers"]):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    return tensors


def check_target(head: HeadFolder) -> None:
    """Raises BadInput on a target whose embeddings are scaled: engines give drafts the bare table."""
    config = head.target_config or {}
    scale = config.get("embedding_multiplier") or config.get("scale_emb") or 1
    if str(config.get("model_type")).startswith("gemma") or scale != 1:
        raise BadInput(
            f"head {head.path}: {config['model_type']} scales its embeddings and engines give a draft the bare table, "
            "so it would draft badly there: nothing written"
        )
