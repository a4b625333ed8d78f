"""What each layout must hold, derived from its config: tensors with shapes, forbidden tensors, config keys.

Sources: the loaders of vLLM 0.32 and SGLang 0.5.23. Neither notices a missing tensor: it uses uninitialised memory, the
text stays right, and drafts are just not accepted. So completeness has to be checked here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .folder import PROVENANCE, SCALE
from .llamacpp import eagle3_refusals

Shapes = dict[str, tuple[int, ...]]
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # names that vLLM knows the mask token by
BARE_EMBEDDING = "SGLang puts the target's embedding in its place, vLLM does not"
FEATURE_IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
PORTABLE_OPTIONS = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}


@dataclass
class Contract:
    """What a folder must hold. shapes: of required tensors. optional: of those that may be there. forbidden: tensor
    names with the reason. equal: pairs of tensors with the same values. zero: tensors of zeros. problems: those found
    in the config."""

    layout: str
    shapes: Shapes = field(default_factory=dict)
    optional: Shapes = field(default_factory=dict)
    forbidden: dict[str, str] = field(default_factory=dict)
    equal: list[tuple[str, str]] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def report(self, is_wrong: object, problem: str) -> None:
        """Add a problem if is_wrong."""
        if is_wrong:
            self.problems.append(problem)

    def want(self, config: Mapping[str, Any], key: str, value: Any, why: str) -> None:
        """Add a problem if a config key has another value."""
        self.report(config.get(key) != value, f"{key}: expected {value!r}, found {config.get(key)!r}: {why}")

    def compare(self, found: Shapes, *, unknown: str, outcome: str = "") -> list[str]:
        """The problems of a folder with tensors of these shapes: missing ones, other shapes, tensors too many.

        Args: unknown: why a tensor must not be there that `forbidden` does not name. outcome: of a missing one.
        """
        problems = [
            f"tensor {name}: missing, expected {list(shape)}{outcome}"
            for name, shape in self.shapes.items()
            if name not in found
        ]
        for name, shape in found.items():
            wanted = self.shapes.get(name, self.optional.get(name))
            if wanted is None:
                problems.append(f"tensor {name}: must not be there: {self.forbidden.get(name, unknown)}")
            elif wanted != shape:
                turned = ": transposed" if shape == wanted[::-1] else ""
                problems.append(f"tensor {name}: expected {list(wanted)}, found {list(shape)}{turned}")
        return problems


def sizes_of(config: Mapping[str, Any], contract: Contract, keys: Iterable[str] = SIZES) -> dict[str, int] | None:
    """The counts that determine shapes; None, with the problem reported, if one is missing."""
    found: dict[str, Any] = {key: config.get(key) for key in keys}
    wrong = [key for key, value in found.items() if type(value) is not int or value < 1]
    contract.problems += [f"{key}: expected a count, found {found[key]!r}" for key in wrong]
    return None if wrong else found


def trained_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head's own config, if we wrote the folder; else empty."""
    return config.get(PROVENANCE, config.get("headstart", {})).get("head", {})


def decoder_layer(place: str, sizes: Mapping[str, int], *, in_size: int, norms: Iterable[str]) -> Shapes:
    """Tensor shapes of a Llama layer without biases, whose attention reads in_size channels."""
    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    wide, narrow = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    shapes: Shapes = {
        "self_attn.q_proj": (wide, in_size),
        "self_attn.k_proj": (narrow, in_size),
        "self_attn.v_proj": (narrow, in_size),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(norms, (hidden,)),
    }
    return {f"{place}.{name}.weight": shape for name, shape in shapes.items()}


def llama_keys(config: Mapping[str, Any], contract: Contract, *, model_type: str = "llama") -> None:
    """Check the keys that both engines read of a Llama-like draft."""
    contract.want(config, "model_type", model_type, f"both engines have the draft as a {model_type.capitalize()}")
    for key, value in PORTABLE_OPTIONS.items():
        contract.want(config, key, value, "engines would compute another layer")
    contract.report(config.get("bias"), "bias: vLLM takes it for a bias of the attention")
    default = "missing; engines would use a default that is not the target's"
    for key in ("rms_norm_eps", "max_position_embeddings"):
        contract.report(not config.get(key), f"{key}: {default}")
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    thetas = [value for value in (config.get("rope_theta"), rope.get("rope_theta")) if value is not None]
    contract.report(not thetas, f"rope_theta: {default}")
    if len(set(thetas)) > 1:
        contract.problems.append(f"rope_theta: {thetas[0]}, but rope_parameters.rope_theta {thetas[1]}")
    kinds = [part.get("rope_type", part.get("type", "default")) for part in (rope, scaling)]
    differs = rope and kinds[0] != kinds[1]
    contract.report(differs, f"rope_scaling: of type {kinds[1]}, but rope_parameters of type {kinds[0]}")
    why = "a plain layer has no such rotation; vLLM refuses it or rotates otherwise"
    for key in ("mrope_section", "partial_rotary_factor"):
        contract.report(key in rope or key in scaling or key in config, f"{key}: {why}")


def eagle(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    contract = Contract("eagle")
    architectures = config.get("architectures") or []
    contract.report(
        architectures[:1] != ["LlamaForCausalLMEagle"] or "LlamaForCausalLM" not in architectures,
        f"architectures: found {architectures}: SGLang reads LlamaForCausalLMEagle from the first place, and vLLM "
        "loads it only with LlamaForCausalLM behind it",
    )
    llama_keys(config, contract)
    sizes = sizes_of(config, contract, (*SIZES, "num_hidden_layers"))
    if sizes is None:
        return contract
    hidden = sizes["hidden_size"]
    contract.shapes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    for i in range(sizes["num_hidden_layers"]):
        norms = ["post_attention_layernorm"] if i == 0 else ["input_layernorm", "post_attention_layernorm"]
        contract.shapes |= decoder_layer(f"layers.{i}", sizes, in_size=hidden, norms=norms)
    contract.zero = [] if trained_config(config).get("bias") else ["fc.bias"]
    contract.forbidden = {
        "layers.0.input_layernorm.weight": "the first layer does not normalise what it reads",
        "norm.weight": "there is no norm behind the last layer",
        "lm_head.weight": "the output layer is the target's",
        "embed_tokens.weight": BARE_EMBEDDING,
    }
    if config.get(SCALE):
        contract.shapes["embed_tokens.weight"] = (sizes["vocab_size"], hidden)
    return contract


def eagle3(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    contract = Contract("eagle3")
    contract.want(config, "architectures", ["LlamaForCausalLMEagle3"], "the only name that every engine knows")
    llama_keys(config, contract)
    feature_ids(config, contract)
    nested = config.get("eagle_config") or {}
    ids = config.get(FEATURE_IDS)
    if ids is not None or FEATURE_IDS in nested:
        wanted = [i - 1 for i in ids] if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
        found = nested.get(FEATURE_IDS)
        counted = f"expected {wanted}: SGLang counts outputs of layers, one less than vLLM's {ids}"
        contract.report(found != wanted, f"eagle_config.{FEATURE_IDS}: {found}, {counted}")
        contract.want(nested, "use_aux_hidden_state", True, "SGLang reads no features without it")
    if "norm_before_fc" in nested and bool(nested["norm_before_fc"]) != bool(config.get("norm_before_fc")):
        contract.problems.append("eagle_config.norm_before_fc: differs from norm_before_fc")
    contract.report("draft_vocab_size" not in config, "draft_vocab_size: missing; SGLang needs the key")
    contract.want(config, "norm_before_residual", False, "SGLang has no such layer")
    return eagle3_tensors(config, config, contract, names)


def llamacpp(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    """EAGLE-3 as llama.cpp's converter reads it."""
    contract = Contract("eagle3")
    llama_keys(config, contract)
    feature_ids(config, contract)
    without = "draft_vocab_size: missing; the converter takes the folder for a whole Llama without it"
    contract.report("draft_vocab_size" not in config, without)
    contract.problems += eagle3_refusals(config, names)
    return eagle3_tensors(config, config, contract, names)


def speculators(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    contract = Contract("speculators")
    layer = config.get("transformer_layer_config") or {}
    only = "the one of our families that vLLM serves from this format"
    contract.want(config, "speculators_model_type", "eagle3", only)
    alike = "must be there and in transformer_layer_config alike; vLLM starts from that"
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        contract.report(key not in config or layer.get(key) != config[key], f"{key}: {alike}")
    serves_itself(config, contract)
    llama_keys(layer, contract)
    feature_ids({**config, "num_aux_hidden_states": layer.get("num_aux_hidden_states")}, contract)
    contract.report("draft_vocab_size" not in config, "draft_vocab_size: missing")
    contract.want(config, "norm_before_residual", False, "SGLang has no such layer")
    return eagle3_tensors(config, layer, contract, names)


def serves_itself(config: Mapping[str, Any], contract: Contract) -> None:
    """Check the keys by which `vllm serve FOLDER` finds the target and the draft's length."""
    how, opening = config.get("speculators_config") or {}, "speculators_config."
    name = (how.get("verifier") or {}).get("name_or_path")
    contract.report(not name, f"{opening}verifier.name_or_path: missing; vLLM finds the target by it")
    methods = how.get("proposal_methods")
    contract.report(not methods, f"{opening}proposal_methods: missing; vLLM reads the draft's length there")
    kind = config.get("model_type")
    contract.report(
        kind not in (None, "speculators"), f"model_type: {kind}: vLLM asks transformers for such a model; leave it out"
    )


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


def eagle3_tensors(
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
        **decoder_layer(place, sizes, in_size=2 * hidden, norms=norms),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(1, num_layers):
        contract.shapes |= decoder_layer(f"layers.{i}", sizes, in_size=hidden, norms=norms)
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


def medusa(config: Mapping[str, Any], names: Iterable[str]) -> Contract:
    names = list(names)
    is_blocks = any(re.match(r"blocks\.|lm_heads\.|lm_head\.", name) for name in names)
    contract = Contract("medusa" if is_blocks else "medusa (FasterDecoding)")
    counts = {
        "num_heads": config.get("num_heads", config.get("medusa_num_heads")),
        "num_hidden_layers": config.get("num_hidden_layers", config.get("medusa_num_layers")),
    }
    sizes = sizes_of({**config, **counts}, contract, ("hidden_size", "vocab_size", *counts))
    contract.want(config, "model_type", "medusa", "vLLM reads the config as another model's")
    if sizes is None:
        return contract
    for ours, theirs in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
        if theirs in config and config[theirs] != sizes[ours]:
            contract.problems.append(f"{theirs}: {config[theirs]}, but {ours} {sizes[ours]}")
    hidden, vocab, num_blocks = sizes["hidden_size"], sizes["vocab_size"], sizes["num_hidden_layers"]
    is_biased = any(name.endswith(".bias") for name in names)
    is_dropped = is_biased and not config.get("medusa_fc_bias")
    contract.report(is_dropped, "medusa_fc_bias: must be true; vLLM drops the blocks' biases without it")
    cut = config.get("truncated_vocab_size")
    contract.report(cut not in (None, vocab), f"truncated_vocab_size: {cut}: heads draft all {vocab} tokens")
    for k in range(sizes["num_heads"]):
        for j in range(num_blocks):
            place = f"blocks.{k}.layers.{j}" if is_blocks else f"{k}.{j}.linear"
            contract.shapes[f"{place}.weight"] = (hidden, hidden)
            if is_biased or config.get("medusa_fc_bias"):
                contract.shapes[f"{place}.bias"] = (hidden,)
        if not (is_blocks and config.get("original_lm_head")):
            place = f"lm_heads.{k}" if is_blocks else f"{k}.{num_blocks}"
            contract.shapes[f"{place}.weight"] = (vocab, hidden)
    if is_blocks and config.get("original_lm_head"):
        contract.shapes["lm_head.weight"] = (vocab, hidden)
    return contract
