"""Block drafters in the plain layout that vLLM, SGLang and llama.cpp load and in that of the speculators library, and
what a folder of either must hold.

Engines have different defaults for missing flags (whether slots see later slots, which slot drafts first, how layers
are counted), and a wrong one lowers acceptance silently. So every flag is written, and its absence is reported. The
classes of DFlash and DFlash2 draft from the slot after the anchor only; DSpark's, which needs a Markov head, either
way. DFlash2's has convolutions and a selector over the whole vocabulary.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from ..importing.block import DFLASH, DFLASH2, import_block
from ..importing.imported import ForeignFolder, Imported
from ..nn.dflash2 import NUM_TAPS
from .contracts import (
    SIZES,
    Contract,
    llama_keys,
    llama_layer_shapes,
    sizes_of,
    trained_config,
    vllm_window,
    window_problems,
)
from .folder import bare_embedding, write_config, write_tensors
from .gguf_contract import (
    MASK_TOKEN,
    check_target_layers,
    drafted_vocabulary,
    flag,
    gguf_sizes,
    head_dim_of,
    layer_keys,
    layer_shapes,
)
from .gguf_file import GgufFile
from .llamacpp import rotation_refusals
from .record import PROVENANCE
from .serving import GgufLayout, HeadFolder, Serving
from .speculators import WINDOW_KEYS, as_speculators, serves_itself
from .tensor_files import TensorFiles

DSPARK = "Qwen3DSparkModel"
ROTATIONS = ("default", "linear", "yarn")  # that llama.cpp's graph has
NORMS = ["input_layernorm", "post_attention_layernorm"]
PLAIN = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}  # classes in the plain layout, by speculators' names
IN_SPECULATORS = {**PLAIN, "dspark": "DSparkDraftModel"}
TRAINED = ("num_depths", "sample_from_anchor", "feature_layers", "mask_token_id")  # of the head's own config
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
MARKOV_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def speculators_config(head: HeadFolder) -> dict[str, Any]:
    """The speculators config: it counts inputs of layers, and `sliding_window_non_causal` says that slots see later
    slots in all layers, sliding or not, as vLLM treats it as one flag."""
    config = head.config
    kind = next(kind for kind, name in PLAIN.items() if config["architectures"] == [name])
    layer_keys = [key for key in WINDOW_KEYS if key in config]
    return {
        **as_speculators(head, architecture=IN_SPECULATORS[kind], kind=kind, layer_keys=layer_keys),
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "sliding_window_non_causal": True,
        **{key: config[key] for key in ("block_size", "mask_token_id", "sample_from_anchor")},
        **{key: config[key] for key in MARKOV_KEYS if key in config},
        **{key: config["dflash_config"][key] for key in DFLASH2_KEYS if key in config.get("dflash_config", {})},
    }


def contract_of(config: Mapping[str, Any]) -> Contract:
    """What a folder with this config must hold, and the problems of the config itself."""
    contract = Contract("block")
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        contract.layout = "block (speculators)"
        config = of_speculators(config, contract)
    nested = config.get("dflash_config") or {}
    architectures = config.get("architectures") or [""]
    is_dflash = architectures in ([DFLASH], [DFLASH2])
    known = f"[{DFLASH}], with a Markov head [{DSPARK}], with a selector [{DFLASH2}]"
    contract.report(
        not is_dflash and architectures != [DSPARK], f"architectures: found {architectures}, expected {known}"
    )
    llama_keys(config, contract, model_type="qwen3")
    sizes = sizes_of(config, contract, (*SIZES, "num_hidden_layers", "num_target_layers", "block_size"))
    flags(config, contract, is_dflash=is_dflash)
    listed = config.get("target_layer_ids")
    ids: list[int] = listed if isinstance(listed, list) and all(type(i) is int for i in listed) else []
    if not ids or ids != sorted(set(ids)):
        contract.problems.append(f"target_layer_ids: expected layers' outputs in order, found {listed!r}")
    if sizes is None or contract.problems:
        return contract
    token, last = config.get("mask_token_id"), sizes["num_target_layers"] - 1
    outside = type(token) is not int or not 0 <= token < sizes["vocab_size"]
    contract.report(outside, f"mask_token_id: {token!r}, expected 0 to {sizes['vocab_size'] - 1}")
    contract.report(ids[-1] > last or ids[0] < -1, f"target_layer_ids: {ids}, of a target with layers 0 to {last}")
    for key in ("mask_token_id", "target_layer_ids") if is_dflash else ():
        differs = f"dflash_config.{key}: {nested.get(key)!r}, but {key} {config.get(key)!r}: engines read either"
        contract.report(nested.get(key) != config.get(key), differs)
    if architectures == [DFLASH2]:
        config = {**config, **{key: nested.get(key) for key in DFLASH2_KEYS}}
        dflash2_keys(config, contract, hidden=sizes["hidden_size"])
    if contract.problems:
        return contract
    as_trained(config, contract)
    contract.shapes = tensors_of(config, sizes, contract, num_features=len(ids))
    return contract


def of_speculators(config: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
    """The plain config that vLLM makes of a speculators config; adds that one's problems to the contract."""
    kind, ids = str(config.get("speculators_model_type")), config.get("aux_hidden_state_layer_ids")
    known = f"speculators_model_type: {kind}, expected {' or '.join(IN_SPECULATORS)}"
    contract.report(kind not in IN_SPECULATORS, known)
    serves_itself(config, contract)
    why = "without it vLLM makes the slots of every layer see only earlier slots"
    contract.want(config, "sliding_window_non_causal", True, why)
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    contract.report(not is_list, f"aux_hidden_state_layer_ids: expected inputs of layers, found {ids!r}")
    layers = [i - 1 for i in ids] if isinstance(ids, list) and is_list else []
    trained = trained_config(config).get("feature_layers")
    counted = "the head was trained on those; inputs of layers are counted here"
    contract.report(trained not in (None, ids), f"aux_hidden_state_layer_ids: {ids}, expected {trained}: {counted}")
    size, has_anchor = config.get("block_size"), config.get("sample_from_anchor")
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    wanted = size - (0 if has_anchor else 1) if type(size) is int else None
    told = methods[0].get("speculative_tokens")
    contract.report(told != wanted, f"speculative_tokens: {told}, but a block drafts {wanted}")
    made = {
        "num_target_layers": max(layers, default=0) + 1,  # not said there
        "target_layer_ids": layers,
        "is_causal": False,
        "architectures": [PLAIN.get(kind, DSPARK)],
        "dflash_config": {
            **{"causal": False, "mask_token_id": config.get("mask_token_id"), "target_layer_ids": layers},
            **{key: config[key] for key in DFLASH2_KEYS if key in config},
        },
    }
    layer = config.get("transformer_layer_config") or {}
    return {**layer, **config, **made, "model_type": layer.get("model_type")}


def flags(config: Mapping[str, Any], contract: Contract, *, is_dflash: bool) -> None:
    """Report flags for which engines have other defaults."""
    window, slots = vllm_window(config), config.get("block_size")
    contract.report("layer_types" not in config, "layer_types: missing; engines' defaults differ")
    is_narrow = type(window) is int and type(slots) is int and window < slots
    contract.report(is_narrow, f"sliding_window: {window}, expected at least the {slots} slots of a block")
    sliding = "llama.cpp reads the window with it only"
    contract.report(window and config.get("use_sliding_window") is not True, f"use_sliding_window: not true: {sliding}")
    why = "the slots of a block see each other, and engines differ in the default"
    contract.want(config, "is_causal", False, why)
    if is_dflash:
        contract.want(config.get("dflash_config") or {}, "causal", False, why)
        contract.want(config, "sample_from_anchor", False, "engines' DFlash drafts from the slot behind the anchor")
        return
    how = config.get("sample_from_anchor")
    contract.report(
        not isinstance(how, bool), f"sample_from_anchor: {how!r}: engines' defaults differ, so it must be said"
    )
    contract.want(config, "markov_head_type", "vanilla", "the only one that engines serve")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        contract.report(not isinstance(config.get(key), bool), f"{key}: missing; engines' defaults differ")


def dflash2_keys(config: Mapping[str, Any], contract: Contract, *, hidden: int) -> None:
    """Report wrong sizes of DFlash2's parts."""
    for key in DFLASH2_KEYS:
        count = config[key]
        wrong = type(count) is not int or count < 1
        contract.report(
            wrong, f"dflash_config.{key}: expected a count, found {count!r}: engines load no DFlash2 without"
        )
        if key == "conv_kernel_size":
            contract.report(not wrong and count != NUM_TAPS, f"dflash_config.{key}: {count}, expected {NUM_TAPS}")
        if key == "conv_group_size" and not wrong:
            contract.report(hidden % count != 0, f"dflash_config.{key}: {count} does not divide hidden_size {hidden}")


def as_trained(config: Mapping[str, Any], contract: Contract) -> None:
    """Report differences from the head's own config, if our export wrote the folder."""
    trained = trained_config(config)
    missing = [key for key in TRAINED if key not in trained]
    if not trained or missing:
        contract.problems += [f"{PROVENANCE}.head.{key}: missing" for key in missing if trained]
        return
    slots = trained["num_depths"] + (0 if trained["sample_from_anchor"] else 1)
    wanted = {
        "block_size": slots,
        "sample_from_anchor": trained["sample_from_anchor"],
        "target_layer_ids": [i - 1 for i in trained["feature_layers"]],
        "mask_token_id": trained["mask_token_id"],
    }
    for key, value in wanted.items():
        contract.want(config, key, value, "the head was trained with that")


def tensors_of(
    config: Mapping[str, Any], sizes: Mapping[str, int], contract: Contract, *, num_features: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the required tensors; sets the contract's optional and forbidden ones."""
    hidden, vocab, head_dim = sizes["hidden_size"], sizes["vocab_size"], sizes["head_dim"]
    drafted, rank = config.get("draft_vocab_size") or vocab, config.get("markov_rank") or 0
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(sizes["num_hidden_layers"]):
        shapes |= llama_layer_shapes(f"layers.{i}", sizes, in_size=hidden, norms=NORMS)
        shapes |= {f"layers.{i}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    if config.get("architectures") == [DSPARK]:
        contract.report(not rank, "markov_rank: expected a count; engines load this class with a Markov head only")
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (drafted, rank)}
    if config.get("architectures") == [DFLASH2]:
        taps, rank = config["conv_kernel_size"], config["selector_rank"]
        for name in ("predecessor", "successor"):
            shapes[f"candidate_selector.{name}_codebook"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for i, part in itertools.product(range(sizes["num_hidden_layers"]), ("attention", "mlp")):
            conv = f"layers.{i}.{part}_conv"
            shapes[f"{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * taps * hidden // config["conv_group_size"], hidden)
    if config.get("enable_confidence_head"):
        wide = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
    contract.optional = {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (drafted, hidden)}
    if drafted < vocab:
        shapes |= {"lm_head.weight": (drafted, hidden), "d2t": (drafted,), "t2d": (vocab,)}
    contract.forbidden = {"mask_hidden": "vLLM takes it for P-EAGLE's", "d2t": "the draft vocabulary is the whole one"}
    return shapes


def gguf_contract(file: GgufFile) -> Contract:
    """DFlash, with a Markov head DSpark, with a selector DFlash2: fc and its norm, layers with norms of queries and
    keys, output tensors."""
    rank = file.shapes.get("markov_w1.weight", (0, 0))[-1]
    contract = Contract(f"{'dspark' if rank else 'dflash'} (GGUF)")
    sizes = gguf_sizes(file, contract)
    check_target_layers(file, contract)
    layer_keys(file, contract)
    flag(file, contract, "attention.causal", allowed=(False,))
    if rank:
        flag(file, contract, "sample_from_anchor", allowed=(True, False))
    size = file.own("block_size")
    contract.report(type(size) is not int or size < 1, f"dflash.block_size: expected a count, found {size!r}")
    token, num_tokens = file.keys.get(MASK_TOKEN), file.lengths.get("tokenizer.ggml.tokens", 0)
    outside = type(token) is not int or not 0 <= token < num_tokens
    contract.report(outside, f"{MASK_TOKEN}: {token!r}, expected 0 to {num_tokens - 1}")
    if sizes is None or contract.problems:
        return contract
    hidden, vocab, head_dim = sizes["embedding_length"], sizes["vocab_size"], head_dim_of(file, sizes)
    contract.shapes = {"fc.weight": (hidden, len(file.own("target_layers")) * hidden)}
    contract.shapes["enc.output_norm.weight"] = (hidden,)
    for i in range(sizes["block_count"]):
        contract.shapes |= layer_shapes(file, sizes, contract, place=f"blk.{i}", read=hidden)
        contract.shapes |= {f"blk.{i}.{name}.weight": (head_dim,) for name in ("attn_q_norm", "attn_k_norm")}
    num_drafted = drafted_vocabulary(file, sizes, contract)
    if rank:
        contract.shapes |= {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (num_drafted, rank)}
    if rank and file.own("has_confidence_head"):
        contract.shapes |= {"conf_proj.weight": (1, hidden + rank), "conf_proj.bias": (1,)}
    if any(file.own(key) is not None for key in DFLASH2_KEYS) or "selector_hidden.weight" in file.shapes:
        gguf_dflash2(file, sizes, contract)
    return contract


def gguf_dflash2(file: GgufFile, sizes: Mapping[str, int], contract: Contract) -> None:
    """Add the convolutions and the selector of DFlash2."""
    counts = {key: file.own(key) for key in DFLASH2_KEYS}
    wrong = [key for key, value in counts.items() if type(value) is not int]
    if wrong:
        contract.problems += [f"dflash.{key}: expected a count, found {counts[key]!r}" for key in wrong]
        return
    hidden, vocab, rank, taps = sizes["embedding_length"], sizes["vocab_size"], counts["selector_rank"], NUM_TAPS
    codebooks = dict.fromkeys(("selector_predecessor.weight", "selector_successor.weight"), (vocab, rank))
    contract.shapes |= {**codebooks, "selector_hidden.weight": (rank, hidden)}
    for place in (f"blk.{i}.{kind}_conv" for i in range(sizes["block_count"]) for kind in ("attn", "ffn")):
        contract.shapes[f"{place}_base"] = (2, taps, hidden)
        contract.shapes[f"{place}_proj.weight"] = (2 * taps * hidden // counts["conv_group_size"], hidden)


class BlockServing(Serving):
    engines = ("vllm", "sglang", "speculators", "llama.cpp")
    keeps_vocabulary = True
    path_words = ("dflash", "dspark")
    key_types = {"dflash_config": dict, "markov_rank": int}
    computes = (
        *("num_layers", "architecture", "sliding_window", "output", "sample_from_anchor", "markov_rank", "confidence"),
        *("has_head_norms", "mask_token_id", "selector_top_k"),
    )
    sglang_algorithms = {"dflash": "DFLASH", "dspark": "DSPARK"}
    spec_types = {"dflash": "draft-dflash", "dspark": "draft-dspark"}
    reads_features = True
    in_sglang = "SGLang lets a slot see earlier slots only"
    gguf = {
        "dflash": GgufLayout(
            gguf_contract,
            {
                **{key: key for key in ("block_size", "sample_from_anchor", *DFLASH2_KEYS)},
                "target_layers": "target_layer_ids",
            },
            nested="dflash_config",
        )
    }

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """Write the folder. Raises BadInput if no engine, or not the one of `to`, can compute what the head does."""
        bare_embedding(head)
        own, is_dflash = head.own, self.method(head) == "dflash"
        has_both = bool(own["selector_rank"]) and own["conv_group_size"] is not None
        problems = {
            "conv_group_size and selector_rank: engines know DFlash2 with both": (
                head.config["architectures"] == [DFLASH2] and not has_both
            ),
            "draft_vocab_size: engines' selector chooses from the whole vocabulary": (
                bool(own["selector_rank"]) and own["draft_vocab_size"] is not None
            ),
            "sample_from_anchor without a Markov head: engines draft from the anchor with one only": (
                is_dflash and own["sample_from_anchor"]
            ),
            "has_head_norms false: engines normalise queries and keys of heads": not own["has_head_norms"],
            "output own: SGLang's DFlash drafts with the target's output layer": (
                to == "sglang" and is_dflash and own["output"] == "own"
            ),
            **dict.fromkeys(window_problems(head.config, in_sglang=self.in_sglang, to=to), True),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise BadInput(f"head {head.path}: {problem}: nothing written")
        config = speculators_config(head) if to == "speculators" else head.config
        write_config(folder, {**config, **head.provenance})
        write_tensors(folder, head.tensors)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        words = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
        return "dflash" in words or "dspark" in words or "dflash_config" in config

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        contract = contract_of(config)
        contract.problems += self.refusals(config, stored.shapes) if to == "llama.cpp" else []
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        return import_block(folder)

    def method(self, head: HeadFolder) -> str:
        return "dspark" if head.config["architectures"] == [DSPARK] else "dflash"

    def sglang_flags(
        self, method: str, num_draft_tokens: int, *, folder: str, top_k: int = 1, num_nodes: int = 0
    ) -> str | None:
        """The only other flag is the number of verified tokens."""
        how = f"--speculative-algorithm {self.sglang_algorithms[method]} --speculative-draft-model-path {folder}"
        return f"{how} --speculative-num-draft-tokens {num_draft_tokens + 1}"

    def method_of(self, file: GgufFile) -> str | None:
        if file.architecture not in self.gguf:
            return None
        return "dspark" if "markov_w1.weight" in file.shapes else "dflash"

    def refusals(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """What llama.cpp's converter does not support in a DFlash or DSpark folder."""
        layer, names = config.get("transformer_layer_config"), set(names)
        whole = {**config, **(layer or {})}
        is_cut = config.get("draft_vocab_size") not in (None, whole.get("vocab_size"))
        problems = rotation_refusals(whole, ROTATIONS)
        if config.get("architectures") not in ([DFLASH], [DFLASH2]):
            if "lm_head.weight" in names and not is_cut:
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
            problems.append(
                f"selector_top_k: {top_k} of DFlash2 takes a hidden_size of {least} at least, this is {hidden}"
            )
        return problems
