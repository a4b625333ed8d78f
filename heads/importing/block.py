"""Importing block drafters: DFlash, DFlash2 and DSpark, in the plain layout and that of the speculators library."""

import torch.nn.functional as F

from ...configs.errors import BadInput
from ...configs.typed import TypedKeys
from ..nn.dflash2 import NUM_TAPS
from .imported import ForeignFolder, Imported, draft_ids
from .published import architecture_of, same_tensor, window_of

DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
# keys that some folders have in dflash_config alone
NESTED = ("mask_token_id", "target_layer_ids", "block_size", "conv_kernel_size", "conv_group_size", "selector_rank")
NESTED += ("selector_top_k",)
MARKOV_TYPE = "markov_head_type"
PREDECESSORS = "candidate_selector.predecessor_codebook"
MARKOV, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def import_block(folder: ForeignFolder) -> Imported:
    """Import a block drafter. Raises BadInput on parts that ours do not have and that change the result, and if the
    mask token, the block size or the feature layers are missing."""
    config, target = plain_config(folder.config), folder.target
    tensors = folder.bare_tensors("embed_tokens.weight")
    ids = draft_ids(tensors, target)
    is_plain = ids is None and "lm_head.weight" in tensors
    if is_plain and same_tensor(tensors["lm_head.weight"], target.output_layer.weight.detach().cpu()):
        del tensors["lm_head.weight"]  # the target's own
    if folder.own is not None:
        return Imported({}, tensors, ids)
    markov, window = config.read(MARKOV_TYPE, str), window_of(config)
    taps, selector = config.read("conv_kernel_size", int), tensors.get(PREDECESSORS)
    problems = {
        "causal: its slots see only those before them": config.need("causal", bool),
        f"{MARKOV_TYPE} {markov}": markov not in (None, "vanilla"),
        f"conv_kernel_size: {taps}, expected {NUM_TAPS}": taps not in (None, NUM_TAPS),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BadInput(f"{problem}: not a block drafter as known here")
    rank = tensors[MARKOV].shape[1] if MARKOV in tensors else 0
    if CONFIDENCE in tensors:  # some do not read the previous token, so pad their weights with zeros
        narrow = tensors[CONFIDENCE]
        tensors[CONFIDENCE] = F.pad(narrow, (0, target.hidden_size + rank - narrow.shape[1]))
    drafts_first = config.need("sample_from_anchor", bool)
    layer = {**config.values, "model_type": "llama", "sliding_window": None}  # Llama's but for query and key norms
    keys = {
        "feature_layers": [i + 1 for i in config.need("target_layer_ids", list[int])],
        "num_depths": config.need("block_size", int) - (0 if drafts_first else 1),
        "num_layers": config.read("num_hidden_layers", int) or 1,
        "sliding_window": window,
        "sample_from_anchor": drafts_first,
        "markov_rank": rank,
        "confidence": CONFIDENCE in tensors,
        "conv_group_size": None if taps is None else config.need("conv_group_size", int),
        "selector_rank": 0 if selector is None else selector.shape[1],
        "selector_top_k": 16 if selector is None else config.need("selector_top_k", int),
        "has_head_norms": "layers.0.self_attn.q_norm.weight" in tensors,
        "output": "own" if "lm_head.weight" in tensors else "shared",
        "mask_token_id": config.need("mask_token_id", int),
        "architecture": architecture_of(TypedKeys(layer, config.where), target),
    }
    return Imported(keys, tensors, ids)


def plain_config(config: TypedKeys) -> TypedKeys:
    """A config of either layout with the plain layout's keys at the top, and defaults for missing flags.

    The speculators library counts inputs of layers, and keeps the layers' keys in a nested config.
    """
    layer, nested = config.inner("transformer_layer_config"), config.inner("dflash_config")
    plain = {**layer.values, **{key: nested.values[key] for key in NESTED if key in nested.values}, **config.values}
    ids = config.read("aux_hidden_state_layer_ids", list[int])
    if ids is not None:
        plain["target_layer_ids"] = [i - 1 for i in ids]
    is_dspark = (config.read("architectures", list[str]) or [DFLASH]) not in ([DFLASH], [DFLASH2])
    plain.setdefault("sample_from_anchor", is_dspark and not layer.values)
    if nested.read("use_swa", bool) and plain.get("layer_types") is None:  # vLLM: all layers, without causality
        plain |= {"layer_types": ["sliding_attention"], "causal": False}
        plain["sliding_window"] = nested.read("swa_window_size", int) or plain.get("sliding_window")
    all_see = TypedKeys(plain, config.where).read("sliding_window_non_causal", bool)
    flags = nested.read("causal", bool), TypedKeys(plain, config.where).read("is_causal", bool)
    flags = *flags, None if all_see is None else not all_see, plain.get("causal")
    kinds = TypedKeys(plain, config.where).read("layer_types", list[str]) or ()
    is_sliding = "sliding_attention" in kinds  # then causal is what engines take for granted
    plain["causal"] = next((flag for flag in flags if flag is not None), is_sliding)
    return TypedKeys(plain, config.where)
