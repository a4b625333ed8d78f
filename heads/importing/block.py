"""Importing block drafters: DFlash and DSpark, in the plain layout and that of the speculators library."""

from pathlib import Path
from typing import Any

import torch.nn.functional as F

from ...configs.errors import BadInput
from ..block import BlockConfig
from ..export.block import plain_config
from ..export.tensor_files import TensorFiles
from ..target import Target
from .imported import Imported, bare, draft_ids, own_config, without_tables
from .published import architecture_of, same_tensor

MARKOV, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def import_block(folder: Path, config: dict[str, Any], stored: TensorFiles, target: Target) -> Imported:
    """Import a block drafter. Raises BadInput on parts that ours do not have and that change the result."""
    config = plain_config(config)
    tensors = without_tables({bare(name): stored.read(name) for name in stored.files}, keep_output=True)
    ids = draft_ids(tensors, target)
    is_plain = ids is None and "lm_head.weight" in tensors
    if is_plain and same_tensor(tensors["lm_head.weight"], target.output_layer.weight.detach().cpu()):
        del tensors["lm_head.weight"]  # the target's own
    made = own_config(config, plain=BlockConfig)
    if made is not None:
        return Imported(made, tensors, ids)
    kinds = set(config.get("layer_types") or ["full_attention"])
    problems = {
        f"layer_types: {sorted(kinds)}": kinds != {"full_attention"},
        "causal: its slots see only those before them": config["causal"],
        f"markov_head_type {config.get('markov_head_type')}": config.get("markov_head_type", "vanilla") != "vanilla",
        "conv_kernel_size, of DFlash2": any("_conv." in name or name.startswith("candidate") for name in tensors),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BadInput(f"{problem}: not a block drafter as known here")
    rank = tensors[MARKOV].shape[1] if MARKOV in tensors else 0
    if CONFIDENCE in tensors:  # some do not read the previous token, so pad their weights with zeros
        narrow = tensors[CONFIDENCE]
        tensors[CONFIDENCE] = F.pad(narrow, (0, target.hidden_size + rank - narrow.shape[1]))
    layer = {**config, "model_type": "llama", "sliding_window": None}  # a Llama layer but for query and key norms
    made = BlockConfig(
        feature_layers=[i + 1 for i in config["target_layer_ids"]],
        num_depths=config["block_size"] - (0 if config["sample_from_anchor"] else 1),
        num_layers=config.get("num_hidden_layers") or 1,
        sample_from_anchor=config["sample_from_anchor"],
        markov_rank=rank,
        confidence=CONFIDENCE in tensors,
        has_head_norms="layers.0.self_attn.q_norm.weight" in tensors,
        output="own" if "lm_head.weight" in tensors else "shared",
        draft_vocab_size=None if ids is None else len(ids),
        mask_token_id=config["mask_token_id"],
        architecture=architecture_of(layer, target),
    )
    return Imported(made, tensors, ids)
