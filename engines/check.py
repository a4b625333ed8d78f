"""Checks of an exported head for problems that engines do not notice when they load it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base.errors import BadInput, first_line
from ..base.files import lack_of
from ..base.jsonl import loads
from ..base.typed import check_type
from ..heads.families import HEADS
from ..heads.stored.record import PROVENANCE
from ..targets.weights.tensor_files import INTEGERS, TensorFiles, read_tensor_files
from .families.table import SERVINGS
from .gguf_check import check_file
from .layouts import fp8
from .layouts.contracts import Contract, window_problems
from .layouts.writing import SCALE
from .llamacpp import SPEC_TYPES
from .vllm import switching_word

# types of the config keys that checks read, at whatever depth, besides `Serving.key_types`; None is accepted too
TYPES: dict[str, Any] = {
    **dict.fromkeys(("speculators_config", "verifier", "transformer_layer_config", "text_config", fp8.KEY), dict),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys((PROVENANCE, "headstart", "head"), dict),
    **dict.fromkeys(("architectures", "layer_types"), list[str]),
    "proposal_methods": list[dict],
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"), int),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "draft_vocab_size"), int),
    **dict.fromkeys(("max_position_embeddings", "num_depths", "sliding_window"), int),
    "feature_layers": list[int],
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), float),
}
# torch's names of the dtypes that weights may have, by those of safetensors
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    layout: str | None  # None: config.json cannot be read
    problems: list[str]  # a line each


def check_export(path: str | Path, *, to: str = "") -> Checked:
    """Compare a folder, or a GGUF file, with what engines read of it.

    Args: to: the engine, for what only SGLang or llama.cpp cannot read. A folder with a GGUF file is for llama.cpp.
    Raises: BadInput if it is not a head.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return Checked(*check_file(path))
    files = sorted(path.glob("*.gguf"))
    checked = check_folder(path, to="llama.cpp" if files else to)
    for file in files:
        config = loads((path / "config.json").read_text()) if checked.layout else None
        checked.problems.extend(f"{file.name}: {problem}" for problem in check_file(file, config)[1])
    return checked


def check_folder(folder: str | Path, *, to: str = "") -> Checked:
    """Compare a folder with what vLLM and SGLang, or llama.cpp's converter, need of its layout.

    Args: to: the engine, see `check_export`. Raises: BadInput if it is not a head's folder.
    """
    folder, for_llamacpp = Path(folder), to == "llama.cpp"
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder}: {lack_of(folder, path.name)}")
    try:
        config = loads(path.read_text())
    except (ValueError, OSError) as error:
        return Checked(None, [f"config.json: not JSON: {first_line(error)}"])
    if not isinstance(config, dict):
        return Checked(None, ["config.json: no JSON object"])
    types = TYPES | {key: kind for one in SERVINGS.values() for key, kind in one.key_types.items()}
    if wrong := wrong_types(config, types):
        return Checked(None, [f"config.json: {problem}" for problem in wrong])
    stored = read_tensor_files(folder)
    family = recognised(config, stored)
    if family is None:
        raise BadInput(f"{folder}: neither its config nor its tensors are those of a head that an engine serves")
    serving = SERVINGS[family]
    contract = serving.contract(folder, config, stored, to=to)
    if contract.is_ours is None:  # the layers of a target may be stored as they like
        fp8.require(contract, config, stored, in_fp8=serving.in_fp8, to=to)
    problems = [*stored.problems, *contract.problems]
    if serving.in_sglang:
        problems += window_problems(config, in_sglang=serving.in_sglang, to=to)
    if config.get(SCALE) and to not in ("", "vllm"):
        problems.append(f"{SCALE} {config[SCALE]}: {to} gives a draft the target's bare table, not the scaled one here")
    if for_llamacpp and not any(method in SPEC_TYPES for method in serving.methods or (family,)):
        problems.append(f"llama.cpp has no graph for {family} heads")
    word = None if for_llamacpp else switching_word(folder.absolute(), family)
    if word is not None:
        problems.append(f"the path has `{word}` in it: vLLM takes the head for another method")
    problems += shape_problems(contract, stored) + dtype_problems(contract, config, stored)
    return Checked(contract.layout, problems + value_problems(contract, stored, config))


def wrong_types(config: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys in a config, or in an object within it, whose values have another type than `types` says."""
    problems = []
    for key, value in config.items():
        if key in types and value is not None:
            try:
                check_type(value, types[key], name=f"{prefix}{key}")
            except BadInput as error:
                problems.append(str(error))
                continue
        if isinstance(value, dict):
            problems += wrong_types(value, types, f"{prefix}{key}.")
        elif isinstance(value, list):
            objects = [(i, item) for i, item in enumerate(value) if isinstance(item, dict)]
            problems += [line for i, item in objects for line in wrong_types(item, types, f"{prefix}{key}.{i}.")]
    return problems


def recognised(config: dict[str, Any], stored: TensorFiles) -> str | None:
    """The family, recognised by config keys and tensor names even if others are wrong; None: unknown."""
    if config.get("model_type") in [family for family in HEADS if family not in SERVINGS]:
        return None  # a head of ours that no engine loads
    return next((family for family, serving in SERVINGS.items() if serving.recognises(config, stored)), None)


def shape_problems(contract: Contract, stored: TensorFiles) -> list[str]:
    """Tensors that are missing, of another shape, or should not be there."""
    if not contract.shapes or not stored.shapes:
        return []
    shapes, is_ours = stored.shapes, contract.is_ours
    if is_ours is not None:  # without the target's own tensors
        shapes = {name: shapes[name] for name in shapes if name in contract.shapes or is_ours(name)}
    return contract.compare(shapes)


def dtype_problems(contract: Contract, config: dict[str, Any], stored: TensorFiles) -> list[str]:
    """Weights must all have one floating-point dtype, the one in config.json; maps of a vocabulary integers."""
    dtypes, mapping = stored.dtypes, {"d2t": INTEGERS, "t2d": ("BOOL",)}
    mapping |= contract.dtypes
    wrong = [name for name, allowed in mapping.items() if name in dtypes and dtypes[name] not in allowed]
    problems = [f"tensor {name}: of dtype {dtypes[name]}, expected {mapping[name][0]}" for name in wrong]
    if contract.is_ours is not None:  # a target's checkpoint may mix dtypes as it likes
        return problems
    weights = {name: dtype for name, dtype in dtypes.items() if name not in mapping}
    odd = sorted(name for name, dtype in weights.items() if dtype not in TORCH_NAMES)
    if odd:
        problems.append(f"tensor {odd[0]}: of dtype {weights[odd[0]]}, expected floating point of 16 or 32 bits")
    elif config.get(fp8.KEY) and fp8.STORED not in dtypes.values():
        problems.append(f"{fp8.KEY}: but the weights are not quantised; engines would misread them")
    kinds = sorted({TORCH_NAMES[dtype] for dtype in weights.values() if dtype in TORCH_NAMES})
    if len(kinds) > 1:
        problems.append(f"weights are of several dtypes: {', '.join(kinds)}")
    for key in ("dtype", "torch_dtype"):
        if len(kinds) == 1 and config.get(key) not in (None, kinds[0]):
            problems.append(f"{key}: {config[key]}, but the weights are {kinds[0]}")
    return problems


def value_problems(contract: Contract, stored: TensorFiles, config: dict[str, Any]) -> list[str]:
    """NaN, infinite or contradicting values of the head's own tensors."""
    problems = []
    for name in stored.floats:
        if contract.is_ours is not None and not contract.is_ours(name):
            continue
        value = stored.read(name).float()
        num_bad = int((~torch.isfinite(value)).sum())
        if num_bad:
            kind = "NaN" if value.isnan().any() else "infinite"
            problems.append(f"tensor {name}: {num_bad} of {value.numel()} values are {kind}")
        if name in contract.zero and value.any():
            problems.append(f"tensor {name}: not zero: vLLM leaves it out, SGLang adds it")
    for one, other in contract.equal:
        if one in stored.files and other in stored.files and not torch.equal(stored.read(one), stored.read(other)):
            problems.append(f"tensor {other}: differs from {one}: SGLang reads the first, vLLM the second")
    has_map = "d2t" in contract.shapes and stored.shapes.get("d2t") == contract.shapes["d2t"]
    if has_map and stored.dtypes["d2t"] in INTEGERS:
        problems += map_problems(stored, config)
    return problems


def map_problems(stored: TensorFiles, config: dict[str, Any]) -> list[str]:
    """The first problem of the maps, if any: d2t holds offsets, so that draft token i is target token i + d2t[i], and
    these ascend; t2d marks them."""
    offsets = stored.read("d2t").long()
    ids = offsets + torch.arange(len(offsets))  # [Vd]
    size = (config.get("transformer_layer_config") or config)["vocab_size"]
    outside = ((ids < 0) | (ids >= size)).nonzero()
    if len(outside):
        i = int(outside[0])
        return [f"tensor d2t: draft token {i} is target token {int(ids[i])}, outside 0..{size - 1}; it holds offsets"]
    descents = (ids.diff() <= 0).nonzero()
    if len(descents):
        i = int(descents[0]) + 1
        return [f"tensor d2t: target tokens do not ascend: draft token {i} is {int(ids[i])} after {int(ids[i - 1])}"]
    if stored.dtypes.get("t2d") == "BOOL" and stored.shapes["t2d"] == (size,):
        marked = stored.read("t2d").nonzero().flatten()
        if not torch.equal(marked, ids):
            return [f"tensor t2d: marks {len(marked)} tokens, and not those {len(ids)} that d2t gives"]
    return []
