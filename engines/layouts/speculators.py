"""What heads of all kinds have in common in the layout of the speculators library: the folder names its target, so
`vllm serve FOLDER` suffices."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...base.errors import BadInput
from .contracts import Contract
from .serving import HeadFolder

VERSION = "0.9.0"  # of the library
LAYER_KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers "
    "rms_norm_eps max_position_embeddings hidden_act rope_parameters rope_theta rope_scaling vocab_size bos_token_id "
    "eos_token_id attention_bias mlp_bias tie_word_embeddings torch_dtype"
).split()
WINDOW_KEYS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def as_speculators(head: HeadFolder, *, architecture: str, layer_keys: Iterable[str], kind: str) -> dict[str, Any]:
    """The keys that all kinds of heads have in speculators' layout.

    vLLM starts from transformer_layer_config and takes few keys from outside it, so the keys that it needs are repeated
    there. `model_type` is left out, as vLLM would look for a transformers model of that name.

    Args: layer_keys: further keys of transformer_layer_config, besides those of every Llama. kind: the library's name
    of the head.
    Raises: BadInput if the target's config is not available.
    """
    if head.target_config is None:
        raise BadInput(f"target {head.target}: no config.json there; name it with --target: the folder serves itself")
    config, proposal = head.config, {"proposal_type": "greedy", "speculative_tokens": head.own["num_depths"]}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": head.target, "architectures": head.target_config.get("architectures") or []},
        },
        "transformer_layer_config": {key: config[key] for key in (*LAYER_KEYS, *layer_keys)},
        "draft_vocab_size": config["draft_vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
    }


def serves_itself(config: Mapping[str, Any], contract: Contract) -> list[dict[str, Any]]:
    """Check the keys by which `vllm serve FOLDER` finds the target and the draft's length; returns those with it."""
    served, opening = config.get("speculators_config") or {}, "speculators_config."
    name = (served.get("verifier") or {}).get("name_or_path")
    contract.report(not name, f"{opening}verifier.name_or_path: missing; vLLM finds the target by it")
    methods = served.get("proposal_methods")
    contract.report(not methods, f"{opening}proposal_methods: missing; vLLM reads the draft's length there")
    kind = config.get("model_type")
    contract.report(
        kind not in (None, "speculators"), f"model_type: {kind}: vLLM asks transformers for such a model; leave it out"
    )
    return methods or []
