"""Reading heads that others published, and our own exports: the folder, what a family makes of it, and how its layers
differ from the target's."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...base.errors import BadInput, first_line
from ...base.files import lack_of
from ...base.typed import TypedKeys
from ...heads.nn.layers import PARTIAL, llama_config
from ...heads.stored.record import read_config
from ...targets.target import Target
from ...targets.weights.tensor_files import TensorFiles, read_tensor_files
from .fp8 import dequantised

Tensors = dict[str, Tensor]
HUB_ID = r"\w[\w.-]*/[\w.-]+"
MASK = "mask_embedding.pt"  # a pickle, so not read: with it a head is refused
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", MASK)
COUNTS = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
NORM_EPS = 1e-6  # that engines take where none is said: of transformers' Llama and Qwen3
ROTARY_KIND: Any = float | bool | list[float]  # of every rotary parameter but its type's name


@dataclass(frozen=True)
class ForeignFolder:
    """A published or exported head, and the target to read it for."""

    path: Path
    config: TypedKeys  # config.json
    stored: TensorFiles
    target: Target
    own: Mapping[str, Any] | None  # all keys of the head's config, if our export recorded them
    fresh: Callable[[Mapping[str, Any]], Tensors]  # the tensors of a new head of the family with these config keys

    def tensors(self) -> Tensors:
        return dequantised({name: self.stored.read(name) for name in self.stored.files})

    def bare_tensors(self, *without: str) -> Tensors:
        """By names without the prefix of some layouts; not those that ours compute, nor the tables that are named,
        copies of the target's, which `check_tables` compares."""
        tensors = {bare(name): value for name, value in self.tensors().items()}
        return {n: value for n, value in tensors.items() if n not in without and not n.endswith("rotary_emb.inv_freq")}


@dataclass(frozen=True)
class Imported:
    """A head of any layout, converted to ours."""

    keys: Mapping[str, Any]  # of its config, without `draft_vocab_size`; those that our export recorded replace them
    tensors: Tensors  # by our names
    draft_token_ids: Tensor | None = None  # [Vd] if its draft vocabulary is cut


def draft_ids(tensors: Tensors, target: Target) -> Tensor | None:
    """[Vd] the target ids of a cut draft vocabulary, None if it is whole; removes d2t and t2d from the tensors.

    Raises: BadInput if the ids do not ascend or exceed the target's vocabulary.
    """
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if offsets is None or (len(offsets) == target.vocab_size and not offsets.any()):
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise BadInput(f"tensor d2t: expected offsets to ascending target tokens below {target.vocab_size}")
    return ids


def bare(name: str) -> str:
    """A tensor's name without the prefix that some layouts have."""
    return name.removeprefix("model.")


def local_folder(folder: str | Path) -> Path:
    """A local folder unchanged, or a hub id's snapshot, downloaded if needed. Raises BadInput if there is neither."""
    path = Path(folder).expanduser()
    if path.exists() or not re.fullmatch(HUB_ID, str(folder)):
        if not (path / "config.json").is_file():
            head = path / "final"
            hint = f"; the head of that run is {head}" if (head / "config.json").is_file() else ""
            raise BadInput(f"head {folder}: {lack_of(path, 'config.json')}{hint}")
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=list(WANTED_FILES)))
    except Exception as error:  # the hub's own, of the network, of a missing repository
        raise BadInput(f"head {folder}: no such folder, and from the hub: {first_line(error)}") from error


def read_all(folder: Path) -> tuple[dict[str, Any], TensorFiles]:
    """config.json and the tensor files of a folder. Raises BadInput if one is missing or damaged."""
    config, stored = read_config(folder), read_tensor_files(folder)
    broken = [problem for problem in stored.problems if "not a whole" in problem or "names " in problem]
    if broken:
        raise BadInput(f"head {folder}: {broken[0]}")
    if not stored.files:
        raise BadInput(f"head {folder}: no safetensors file in it; pickles are not read: convert them to safetensors")
    return config, stored


def architecture_of(config: TypedKeys, target: Target) -> dict[str, Any]:
    """The values of a head's config that differ from our defaults for this target, by `layers.ARCHITECTURE` keys.

    Raises: BadInput if its layers are not Llama's, its hidden size is not the target's, or a value is of another type.
    """
    ours = llama_config(target.config).to_dict()
    own: dict[str, Any] = {key: value for key in COUNTS if (value := config.count(key)) is not None}
    own["rms_norm_eps"] = config.read("rms_norm_eps", float) or NORM_EPS
    heads = own.get("num_attention_heads", ours["num_attention_heads"])
    own.setdefault("num_key_value_heads", heads if "num_attention_heads" in own else ours["num_key_value_heads"])
    own["head_dim"] = config.count("head_dim") or ours["hidden_size"] // heads
    own["rope_parameters"] = rotary_of(config)
    names = {key: (config.read(key, str), kind) for key, kind in (("model_type", "llama"), ("hidden_act", "silu"))}
    problems = [f"{key} {name}: expected {kind}" for key, (name, kind) in names.items() if (name or kind) != kind]
    problems += [f"{key}: expected none" for key in ("attention_bias", "mlp_bias") if config.read(key, bool)]
    if (share := config.read(PARTIAL, float)) not in (None, 1.0):
        problems.append(f"{PARTIAL} {share}: expected none, as its layers rotate all channels")
    if window := config.read("sliding_window", int):
        problems.append(f"sliding_window {window}: expected none")
    size, sizes = target.hidden_size, {key: config.read(key, int) for key in ("hidden_size", "target_hidden_size")}
    problems += [f"{key} {other}: {target.name} has {size}" for key, other in sizes.items() if (other or size) != size]
    if problems:
        raise BadInput(problems[0])
    return {key: value for key, value in own.items() if not same(value, ours[key])}


def window_of(config: TypedKeys) -> int | None:
    """The sliding window in tokens of a head's layers; None: they see all positions.

    As in vLLM, `layer_types` says which layers have one. Raises: BadInput if some have one and others do not, or the
    number of tokens is missing, or there is a number and nothing says whether it counts.
    """
    kinds, window = set(config.read("layer_types", list[str]) or ()), config.read("sliding_window", int)
    if kinds == {"sliding_attention"}:
        return config.need("sliding_window", int)
    if kinds - {"full_attention"}:
        raise BadInput(f"layer_types: {sorted(kinds)}: expected one kind for all layers")
    if window and not kinds and config.read("use_sliding_window", bool) is not False:
        raise BadInput(f"sliding_window {window}: expected layer_types that say which layers have it")
    return None


def rotary_of(config: TypedKeys) -> dict[str, Any]:
    """The rotary parameters of an old or new config, in transformers' current form."""
    scaling = config.inner("rope_parameters" if config.values.get("rope_parameters") else "rope_scaling")
    kind = scaling.read("rope_type", str) or scaling.read("type", str) or "default"
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise BadInput(f"{scaling.where}rope_type {kind!r}: transformers has no such rotation")
    others = scaling.values.keys() - {"type", "rope_type", "rope_theta"}
    rest = {key: scaling.read(key, ROTARY_KIND) for key in scaling.values if key in others}
    theta = scaling.read("rope_theta", float) or config.read("rope_theta", float) or 10000.0
    return {"rope_type": kind, "rope_theta": float(theta), **rest}


def same(value: Any, ours: Any) -> bool:
    """Whether two values of a key are equal, whatever the order of keys and the number type."""
    if isinstance(value, dict) and isinstance(ours, dict):
        return value.keys() == ours.keys() and all(same(value[key], ours[key]) for key in value)
    return value == ours


def equal_tensor(value: Tensor, reference: Tensor) -> bool:
    """Whether two tables are equal in the dtype of either."""
    return any(torch.equal(value.to(dtype), reference.to(dtype)) for dtype in (value.dtype, reference.dtype))


def same_tensor(value: Tensor, reference: Tensor) -> bool:
    """Whether two tables are equal up to the rounding of another dtype, which a scaled one passed more than once."""
    return value.shape == reference.shape and torch.allclose(value.float(), reference.float(), rtol=1e-2, atol=1e-3)
