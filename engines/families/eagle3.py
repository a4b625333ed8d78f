"""EAGLE-3 in one folder that vLLM, SGLang and llama.cpp's converter load, and in the layout of the speculators library.

The engines count feature layers differently and read different keys, so both are written (heads/eagle3.py). They have
different names for the input norm of later layers, so it is written twice. The embedding is the target's and not in the
file, except for vLLM and a target whose embedding module scales its table.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.typed import TypedKeys
from ...targets.target import Target
from ...targets.weights.tensor_files import TensorFiles
from ..layouts.contracts import (
    EMBEDDING,
    LM_HEAD,
    SIZES,
    Contract,
    llama_keys,
    sizes_of,
    trained_config,
    window_problems,
)
from ..layouts.foreign import ForeignFolder, Imported, Tensors, architecture_of, draft_ids, window_of
from ..layouts.gguf_file import GgufFile
from ..layouts.serving import GgufLayout, HeadFolder, Serving, not_in_llamacpp
from ..layouts.speculators import WINDOW_KEYS, as_speculators, serves_itself
from ..layouts.writing import (
    BARE_EMBEDDING,
    SCALE,
    own_embedding,
    scale_key,
    scaling_problem,
    write_config,
    write_tensors,
)

ONLY_LAYER, FIRST_LAYER = "midlayer", "layers.0"  # names of the first layer where it is the only one, and elsewhere
LATER_NORMS = ("input_layernorm", "hidden_norm")  # of one norm of later layers, which vLLM and SGLang read
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # names that vLLM knows the mask token by
FEATURE_IDS = "eagle_aux_hidden_state_layer_ids"
COUNTS_FROM_ONE = ("deepseek_v2", "glm4_moe_lite")  # targets for which SGLang adds 1 to ids only if the first is 1
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# keys of a GGUF file, by those of config.json
IN_GGUF = {key: key for key in ("norm_before_residual", "norm_before_fc", "vocab_size")} | {
    "target_layers": FEATURE_IDS
}
NUM_FEATURES = 3  # that llama.cpp's graph reads


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or "speculators_config" in config


def speculators_config(head: HeadFolder) -> dict[str, Any]:
    """The config in the layout of the speculators library. Raises BadInput if the target's is not available."""
    config = head.config
    layer_keys = (*OPTIONS, "num_aux_hidden_states", *(key for key in WINDOW_KEYS if key in config))
    return {
        **as_speculators(head, architecture="Eagle3DraftModel", kind="eagle3", layer_keys=layer_keys),
        FEATURE_IDS: config[FEATURE_IDS],
        **{key: config[key] for key in OPTIONS},
        "embed_requires_grad": False,
    }


def plain_problems(config: Mapping[str, Any], contract: Contract, *, to: str) -> None:
    """Report what vLLM and SGLang misread in the plain layout. Args: to: as in `check_export`."""
    contract.want(config, "architectures", ["LlamaForCausalLMEagle3"], "the only name that every engine knows")
    nested, ids = config.get("eagle_config") or {}, config.get(FEATURE_IDS)
    if ids is not None or FEATURE_IDS in nested:
        wanted = [i - 1 for i in ids] if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
        listed = nested.get(FEATURE_IDS)
        counted = f"expected {wanted}: SGLang counts outputs of layers, one less than vLLM's {ids}"
        contract.report(listed != wanted, f"eagle_config.{FEATURE_IDS}: {listed}, {counted}")
        contract.want(nested, "use_aux_hidden_state", True, "SGLang reads no features without it")
    if "norm_before_fc" in nested and bool(nested["norm_before_fc"]) != bool(config.get("norm_before_fc")):
        contract.problems.append("eagle_config.norm_before_fc: differs from norm_before_fc")
    if to == "sglang":
        contract.want(config, "norm_before_residual", False, "SGLang has no such layer")


def speculators_problems(config: Mapping[str, Any], layer: Mapping[str, Any], contract: Contract) -> None:
    """Report what vLLM misreads in the layout of the speculators library."""
    only = "the one of our families that vLLM serves from this format"
    contract.want(config, "speculators_model_type", "eagle3", only)
    alike = "must be there and in transformer_layer_config alike; vLLM starts from that"
    for key in OPTIONS:
        contract.report(key not in config or layer.get(key) != config[key], f"{key}: {alike}")
    serves_itself(config, contract)


def check_feature_ids(config: Mapping[str, Any], num_features: Any, contract: Contract) -> None:
    """Check that feature layers ascend, have the stated number, and are those that the head was trained with."""
    ids, key = config.get(FEATURE_IDS), FEATURE_IDS
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        contract.problems.append(f"{key}: expected layer numbers at the top, where vLLM reads them, found {ids!r}")
        return
    is_sorted = ids == sorted(set(ids))
    contract.report(not is_sorted, f"{key}: {ids} do not ascend; vLLM sorts them, and fc reads features in order")
    sized = f"{num_features!r} for {len(ids)} ids; vLLM sizes fc by it"
    contract.report(num_features != len(ids), f"num_aux_hidden_states: {sized}")
    trained = trained_config(config).get("feature_layers")
    contract.report(trained not in (None, ids), f"{key}: {ids}, but the head was trained on {trained}")


def require_tensors(
    config: Mapping[str, Any], layer: Mapping[str, Any], contract: Contract, names: Iterable[str]
) -> None:
    """Write the tensors into the contract. Args: layer: the part of the config with the sizes. names: of the tensors
    in the folder, whose first layer may have either name."""
    sizes = sizes_of(layer, contract, *SIZES)
    counts = sizes_of(layer, contract, "num_hidden_layers", "num_aux_hidden_states")
    if sizes is None or counts is None:
        return
    hidden, vocab, num_layers = sizes["hidden_size"], sizes["vocab_size"], counts["num_hidden_layers"]
    if config.get("target_hidden_size", hidden) != hidden:
        contract.problems.append(f"target_hidden_size: must be {hidden} or not there; engines multiply by it")
    drafted = vocab if config.get("draft_vocab_size") is None else config["draft_vocab_size"]
    if not isinstance(drafted, int) or not 1 <= drafted <= vocab:
        contract.problems.append(f"draft_vocab_size: {drafted!r}, expected 1 to vocab_size {vocab}")
        return
    masks = [config[key] for key in MASK_KEYS if config.get(key) is not None]
    is_parallel = bool(trained_config(config).get("parallel") or "mask_hidden" in names or masks)
    if is_parallel:
        outside = any(type(token) is not int or not 0 <= token < vocab for token in masks)
        wrong = f"pard_token: found {masks} under {', '.join(MASK_KEYS)}, expected one token of the target"
        contract.report(len(set(masks)) != 1 or outside, wrong)
    contract.require(
        "eagle3",
        sizes,
        num_layers=num_layers,
        feature_layers=list(range(counts["num_aux_hidden_states"])),
        parallel=is_parallel,
        draft_vocab_size=drafted if drafted < vocab else None,
        **{key: bool(config.get(key)) for key in ("fc_norm", "norm_before_fc")},
    )
    has_first = any(name.startswith(f"{FIRST_LAYER}.") for name in names)
    if has_first or contract.layout == "speculators":
        contract.shapes = {name.replace(ONLY_LAYER, FIRST_LAYER): shape for name, shape in contract.shapes.items()}
    for i in range(1, num_layers) if contract.shapes else ():
        one, other = (f"layers.{i}.{name}.weight" for name in LATER_NORMS)
        contract.shapes[other] = (hidden,)
        contract.equal.append((one, other))
    if config.get(SCALE) and contract.shapes:
        contract.shapes[EMBEDDING] = (vocab, hidden)
    whole = "the draft vocabulary is the whole one"
    contract.forbidden = {EMBEDDING: BARE_EMBEDDING, "d2t": whole, "t2d": whole}


class Eagle3Serving(Serving):
    layouts = ("speculators",)
    keeps_vocabulary = True
    key_types = {"eagle_config": dict}
    computes = ("num_layers", *OPTIONS, "architecture", "sliding_window", "parallel", "mask_token_id")
    in_fp8 = "LlamaForCausalLMEagle3"
    in_sglang = "SGLang drafts over all positions"
    gguf = {"eagle3": GgufLayout(IN_GGUF)}

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        ids, kind = head.config[FEATURE_IDS], (head.target_config or {}).get("model_type")
        other = f"of a {kind} target SGLang reads feature layers {ids} as other ones; start at 2"
        problems = {
            scaling_problem(head): to != "vllm",
            "parallel: SGLang drafts token by token: export to vllm": to == "sglang" and head.is_parallel,
            "parallel: not written in this layout: export to vllm": to == "speculators" and head.is_parallel,
            "norm_before_residual: SGLang has no such layer: export to vllm or speculators": (
                to == "sglang" and head.config["norm_before_residual"]
            ),
            other: to == "sglang" and kind in COUNTS_FROM_ONE and ids[0] != 2,
            **dict.fromkeys(window_problems(head.config, in_sglang=self.in_sglang, to=to), True),
        }
        return [*(problem for problem, is_there in problems.items() if problem and is_there)]

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        tensors = dict(head.tensors)
        for i in range(1, head.config["num_hidden_layers"]):
            one, other = (f"layers.{i}.{name}.weight" for name in LATER_NORMS)
            tensors[other] = tensors[one].clone()
        if to == "speculators":
            config = speculators_config(head)
            tensors = {name.replace(ONLY_LAYER, FIRST_LAYER): value for name, value in tensors.items()}
        else:
            config = {**head.config, **scale_key(head)}
            tensors |= own_embedding(head) if to == "vllm" else {}
        write_config(folder, {**config, **head.provenance})
        write_tensors(folder, tensors)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        has_norm = any(name.endswith("hidden_norm.weight") for name in stored.shapes if "mtp" not in name)
        return is_speculators(config) or "eagle3" in str(config.get("architectures")).lower() or has_norm

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        is_nested = is_speculators(config)
        contract = Contract("speculators" if is_nested else "eagle3")
        layer = (config.get("transformer_layer_config") or {}) if is_nested else config
        if is_nested:
            speculators_problems(config, layer, contract)
        elif to == "llama.cpp":
            contract.problems += self.not_in_llamacpp(config, stored.shapes)
        else:
            plain_problems(config, contract, to=to)
        llama_keys(layer, contract)
        check_feature_ids(config, layer.get("num_aux_hidden_states"), contract)
        why = "the converter takes the folder for a whole Llama" if to == "llama.cpp" else "SGLang needs the key"
        contract.report("draft_vocab_size" not in config, f"draft_vocab_size: missing; {why}")
        require_tensors(config, layer, contract, list(stored.shapes))
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        """EAGLE-3 as its authors, SpecForge, vLLM and the speculators library write it; the last nests the layer's
        config and has norm_before_residual as default."""
        config, target = folder.config, folder.target
        layer = config.inner_or_self("transformer_layer_config")
        num_layers = layer.read("num_hidden_layers", int) or 1
        tensors = folder.bare_tensors(EMBEDDING)
        for i in range(1, num_layers):
            one, other = (f"layers.{i}.{name}.weight" for name in LATER_NORMS)
            if other in tensors:
                tensors.setdefault(one, tensors.pop(other))
        if num_layers == 1:
            tensors = {re.sub(rf"^{FIRST_LAYER}\.", f"{ONLY_LAYER}.", name): v for name, v in tensors.items()}
        ids = draft_ids(tensors, target)
        keys: dict[str, Any] = {
            "feature_layers": feature_layers(config, layer, tensors, target),
            "num_layers": num_layers,
            **{key: bool(config.read(key, bool)) for key in ("fc_norm", "norm_output")},
        }
        is_nested, in_speculators = "speculators_config" in config.values, config.inner("speculators_config")
        if methods := in_speculators.read("proposal_methods", list[dict]):
            first = TypedKeys(methods[0], f"{in_speculators.where}proposal_methods.0.")
            keys |= {"num_depths": num} if (num := first.read("speculative_tokens", int)) else {}
        before_residual = config.read("norm_before_residual", bool)
        is_peagle = config.read("speculators_model_type", str) == "peagle"  # of which vLLM takes another default
        before_fc = [part.read("norm_before_fc", bool) for part in (config, config.inner("eagle_config"))]
        keys |= {
            "norm_before_residual": is_nested and not is_peagle if before_residual is None else before_residual,
            "norm_before_fc": bool(before_fc[1] if before_fc[0] is None else before_fc[0]),
            "sliding_window": window_of(layer),
            "architecture": architecture_of(layer.without("sliding_window"), target),
        }
        if "mask_hidden" in tensors:
            token = next((token for key in MASK_KEYS if (token := config.read(key, int)) is not None), None)
            if token is None:
                raise BadInput("pard_token: missing, and there is a mask_hidden")
            keys |= {"parallel": True, "mask_token_id": token}
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        if LM_HEAD not in tensors:
            if ids is not None:
                raise BadInput(f"tensor {LM_HEAD}: missing, and the draft vocabulary is cut")
            tensors[LM_HEAD] = target.output_layer.weight
        return Imported(keys, tensors, ids)

    def method_of(self, file: GgufFile) -> str | None:
        return "eagle3" if file.architecture in self.gguf else None

    def not_in_llamacpp(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        problems = [f"{key}: it has no such norm" for key in ("fc_norm", "norm_output") if config.get(key)]
        if "sliding_attention" in (config.get("layer_types") or ()):
            problems.append(f"sliding_window: {config.get('sliding_window')}, its heads see all positions")
        num_layers, num_read = config.get("num_hidden_layers"), config.get("num_aux_hidden_states")
        if num_layers != 1:
            problems.append(f"num_hidden_layers: {num_layers}, its heads have one layer")
        if num_read != NUM_FEATURES:
            problems.append(f"num_aux_hidden_states: {num_read}, its heads read {NUM_FEATURES} features")
        return problems + not_in_llamacpp(config)


def feature_layers(config: TypedKeys, layer: TypedKeys, tensors: Tensors, target: Target) -> list[int]:
    """The feature layers as HF `hidden_states` indices: vLLM's top-level key as it is, SGLang's nested one plus 1.

    Raises: BadInput if their number does not match fc.weight.
    """
    num = tensors["fc.weight"].shape[1] // target.hidden_size if "fc.weight" in tensors else NUM_FEATURES
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
