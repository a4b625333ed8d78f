"""EAGLE-3 as the speculators library writes it: one folder that names its target, so `vllm serve FOLDER` is all."""

import re
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from .folder import HeadFolder, write_config, write_tensors
from .portable import check_target, with_both_norms

VERSION = "0.9.0"  # of speculators, whose layout this is
LAYER_KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers "
    "rms_norm_eps max_position_embeddings hidden_act rope_parameters rope_theta rope_scaling vocab_size bos_token_id "
    "eos_token_id attention_bias mlp_bias tie_word_embeddings torch_dtype"
).split()
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write_speculators(head: HeadFolder, folder: Path, *, to: str) -> None:
    """layers.{i}, fc, norm, lm_head, d2t and t2d. Raises BadInput where the target is not there to be named."""
    check_target(head)
    if head.target_config is None:
        raise BadInput(f"target {head.target}: no config.json there; name it with --target: the folder serves itself")
    config, own = head.config, head.own
    ids, features = config["eagle_aux_hidden_state_layer_ids"], config["num_aux_hidden_states"]
    options: dict[str, Any] = {key: config[key] for key in OPTIONS}
    how = {
        "proposal_type": "greedy",
        "speculative_tokens": own["num_depths"],
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    served = {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [how],
            "verifier": {
                "name_or_path": head.target,
                "architectures": head.target_config.get("architectures") or [],
            },
        },
        # vLLM starts from this part and takes few keys from outside it, so those that it needs are here too
        "transformer_layer_config": {
            **{key: config[key] for key in LAYER_KEYS},
            **options,
            "num_aux_hidden_states": features,
        },
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": ids,
        **options,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
    }
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): value for name, value in with_both_norms(head).items()}
    write_config(folder, {**served, **head.provenance})
    write_tensors(folder, tensors)
