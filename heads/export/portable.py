"""EAGLE-1, EAGLE-2 and EAGLE-3 in one folder that vLLM and SGLang both load; EAGLE-3 also in speculators' layout.

The two engines count feature layers differently and read different keys, so both are written (eagle3.py). They have
different names for the input norm of later layers, so it is written twice. SGLang's EAGLE-1 has a bias that vLLM
ignores, so it is zeros. The embedding and, for EAGLE-1, the output layer are the target's and not in the file; only of
a target whose embedding module scales its table, the scaled one is in a folder for vLLM, as engines share the bare one.
A folder in speculators' layout names its target, so `vllm serve FOLDER` suffices.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import BadInput
from .folder import EMBEDDINGS, SCALE, HeadFolder, table_rows, write_config, write_tensors
from .windows import window_problems

COUNTS_FROM_ONE = ("deepseek_v2", "glm4_moe_lite")  # targets for which SGLang adds 1 to ids only if the first is 1
VERSION = "0.9.0"  # of speculators, whose layout this is
LAYER_KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers "
    "rms_norm_eps max_position_embeddings hidden_act rope_parameters rope_theta rope_scaling vocab_size bos_token_id "
    "eos_token_id attention_bias mlp_bias tie_word_embeddings torch_dtype"
).split()
WINDOW_KEYS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write_eagle(head: HeadFolder, folder: Path, *, to: str) -> None:
    """EAGLE-1 and EAGLE-2: fc, layers.{i}. Raises BadInput on a trained bias for vLLM, which would ignore it."""
    embedding = own_embedding(head) if to == "vllm" else bare_embedding(head)
    if to == "vllm" and head.tensors["fc.bias"].any():
        why = "fc.bias is trained and vLLM leaves it out: export to sglang, or head.bias false"
        raise BadInput(f"head {head.path}: {why}")
    write_config(folder, {**head.config, **scale_key(head), **head.provenance})
    tensors = {name: value for name, value in head.tensors.items() if name not in ("d2t", "t2d")}
    write_tensors(folder, tensors | embedding)


def write_eagle3(head: HeadFolder, folder: Path, *, to: str) -> None:
    """EAGLE-3: fc, midlayer or layers.{i}, norm, lm_head, d2t, t2d. Raises BadInput on what SGLang does not support."""
    embedding = own_embedding(head) if to == "vllm" else bare_embedding(head)
    if to == "sglang" and head.own.get("parallel"):
        raise BadInput(f"head {head.path}: parallel: SGLang drafts token by token: export to vllm")
    if to == "sglang" and head.config["norm_before_residual"]:
        why = "SGLang has no such layer: export to vllm or speculators"
        raise BadInput(f"head {head.path}: norm_before_residual: {why}")
    for problem in window_problems(head.config, "eagle3", to=to):
        raise BadInput(f"head {head.path}: {problem}: export to vllm or speculators")
    ids = head.config["eagle_aux_hidden_state_layer_ids"]
    kind = (head.target_config or {}).get("model_type")
    if to == "sglang" and kind in COUNTS_FROM_ONE and ids[0] != 2:
        why = f"of a {kind} target SGLang reads feature layers {ids} as other ones; start at 2"
        raise BadInput(f"head {head.path}: {why}")
    write_config(folder, {**head.config, **scale_key(head), **head.provenance})
    write_tensors(folder, with_both_norms(head) | embedding)


def write_speculators(head: HeadFolder, folder: Path, *, to: str) -> None:
    """EAGLE-3 for speculators: layers.{i}, fc, norm, lm_head, d2t, t2d. Raises BadInput if the target's config is not
    available or the head drafts in parallel."""
    bare_embedding(head)
    if head.own.get("parallel"):
        raise BadInput(f"head {head.path}: parallel: not written in this layout: export to vllm")
    config = head.config
    layer_keys = (*OPTIONS, "num_aux_hidden_states", *(key for key in WINDOW_KEYS if key in config))
    served = {
        **as_speculators(head, architecture="Eagle3DraftModel", layer_keys=layer_keys),
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        **{key: config[key] for key in OPTIONS},
        "embed_requires_grad": False,
    }
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): value for name, value in with_both_norms(head).items()}
    write_config(folder, {**served, **head.provenance})
    write_tensors(folder, tensors)


def as_speculators(
    head: HeadFolder, *, architecture: str, layer_keys: Iterable[str], kind: str | None = None
) -> dict[str, Any]:
    """The keys that all kinds of heads have in speculators' layout.

    vLLM starts from transformer_layer_config and takes few keys from outside it, so the keys that it needs are repeated
    there. `model_type` is left out, as vLLM would look for a transformers model of that name.

    Args: layer_keys: further keys of transformer_layer_config, besides those of every Llama. kind: the library's name
    of the head; None: its method's.
    Raises: BadInput if the target's config is not available.
    """
    if head.target_config is None:
        raise BadInput(f"target {head.target}: no config.json there; name it with --target: the folder serves itself")
    config, how = head.config, {"proposal_type": "greedy", "speculative_tokens": head.own["num_depths"]}
    how |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind or head.method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind or head.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [how],
            "verifier": {"name_or_path": head.target, "architectures": head.target_config.get("architectures") or []},
        },
        "transformer_layer_config": {key: config[key] for key in (*LAYER_KEYS, *layer_keys)},
        "draft_vocab_size": config["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
    }


def with_both_norms(head: HeadFolder) -> dict[str, Tensor]:
    """The tensors, with the input norm of layers after the first under both names: `input_layernorm` for vLLM,
    `hidden_norm` for SGLang."""
    tensors = dict(head.tensors)
    for i in range(1, head.config["num_hidden_layers"]):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    return tensors


def scale_key(head: HeadFolder) -> dict[str, float]:
    return {} if head.embedding_scale == 1 else {SCALE: head.embedding_scale}


def own_embedding(head: HeadFolder) -> dict[str, Tensor]:
    """The table as a target's embedding module scales it, which vLLM keeps for the draft; none if it does not.

    Raises: BadInput as `table_rows`."""
    if head.embedding_scale == 1:
        return {}
    rows = table_rows(head, EMBEDDINGS)
    return {"embed_tokens.weight": rows * torch.tensor(head.embedding_scale, dtype=rows.dtype)}  # rounded as models do


def bare_embedding(head: HeadFolder) -> dict[str, Tensor]:
    """No table, where engines share the target's. Raises BadInput if the target's embedding module scales its table."""
    if head.embedding_scale != 1:
        kind = (head.target_config or {}).get("model_type")
        raise BadInput(
            f"head {head.path}: {kind} scales its embeddings and this engine gives a draft the bare table, so it would "
            "draft badly there: nothing written"
        )
    return {}
