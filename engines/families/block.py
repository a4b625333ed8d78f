"""Block drafters in the plain layout that vLLM, SGLang and llama.cpp load and in that of the speculators library, and
what a folder of either must hold.

Engines have different defaults for missing flags (whether slots see later slots, which slot drafts first, how layers
are counted), and a wrong one lowers acceptance silently. So every flag is written, and its absence is reported. The
classes of DFlash, DFlash2 and LiLiCorr draft from the slot after the anchor only; DSpark's, which needs a Markov head,
either way. DFlash2's and LiLiCorr's choose from the whole vocabulary.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from ...base.errors import BadInput
from ...base.typed import TypedKeys
from ...heads.nn.dflash2 import NUM_TAPS
from ...heads.nn.lilicorr import LILICORR_KEYS
from ...heads.stored.record import PROVENANCE
from ...targets.weights.tensor_files import TensorFiles
from ..layouts.contracts import (
    EMBEDDING,
    LM_HEAD,
    SIZES,
    SLIDING,
    Contract,
    llama_keys,
    sizes_of,
    trained_config,
    vllm_window,
    window_problems,
)
from ..layouts.foreign import MASK, ForeignFolder, Imported, architecture_of, draft_ids, equal_tensor, window_of
from ..layouts.gguf_file import GgufFile
from ..layouts.serving import GgufLayout, HeadFolder, Serving, not_in_llamacpp
from ..layouts.speculators import WINDOW_KEYS, as_speculators, serves_itself
from ..layouts.writing import SCALE, own_embedding, scale_key, scaling_problem, write_config, write_tensors
from . import choosers
from .choosers import DFLASH2_KEYS

DFLASH, DFLASH2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"
LILICORR = "LiLiCorrDraftModel"  # of which the speculators layout has none
GEMMA4 = "Gemma4DSparkModel"  # norms on both sides, normed values that are the keys, scores that are not scaled
ALL_DFLASH = ([DFLASH], [DFLASH2], [LILICORR])
PLAIN = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}  # classes in the plain layout, by speculators' names
IN_SPECULATORS = {**PLAIN, "dspark": "DSparkDraftModel"}
ROTATIONS = ("default", "linear", "yarn")  # that llama.cpp's graph has
TRAINED = ("num_depths", "sample_from_anchor", "feature_layers", "mask_token_id")  # of the head's own config
MARKOV_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# keys that some folders have in dflash_config alone, and vLLM reads there first
NESTED = ("mask_token_id", "target_layer_ids", "block_size", *DFLASH2_KEYS, *LILICORR_KEYS)
# keys of a GGUF file, by those of config.json
IN_GGUF = {key: key for key in ("block_size", "sample_from_anchor", *DFLASH2_KEYS)}
IN_GGUF |= {"target_layers": "target_layer_ids"}
# by which targets scale or cap what their output layer gives
LOGIT_KEYS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "final_logit_softcapping")
# tensors of which a reader takes sizes, or by which it knows what a head has
PREDECESSORS = "candidate_selector.predecessor_codebook"
MARKOV, MARKOV_IN_GGUF = "markov_head.markov_w1.weight", "markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"


def speculators_config(head: HeadFolder) -> dict[str, Any]:
    """The speculators config: it counts inputs of layers, and `sliding_window_non_causal` says that slots see later
    slots in all layers, sliding or not, as vLLM treats it as one flag."""
    config = head.config
    kind = next(kind for kind, name in PLAIN.items() if config["architectures"] == [name])
    keys = [key for key in WINDOW_KEYS if key in config]
    made = as_speculators(head, architecture=IN_SPECULATORS[kind], kind=kind, layer_keys=keys)
    made["transformer_layer_config"] |= {"is_causal": False}  # vLLM reads it there first, of DSpark nowhere else
    return {
        **made,
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "sliding_window_non_causal": True,
        **{key: config[key] for key in ("block_size", "mask_token_id", "sample_from_anchor")},
        **{key: config[key] for key in MARKOV_KEYS if key in config},
        **{key: config["dflash_config"][key] for key in DFLASH2_KEYS if key in config.get("dflash_config", {})},
    }


def plain_contract(config: Mapping[str, Any], contract: Contract) -> None:
    """Report the problems of a config in the plain layout; if there are none, write the tensors into the contract."""
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or [""]
    is_dflash = architectures in ALL_DFLASH
    known = f"expected [{DFLASH}], with a Markov head [{DSPARK}], with a selector [{DFLASH2}], a lattice [{LILICORR}]"
    contract.report(not is_dflash and architectures != [DSPARK], f"architectures: found {architectures}, {known}")
    llama_keys(config, contract, model_type="qwen3")
    sizes = sizes_of(config, contract, *SIZES)
    counts = sizes_of(config, contract, "num_hidden_layers", "num_target_layers", "block_size")
    flags(config, contract, is_dflash=is_dflash)
    listed = config.get("target_layer_ids")
    ids: list[int] = listed if isinstance(listed, list) and all(type(i) is int for i in listed) else []
    if not ids or ids != sorted(set(ids)):
        contract.problems.append(f"target_layer_ids: expected layers' outputs in order, found {listed!r}")
    if sizes is None or counts is None or contract.problems:
        return
    token, last, vocab = config.get("mask_token_id"), counts["num_target_layers"] - 1, sizes["vocab_size"]
    outside = type(token) is not int or not 0 <= token < vocab
    contract.report(outside, f"mask_token_id: {token!r}, expected 0 to {vocab - 1}")
    contract.report(ids[-1] > last or ids[0] < -1, f"target_layer_ids: {ids}, of a target with layers 0 to {last}")
    for key in ("mask_token_id", "target_layer_ids") if is_dflash else ():
        differs = f"dflash_config.{key}: {nested.get(key)!r}, but {key} {config.get(key)!r}: engines read either"
        contract.report(nested.get(key) != config.get(key), differs)
    if is_dflash and architectures != [DFLASH]:
        config = {**config, **nested}
        choosers.check_keys(config, contract, is_dflash2=architectures == [DFLASH2], hidden=sizes["hidden_size"])
    if contract.problems:
        return
    as_trained(config, contract)
    require_tensors(config, sizes, contract, num_layers=counts["num_hidden_layers"], num_features=len(ids))


def of_speculators(config: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
    """The plain config that vLLM makes of a speculators config; adds that one's problems to the contract."""
    kind, ids = str(config.get("speculators_model_type")), config.get("aux_hidden_state_layer_ids")
    known = f"speculators_model_type: {kind}, expected {' or '.join(IN_SPECULATORS)}"
    contract.report(kind not in IN_SPECULATORS, known)
    why = "where it is false, vLLM makes the slots of every layer see only earlier slots, and defaults differ"
    contract.want(config, "sliding_window_non_causal", True, why)
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    contract.report(not is_list, f"aux_hidden_state_layer_ids: expected inputs of layers, found {ids!r}")
    layers = [i - 1 for i in ids] if isinstance(ids, list) and is_list else []
    trained = trained_config(config).get("feature_layers")
    counted = "the head was trained on those; inputs of layers are counted here"
    contract.report(trained not in (None, ids), f"aux_hidden_state_layer_ids: {ids}, expected {trained}: {counted}")
    size, has_anchor = config.get("block_size"), config.get("sample_from_anchor")
    wanted = size - (0 if has_anchor else 1) if type(size) is int else None
    [told, *_] = [way.get("speculative_tokens") for way in serves_itself(config, contract)] or [None]
    contract.report(told != wanted, f"speculative_tokens: {told}, but a block drafts {wanted}")
    layer = config.get("transformer_layer_config") or {}
    kinds = layer.get("layer_types") or ()
    made = {
        "num_target_layers": max(layers, default=0) + 1,  # not said there
        "target_layer_ids": layers,
        "is_causal": bool(layer.get("is_causal", kind == "dspark" and SLIDING in kinds)),
        "architectures": [PLAIN.get(kind, DSPARK)],
        "dflash_config": {
            **{"causal": False, "mask_token_id": config.get("mask_token_id"), "target_layer_ids": layers},
            **{key: config[key] for key in DFLASH2_KEYS if key in config},
        },
    }
    return {**layer, **config, **made, "model_type": layer.get("model_type")}


def scales_logits(head: HeadFolder) -> bool:
    """Whether the target's logits are not those of its output layer alone, by its config."""
    config = head.target_config or {}
    return any(config.get(key) not in (None, 1, 1.0, 0.0) for key in LOGIT_KEYS)


def flags(config: Mapping[str, Any], contract: Contract, *, is_dflash: bool) -> None:
    """Report flags for which engines have other defaults."""
    window, slots = vllm_window(config), config.get("block_size")
    contract.report("layer_types" not in config, "layer_types: missing; engines' defaults differ")
    is_narrow = type(window) is int and type(slots) is int and window < slots
    contract.report(is_narrow, f"sliding_window: {window}, expected at least the {slots} slots of a block")
    if window:
        contract.want(config, "use_sliding_window", True, "llama.cpp reads the window with it only")
    why = "the slots of a block see each other, and engines differ in the default"
    contract.want(config, "is_causal", False, why)
    if is_dflash:
        contract.want(config.get("dflash_config") or {}, "causal", False, why)
        contract.want(config, "sample_from_anchor", False, "engines' DFlash drafts from the slot behind the anchor")
        return
    first = config.get("sample_from_anchor")
    unsaid = f"sample_from_anchor: {first!r}: engines' defaults differ, so it must be said"
    contract.report(not isinstance(first, bool), unsaid)
    contract.want(config, "markov_head_type", "vanilla", "the only one that engines serve")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        contract.report(not isinstance(config.get(key), bool), f"{key}: missing; engines' defaults differ")


def as_trained(config: Mapping[str, Any], contract: Contract) -> None:
    """Report differences from the head's own config, if our export wrote the folder."""
    trained = trained_config(config)
    missing = [key for key in TRAINED if key not in trained] if trained else []
    contract.problems += [f"{PROVENANCE}.head.{key}: missing" for key in missing]
    if not trained or missing:
        return
    wanted = {key: trained[key] for key in ("sample_from_anchor", "mask_token_id")}
    wanted["block_size"] = trained["num_depths"] + (0 if trained["sample_from_anchor"] else 1)
    wanted["target_layer_ids"] = [i - 1 for i in trained["feature_layers"]]
    for key, value in wanted.items():
        contract.want(config, key, value, "the head was trained with that")


def require_tensors(
    config: Mapping[str, Any], sizes: Mapping[str, int], contract: Contract, *, num_layers: int, num_features: int
) -> None:
    """Write the tensors into the contract, by keys of the config that were checked."""
    hidden, vocab, architectures = sizes["hidden_size"], sizes["vocab_size"], config.get("architectures")
    drafted, first = config.get("draft_vocab_size") or vocab, bool(config.get("sample_from_anchor"))
    choosing: dict[str, Any] = {}
    if architectures in ([DFLASH2], [LILICORR]):
        choosing = {
            "conv_group_size": config.get("conv_group_size") or None,
            "selector_rank": config.get("selector_rank", 0),
        }
    if architectures == [LILICORR]:
        choosing |= choosers.lattice_keys(lambda key, _: config[key], hidden)
    contract.require(
        "block",
        sizes,
        num_depths=config["block_size"] - (0 if first else 1),
        sample_from_anchor=first,
        num_layers=num_layers,
        feature_layers=list(range(num_features)),
        markov_rank=config.get("markov_rank") or 0,
        confidence=bool(config.get("enable_confidence_head")),
        output="own",
        draft_vocab_size=drafted if drafted < vocab else None,
        **choosing,
    )
    if CONFIDENCE in contract.shapes and not config.get("confidence_head_with_markov"):
        contract.shapes[CONFIDENCE] = (1, hidden)
    contract.optional = {EMBEDDING: (vocab, hidden)}
    if config.get(SCALE) and contract.shapes:
        contract.shapes[EMBEDDING] = (vocab, hidden)
    if drafted == vocab and contract.shapes:  # a head without an output layer of its own drafts by the target's
        contract.optional[LM_HEAD] = contract.shapes.pop(LM_HEAD)
    contract.forbidden = {"mask_hidden": "vLLM takes it for P-EAGLE's", "d2t": "the draft vocabulary is the whole one"}


def gguf_problems(file: GgufFile) -> list[str]:
    """Flags for which llama.cpp has a default that is another head's."""
    causal, first = file.own("attention.causal"), file.own("sample_from_anchor")
    problems = [] if causal is False else [f"dflash.attention.causal: expected false, found {causal!r}"]
    if MARKOV_IN_GGUF in file.shapes and type(first) is not bool:
        problems.append(f"dflash.sample_from_anchor: expected true or false, found {first!r}")
    return problems


class BlockServing(Serving):
    methods = ("dflash", "dspark")
    layouts = ("speculators",)
    keeps_vocabulary = True
    key_types = {"dflash_config": dict, "markov_rank": int}
    computes = tuple(
        "num_layers architecture sliding_window output sample_from_anchor markov_rank confidence "
        "mask_token_id selector_top_k lattice_layers lattice_size lattice_heads lattice_mlp_ratio lattice_scale".split()
    )
    in_fp8 = DFLASH
    in_sglang = "SGLang lets a slot see earlier slots only"
    gguf = {"dflash": GgufLayout(IN_GGUF, nested="dflash_config", has_mask=True, problems=gguf_problems)}

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        own, is_dflash, selects = head.own, self.method(head) == "dflash", bool(head.own["selector_rank"])
        has_both, is_bound = selects and own["conv_group_size"] is not None, to == "sglang" and is_dflash
        no_first = "sample_from_anchor without a Markov head: engines draft from the anchor with one only"
        problems = {
            no_first: is_dflash and own["sample_from_anchor"],
            "conv_group_size and selector_rank: engines know DFlash2 with both": (
                head.config["architectures"] == [DFLASH2] and not has_both
            ),
            "draft_vocab_size: engines choose from all tokens": selects and bool(own["draft_vocab_size"]),
            f"selector_top_k: engines' lattices have one of {choosers.WIDTHS}": (
                head.config["architectures"] == [LILICORR] and own["selector_top_k"] not in choosers.WIDTHS
            ),
            "output shared: the target scales or caps its logits, which engines' drafts do not": (
                own["output"] == "shared" and (selects or bool(own["markov_rank"])) and scales_logits(head)
            ),
            "lattice_layers: the speculators layout has no lattice": to == "speculators" and own["lattice_layers"],
            "output own: SGLang's DFlash drafts with the target's output layer": is_bound and own["output"] == "own",
        }
        found = [f"{problem}: nothing written" for problem, is_there in problems.items() if is_there]
        windows = window_problems(head.config, in_sglang=self.in_sglang, to=to)
        is_bare = to != "vllm" or own["lattice_layers"]  # vLLM's LiLiCorr reads candidates in the target's bare table
        scaling = scaling_problem(head) if is_bare else ""
        return [*filter(None, [scaling]), *found, *windows]

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        config = speculators_config(head) if to == "speculators" else {**head.config, **scale_key(head)}
        write_config(folder, {**config, **head.provenance})
        write_tensors(folder, head.tensors | (own_embedding(head) if to == "vllm" else {}))

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        words = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
        return "dflash" in words or "dspark" in words or "dflash_config" in config

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        is_nested = "transformer_layer_config" in config or "speculators_model_type" in config
        contract = Contract("block (speculators)" if is_nested else "block")
        plain_contract(of_speculators(config, contract) if is_nested else config, contract)
        contract.problems += self.not_in_llamacpp(config, stored.shapes) if to == "llama.cpp" else []
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        """Import a block drafter. Raises BadInput on parts that ours do not have and that change the result, and if the
        mask token, the block size or the feature layers are missing."""
        config, target = plain_config(folder.config), folder.target
        tensors = folder.bare_tensors()
        table, ids = tensors.pop(EMBEDDING, None), draft_ids(tensors, target)
        if folder.own is not None:
            return Imported({}, tensors, ids)
        is_plain = ids is None and LM_HEAD in tensors
        if is_plain and equal_tensor(tensors[LM_HEAD], target.output_layer.weight.detach().cpu()):
            del tensors[LM_HEAD]  # the target's own
        taps, selector = config.read("conv_kernel_size", int), tensors.get(PREDECESSORS)
        markov, nested = config.read("markov_head_type", str), folder.config.inner("dflash_config")
        architectures = config.read("architectures", list[str]) or [DFLASH]
        value_scale = nested.read("attention_value_scale", float)
        contract = Contract("block")
        contract.report(architectures == [GEMMA4], f"architectures {GEMMA4}: layers of Gemma 4, ours are Qwen3's")
        contract.report(config.need("causal", bool), "causal: its slots see only those before them")
        contract.report(markov not in (None, "vanilla"), f"markov_head_type {markov}")
        contract.report(taps not in (None, 0, NUM_TAPS), f"conv_kernel_size: {taps}, expected {NUM_TAPS}")
        contract.report(config.read("is_neox_style", bool) is False, "is_neox_style: its pairs of channels interleave")
        contract.report(value_scale not in (None, 1.0), f"dflash_config.attention_value_scale {value_scale}")
        has_mask = architectures in ALL_DFLASH and (folder.path / MASK).exists()  # vLLM's DSpark reads none
        contract.report(has_mask, f"{MASK}: the mask token's embedding is not the target's")
        table = None if architectures == [LILICORR] else table  # whose candidates are looked up in the bare one
        factor = nested.read("input_embedding_scale", float) if architectures == [DFLASH2] else None
        choosers.check_embeddings(factor, contract, target, table=table)
        if architectures == [DFLASH2]:
            choosers.check_scales(nested, contract, target, is_shared=LM_HEAD not in tensors)
        for problem in contract.problems:
            raise BadInput(f"{problem}: not a block drafter as known here")
        rank = tensors[MARKOV].shape[1] if MARKOV in tensors else 0
        if CONFIDENCE in tensors:  # some do not read the previous token, so pad their weights with zeros
            narrow = tensors[CONFIDENCE]
            tensors[CONFIDENCE] = F.pad(narrow, (0, target.hidden_size + rank - narrow.shape[1]))
        drafts_first = config.need("sample_from_anchor", bool)
        layer = {**config.values, "model_type": "llama"}  # Llama's but for query and key norms
        keys = {
            "feature_layers": [i + 1 for i in config.need("target_layer_ids", list[int])],
            "num_depths": config.need("block_size", int) - (0 if drafts_first else 1),
            "num_layers": config.read("num_hidden_layers", int) or 1,
            "sliding_window": window_of(config),
            "sample_from_anchor": drafts_first,
            "markov_rank": rank,
            "confidence": CONFIDENCE in tensors,
            "conv_group_size": config.need("conv_group_size", int) if taps else None,
            "selector_rank": 0 if selector is None else selector.shape[1],
            "selector_top_k": 16 if selector is None else config.need("selector_top_k", int),
            **(choosers.lattice_keys(config.need, target.hidden_size) if architectures == [LILICORR] else {}),
            "output": "own" if LM_HEAD in tensors else "shared",
            "mask_token_id": config.need("mask_token_id", int),
            "architecture": architecture_of(TypedKeys(layer, config.where).without("sliding_window"), target),
        }
        return Imported(keys, tensors, ids)

    def method(self, head: HeadFolder) -> str:
        return "dspark" if head.config["architectures"] == [DSPARK] else "dflash"

    def method_of(self, file: GgufFile) -> str | None:
        method = "dspark" if MARKOV_IN_GGUF in file.shapes else "dflash"
        return method if file.architecture in self.gguf else None

    def not_in_llamacpp(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        layer, names = config.get("transformer_layer_config"), set(names)
        whole = {**config, **(layer or {})}
        is_cut = config.get("draft_vocab_size") not in (None, whole.get("vocab_size"))
        problems = not_in_llamacpp(whole, ROTATIONS)
        if config.get("architectures") == [LILICORR]:
            return [*problems, "architectures: it has no LiLiCorr"]
        if config.get("architectures") not in ([DFLASH], [DFLASH2]):
            if LM_HEAD in names and not is_cut:
                why = "drops an output layer over the whole vocabulary: train with output: shared, or draft_vocab_size"
                problems.append(f"lm_head.weight: its converter {why}")
            return problems
        if is_cut:
            problems.append(f"draft_vocab_size: {config['draft_vocab_size']}, its DFlash drafts the whole vocabulary")
        if any(name.startswith("confidence_head.") for name in names):
            problems.append("confidence_head: its graph has one beside a Markov head only")
        if layer is not None:
            problems.append("transformer_layer_config: it reads DFlash in the plain layout only")
        top_k, hidden = (config.get("dflash_config") or {}).get("selector_top_k") or 0, whole.get("hidden_size") or 0
        if hidden < (least := top_k * (top_k + 1)):
            why = f"of DFlash2 takes a hidden_size of {least} at least, this is {hidden}"
            problems.append(f"selector_top_k: {top_k} {why}")
        return problems


def plain_config(config: TypedKeys) -> TypedKeys:
    """A config of either layout with the plain layout's keys at the top, and defaults for missing flags.

    The speculators library counts inputs of layers, and keeps the layers' keys in a nested config.
    """
    layer = config.inner("transformer_layer_config")
    nested = TypedKeys({}) if layer.values else config.inner("dflash_config")  # vLLM makes its own of the former
    first = {key: nested.values[key] for key in NESTED if nested.values.get(key) is not None}
    plain = {**layer.values, **config.values, **first}
    if (ids := config.read("aux_hidden_state_layer_ids", list[int])) is not None:
        plain["target_layer_ids"] = [i - 1 for i in ids]
    is_dspark = (config.read("architectures", list[str]) or [DFLASH]) not in ALL_DFLASH
    plain.setdefault("sample_from_anchor", is_dspark and not layer.values)
    if layer.values and not is_dspark:
        plain.setdefault("sliding_window_non_causal", True)  # as vLLM does, which reads none of DSpark
    keys = TypedKeys(plain, config.where)
    is_sliding = SLIDING in (keys.read("layer_types", list[str]) or ())  # then causal is what engines take for granted
    if nested.read("use_swa", bool) and not is_sliding:  # vLLM: all layers, without causality
        plain["layer_types"] = [SLIDING]
    if SLIDING in (plain.get("layer_types") or ()):
        plain["sliding_window"] = nested.read("swa_window_size", int) or plain.get("sliding_window")
    all_see = keys.read("sliding_window_non_causal", bool)
    flags = keys.read("is_causal", bool), nested.read("causal", bool), None if all_see is None else not all_see
    plain["causal"] = next((flag for flag in (*flags, plain.get("causal")) if flag is not None), is_sliding)
    return keys
