"""EAGLE-3 in one folder that vLLM, SGLang and llama.cpp's converter load, and in the layout of the speculators library.

The engines count feature layers differently and read different keys, so both are written (heads/eagle3.py). They have
different names for the input norm of later layers, so it is written twice. The embedding is the target's and not in the
file, except for vLLM and a target whose embedding module scales its table.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...configs.errors import BadInput
from ..importing.eagle3 import FEATURE_IDS, MASK_KEYS, import_eagle3
from ..importing.imported import ForeignFolder, Imported
from .contracts import SIZES, Contract, llama_keys, llama_layer_shapes, sizes_of, trained_config, window_problems
from .folder import BARE_EMBEDDING, SCALE, bare_embedding, own_embedding, scale_key, write_config, write_tensors
from .gguf_contract import check_target_layers, drafted_vocabulary, flag, gguf_sizes, layer_keys, layer_shapes
from .gguf_file import GgufFile
from .llamacpp import ROTATIONS, parallel_refusals, rotation_refusals
from .serving import GgufLayout, HeadFolder, Serving
from .speculators import WINDOW_KEYS, as_speculators, serves_itself
from .tensor_files import TensorFiles

COUNTS_FROM_ONE = ("deepseek_v2", "glm4_moe_lite")  # targets for which SGLang adds 1 to ids only if the first is 1
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NUM_FEATURES = 3  # that llama.cpp's graph reads


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or "speculators_config" in config


def write_plain(head: HeadFolder, folder: Path, *, to: str) -> None:
    """fc, midlayer or layers.{i}, norm, lm_head, d2t, t2d. Raises BadInput on what SGLang does not support."""
    embedding = own_embedding(head) if to == "vllm" else bare_embedding(head)
    if to == "sglang" and head.own.get("parallel"):
        raise BadInput(f"head {head.path}: parallel: SGLang drafts token by token: export to vllm")
    if to == "sglang" and head.config["norm_before_residual"]:
        why = "SGLang has no such layer: export to vllm or speculators"
        raise BadInput(f"head {head.path}: norm_before_residual: {why}")
    for problem in window_problems(head.config, in_sglang=Eagle3Serving.in_sglang, to=to):
        raise BadInput(f"head {head.path}: {problem}: export to vllm or speculators")
    ids = head.config[FEATURE_IDS]
    kind = (head.target_config or {}).get("model_type")
    if to == "sglang" and kind in COUNTS_FROM_ONE and ids[0] != 2:
        why = f"of a {kind} target SGLang reads feature layers {ids} as other ones; start at 2"
        raise BadInput(f"head {head.path}: {why}")
    write_config(folder, {**head.config, **scale_key(head), **head.provenance})
    write_tensors(folder, with_both_norms(head) | embedding)


def write_speculators(head: HeadFolder, folder: Path) -> None:
    """layers.{i}, fc, norm, lm_head, d2t, t2d. Raises BadInput if the target's config is not
    available or the head drafts in parallel."""
    bare_embedding(head)
    if head.own.get("parallel"):
        raise BadInput(f"head {head.path}: parallel: not written in this layout: export to vllm")
    config = head.config
    layer_keys = (*OPTIONS, "num_aux_hidden_states", *(key for key in WINDOW_KEYS if key in config))
    served = {
        **as_speculators(head, architecture="Eagle3DraftModel", kind="eagle3", layer_keys=layer_keys),
        FEATURE_IDS: config[FEATURE_IDS],
        **{key: config[key] for key in OPTIONS},
        "embed_requires_grad": False,
    }
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): value for name, value in with_both_norms(head).items()}
    write_config(folder, {**served, **head.provenance})
    write_tensors(folder, tensors)


def with_both_norms(head: HeadFolder) -> dict[str, Tensor]:
    """The tensors, with the input norm of layers after the first under both names: `input_layernorm` for vLLM,
    `hidden_norm` for SGLang."""
    tensors = dict(head.tensors)
    for i in range(1, head.config["num_hidden_layers"]):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    return tensors


def plain(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    contract = Contract("eagle3")
    contract.want(config, "architectures", ["LlamaForCausalLMEagle3"], "the only name that every engine knows")
    llama_keys(config, contract)
    feature_ids(config, contract)
    nested = config.get("eagle_config") or {}
    ids = config.get(FEATURE_IDS)
    if ids is not None or FEATURE_IDS in nested:
        wanted = [i - 1 for i in ids] if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
        listed = nested.get(FEATURE_IDS)
        counted = f"expected {wanted}: SGLang counts outputs of layers, one less than vLLM's {ids}"
        contract.report(listed != wanted, f"eagle_config.{FEATURE_IDS}: {listed}, {counted}")
        contract.want(nested, "use_aux_hidden_state", True, "SGLang reads no features without it")
    if "norm_before_fc" in nested and bool(nested["norm_before_fc"]) != bool(config.get("norm_before_fc")):
        contract.problems.append("eagle_config.norm_before_fc: differs from norm_before_fc")
    contract.report("draft_vocab_size" not in config, "draft_vocab_size: missing; SGLang needs the key")
    contract.want(config, "norm_before_residual", False, "SGLang has no such layer")
    return tensors_of(config, config, contract, names)


def llamacpp(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    """EAGLE-3 as llama.cpp's converter reads it."""
    contract = Contract("eagle3")
    llama_keys(config, contract)
    feature_ids(config, contract)
    without = "draft_vocab_size: missing; the converter takes the folder for a whole Llama without it"
    contract.report("draft_vocab_size" not in config, without)
    contract.problems += refusals(config)
    return tensors_of(config, config, contract, names)


def speculators(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    contract = Contract("speculators")
    layer = config.get("transformer_layer_config") or {}
    only = "the one of our families that vLLM serves from this format"
    contract.want(config, "speculators_model_type", "eagle3", only)
    alike = "must be there and in transformer_layer_config alike; vLLM starts from that"
    for key in OPTIONS:
        contract.report(key not in config or layer.get(key) != config[key], f"{key}: {alike}")
    serves_itself(config, contract)
    llama_keys(layer, contract)
    feature_ids({**config, "num_aux_hidden_states": layer.get("num_aux_hidden_states")}, contract)
    contract.report("draft_vocab_size" not in config, "draft_vocab_size: missing")
    contract.want(config, "norm_before_residual", False, "SGLang has no such layer")
    return tensors_of(config, layer, contract, names)


def feature_ids(config: Mapping[str, Any], contract: Contract) -> None:
    """Check that feature layers ascend, have the stated number, and are those that the head was trained with."""
    ids, key, num_features = config.get(FEATURE_IDS), FEATURE_IDS, config.get("num_aux_hidden_states")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        contract.problems.append(f"{key}: expected layer numbers at the top, where vLLM reads them, found {ids!r}")
        return
    is_sorted = ids == sorted(set(ids))
    contract.report(not is_sorted, f"{key}: {ids} do not ascend; vLLM sorts them, and fc reads features in order")
    sized = f"{num_features!r} for {len(ids)} ids; vLLM sizes fc by it"
    contract.report(num_features != len(ids), f"num_aux_hidden_states: {sized}")
    trained = trained_config(config).get("feature_layers")
    contract.report(trained not in (None, ids), f"{key}: {ids}, but the head was trained on {trained}")


def tensors_of(
    config: Mapping[str, Any], layer: Mapping[str, Any], contract: Contract, names: Iterable[str]
) -> Contract:
    """Complete the contract with the tensors of EAGLE-3; `layer` is the part of the config with the sizes."""
    if "target_hidden_size" in config and not isinstance(config["target_hidden_size"], int):
        contract.problems.append("target_hidden_size: must be a number or not there; engines multiply by it")
    sizes = sizes_of(layer, contract, (*SIZES, "num_hidden_layers", "num_aux_hidden_states"))
    if sizes is None:
        return contract
    hidden, num_features, num_layers = sizes["hidden_size"], sizes["num_aux_hidden_states"], sizes["num_hidden_layers"]
    vocab = sizes["vocab_size"] if config.get("draft_vocab_size") is None else config["draft_vocab_size"]
    if not isinstance(vocab, int) or not 1 <= vocab <= sizes["vocab_size"]:
        contract.problems.append(f"draft_vocab_size: {vocab!r}, expected 1 to vocab_size {sizes['vocab_size']}")
        return contract
    is_mid = num_layers == 1 and contract.layout == "eagle3" and not any(name.startswith("layers.0.") for name in names)
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    place = "midlayer" if is_mid else "layers.0"
    contract.shapes = {
        "fc.weight": (hidden, num_features * (config.get("target_hidden_size") or hidden)),
        **llama_layer_shapes(place, sizes, in_size=2 * hidden, norms=norms),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(1, num_layers):
        contract.shapes |= llama_layer_shapes(f"layers.{i}", sizes, in_size=hidden, norms=norms)
        contract.equal.append((f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"))
    if config.get("fc_norm"):
        contract.shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_features)}
    masks = [config[key] for key in MASK_KEYS if config.get(key) is not None]
    if trained_config(config).get("parallel") or "mask_hidden" in names or masks:
        contract.shapes["mask_hidden"] = (1, 1, num_features * (config.get("target_hidden_size") or hidden))
        outside = any(type(token) is not int or not 0 <= token < sizes["vocab_size"] for token in masks)
        wrong = f"pard_token: found {masks} under {', '.join(MASK_KEYS)}, expected one token of the target"
        contract.report(len(set(masks)) != 1 or outside, wrong)
    if config.get("norm_before_fc"):
        contract.shapes["input_norm.weight"] = (num_features * hidden,)
    if vocab < sizes["vocab_size"]:
        contract.shapes |= {"d2t": (vocab,), "t2d": (sizes["vocab_size"],)}
    whole = "the draft vocabulary is the whole one"
    contract.forbidden = {"embed_tokens.weight": BARE_EMBEDDING, "d2t": whole, "t2d": whole}
    if config.get(SCALE):
        contract.shapes["embed_tokens.weight"] = (sizes["vocab_size"], hidden)
    return contract


def refusals(config: Mapping[str, Any]) -> list[str]:
    """What llama.cpp's EAGLE-3 graph does not support in an exported folder."""
    problems = [f"{key}: it has no such norm" for key in ("fc_norm", "norm_output") if config.get(key)]
    problems += parallel_refusals(config)
    if "sliding_attention" in (config.get("layer_types") or ()):
        problems.append(f"sliding_window: {config.get('sliding_window')}, its heads see all positions")
    num_layers, num_taps = config.get("num_hidden_layers"), config.get("num_aux_hidden_states")
    if num_layers != 1:
        problems.append(f"num_hidden_layers: {num_layers}, its heads have one layer")
    if num_taps != NUM_FEATURES:
        problems.append(f"num_aux_hidden_states: {num_taps}, its heads read {NUM_FEATURES} features")
    return problems + rotation_refusals(config, ROTATIONS)


def gguf_contract(file: GgufFile) -> Contract:
    """EAGLE-3: fc, one layer that reads twice its width, output norm and output layer; d2t if the vocabulary is cut."""
    contract = Contract("eagle3 (GGUF)")
    sizes = gguf_sizes(file, contract)
    check_target_layers(file, contract, num_features=NUM_FEATURES)
    for key in ("norm_before_residual", "norm_before_fc"):
        flag(file, contract, key, allowed=(True, False, None))
    layer_keys(file, contract, "rope.dimension_count")
    if sizes is None:
        return contract
    contract.report(sizes["block_count"] != 1, f"eagle3.block_count: {sizes['block_count']}, its graph has one layer")
    hidden, wide = sizes["embedding_length"], file.own("target_hidden_size")
    if type(wide) is not int:
        contract.problems.append(f"eagle3.target_hidden_size: expected a count, found {wide!r}")
        return contract
    contract.report(wide != hidden, f"eagle3.target_hidden_size: {wide}, but embeddings, the target's, have {hidden}")
    contract.shapes = layer_shapes(file, sizes, contract, place="blk.0", read=2 * hidden)
    contract.shapes |= {"blk.0.attn_norm_2.weight": (hidden,), "fc.weight": (hidden, NUM_FEATURES * wide)}
    drafted_vocabulary(file, sizes, contract)
    if file.own("norm_before_fc"):
        contract.shapes["enc.output_norm.weight"] = (NUM_FEATURES * wide,)
    return contract


class Eagle3Serving(Serving):
    engines = ("vllm", "sglang", "speculators", "llama.cpp")
    order = 3
    keeps_vocabulary = True
    path_words = ("eagle3",)
    key_types = {"eagle_config": dict}
    computes = ("num_layers", *OPTIONS, "architecture", "sliding_window", "parallel", "mask_token_id")
    sglang_algorithms = {"eagle3": "EAGLE3"}
    spec_types = {"eagle3": "draft-eagle3"}
    reads_features = True
    in_sglang = "SGLang drafts over all positions"
    gguf = {
        "eagle3": GgufLayout(
            gguf_contract,
            {
                **{key: key for key in ("norm_before_residual", "norm_before_fc", "vocab_size")},
                "target_layers": FEATURE_IDS,
            },
        )
    }

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        if to == "speculators":
            write_speculators(head, folder)
        else:
            write_plain(head, folder, to=to)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        has_norm = any(name.endswith("hidden_norm.weight") for name in stored.shapes if "mtp" not in name)
        return is_speculators(config) or "eagle3" in str(config.get("architectures")).lower() or has_norm

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        made = speculators if is_speculators(config) else llamacpp if to == "llama.cpp" else plain
        return made(config, list(stored.shapes))

    def read(self, folder: ForeignFolder) -> Imported:
        return import_eagle3(folder)

    def method_of(self, file: GgufFile) -> str | None:
        return "eagle3" if file.architecture in self.gguf else None

    def refusals(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        return refusals(config)
