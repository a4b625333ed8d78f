"""What a folder must hold, derived from its config (tensors with shapes, forbidden tensors, config keys), in parts that
several layouts share.

Names and shapes are those of the family's own head, built without weights; layouts that differ rename them. Sources:
the loaders of vLLM 0.32 and SGLang 0.5.23. Neither notices a missing tensor: it uses uninitialised memory, the text
stays right, and drafts are just not accepted. So completeness has to be checked here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...base.errors import first_line
from ...heads.families import head_class
from ...heads.stored.record import PROVENANCE
from ...targets.target import Target

Shapes = dict[str, tuple[int, ...]]
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # the tables of a target, in most folders
FULL, SLIDING = "full_attention", "sliding_attention"
# keys of config.json that the shapes of a Llama-like head follow from
SIZES = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size".split()
PORTABLE_OPTIONS = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}


@dataclass
class Contract:
    """What a folder must hold. shapes: of required tensors. optional: of those that may be there. forbidden: tensor
    names with the reason. equal: pairs of tensors with the same values. zero: tensors of zeros. dtypes: what
    tensors have instead of the head's own, by safetensors' names. problems: those found in the config. is_ours: which
    tensors of a checkpoint that holds more are the head's; None: all."""

    layout: str
    shapes: Shapes = field(default_factory=dict)
    optional: Shapes = field(default_factory=dict)
    forbidden: dict[str, str] = field(default_factory=dict)
    equal: list[tuple[str, str]] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    dtypes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_ours: Callable[[str], bool] | None = None

    def report(self, is_wrong: object, problem: str) -> None:
        """Add a problem if is_wrong."""
        if is_wrong:
            self.problems.append(problem)

    def want(self, config: Mapping[str, Any], key: str, value: Any, why: str) -> None:
        """Add a problem if a config key has another value."""
        self.report(config.get(key) != value, f"{key}: expected {value!r}, found {config.get(key)!r}: {why}")

    def require(self, family: str, sizes: Mapping[str, int], **keys: Any) -> None:
        """Require the tensors of a head of a family, or report why there is none.

        Args: sizes: of a Llama config. keys: of the head's config.
        """
        try:
            self.shapes = head_shapes(family, sizes, keys)
        except Exception as error:  # a config that the head refuses, or that transformers does in ways of its own
            self.problems.append(f"no {family} head has these sizes: {first_line(error)}")

    def compare(self, shapes: Shapes) -> list[str]:
        """The problems of a folder with tensors of these shapes: missing ones, other shapes, tensors too many."""
        problems = [
            f"tensor {name}: missing, expected {list(shape)}; engines would use uninitialised memory"
            for name, shape in self.shapes.items()
            if name not in shapes
        ]
        for name, shape in shapes.items():
            wanted = self.shapes.get(name, self.optional.get(name))
            if wanted is None:
                problems.append(
                    f"tensor {name}: must not be there: {self.forbidden.get(name, 'the layout has no such tensor')}"
                )
            elif wanted != shape:
                turned = ": transposed" if shape == wanted[::-1] else ""
                problems.append(f"tensor {name}: expected {list(wanted)}, found {list(shape)}{turned}")
        return problems


def head_shapes(family: str, sizes: Mapping[str, int], keys: Mapping[str, Any]) -> Shapes:
    """The shapes of a head's tensors by served name, the maps of a cut draft vocabulary among them. Arguments and
    Raises: as of `Contract.require`."""
    told: dict[str, Any] = {**sizes, "num_hidden_layers": 1}  # whatever layers a head reads, none is looked at
    with torch.device("meta"):
        target = Target(LlamaForCausalLM(LlamaConfig(**told)), name="", fingerprint="")
        kind, size = head_class(family), keys.get("draft_vocab_size")
        head = kind(kind.config_class(type=family, **keys), target, None if size is None else torch.arange(size))
    shapes = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    return shapes if size is None else {**shapes, "d2t": (size,), "t2d": (target.vocab_size,)}


def sizes_of(config: Mapping[str, Any], contract: Contract, *keys: str) -> dict[str, int] | None:
    """The counts under these keys; None, and the problem reported, if one is missing."""
    values = {key: config.get(key) for key in keys}
    counts = {key: value for key, value in values.items() if type(value) is int and value >= 1}
    contract.problems += [f"{key}: expected a count, found {values[key]!r}" for key in keys if key not in counts]
    return counts if len(counts) == len(keys) else None


def trained_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head's own config, if we wrote the folder; else empty."""
    return config.get(PROVENANCE, config.get("headstart", {})).get("head", {})


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


def vllm_window(config: Mapping[str, Any]) -> int | None:
    """The window that vLLM reads, in tokens; None: it sees all positions."""
    layer = config.get("transformer_layer_config") or config
    return layer.get("sliding_window") if SLIDING in (layer.get("layer_types") or ()) else None


def window_problems(config: Mapping[str, Any], *, in_sglang: str, to: str) -> list[str]:
    """Problems of a config, for one engine or for those that read this layout. in_sglang: what SGLang does instead.

    vLLM 0.32 reads `layer_types` and `sliding_window`, and lets all slots of a block see each other where `is_causal`
    is false. Source: the code of both (llama.py, llama_eagle3.py, qwen3_dflash.py, flash_attn.py; dflash.py); vLLM was
    run with EAGLE-3 and DFlash (tests/vllm), SGLang was not.
    """
    layer, problems = config.get("transformer_layer_config") or config, list[str]()
    kinds, window, read = layer.get("layer_types"), layer.get("sliding_window"), vllm_window(config)
    num_layers = layer.get("num_hidden_layers")
    if kinds not in (None, [FULL] * (num_layers or 0), [SLIDING] * (num_layers or 0)):
        problems.append(f"layer_types: {kinds}: expected one kind, {FULL} or {SLIDING}, for all {num_layers} layers")
    if SLIDING in (kinds or ()) and (type(window) is not int or window < 1):
        problems.append(f"sliding_window: {window!r}: expected a number of tokens beside layers of {SLIDING}")
    trained = trained_config(config)
    if trained and trained.get("sliding_window") != read:
        problems.append(f"sliding_window: {read}, but the head was trained with {trained.get('sliding_window')}")
    if to == "sglang" and read is not None:
        problems.append(f"sliding_window {read}: {in_sglang}")
    return problems
