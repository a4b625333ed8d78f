"""Heads that others trained, and our own exports, as our head objects: recognised by config.json and tensor names.

Layouts: EAGLE and EAGLE-3 as their authors, SpecForge and vLLM have them; EAGLE-3 of the speculators library; Medusa of
FasterDecoding and of vLLM; MTP modules in their target's checkpoint; a plain draft model. Pickles are refused.
"""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.errors import BadInput, first_line
from .adapters import read_adapter
from .base import DraftHead, HeadConfig
from .draft_lm import DraftLMConfig
from .eagle import EagleConfig
from .eagle3 import Eagle3Config
from .export.check import recognised
from .export.folder import PROVENANCE
from .export.medusa import ADAPTER_FOLDER, from_blocks
from .export.model_contracts import COUNT_KEYS, mtp_layout
from .export.stored import Stored, read_stored
from .medusa import MedusaConfig
from .mtp import MtpConfig
from .mtp_checkpoint import LAYOUTS, read_modules
from .published import (
    PublishedEagle,
    PublishedEagle3,
    PublishedEagle3Config,
    PublishedEagleConfig,
    architecture_of,
    same_tensor,
)
from .registry import ADAPTER, build_head, head_class, load_weights
from .target import Target

Tensors = dict[str, Tensor]
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def import_head(folder: str | Path, target: Target) -> DraftHead:
    """A published or exported head for a target, in its dtype, on its device, in evaluation mode.

    Args: folder: a local one, or a hub id, which is downloaded without any pickle.
    Raises: BadInput where the layout is unknown, the weights are pickles or do not fit, or a part is not supported.
    """
    folder = local_folder(folder)
    config, stored = read_all(folder)
    layout = recognised(config, stored)
    if layout is None:
        raise BadInput(f"head {folder}: neither its config nor its tensors are those of a head known here")
    check_target(folder, config, target)
    try:
        head = IMPORTERS[layout](folder, config, stored, target)
    except BadInput as error:
        known = str(error).startswith(("head ", str(folder)))
        raise BadInput(str(error) if known else f"head {folder}: {error}") from error
    return head.to(target.dtype).eval().requires_grad_(False)


def local_folder(folder: str | Path) -> Path:
    """A folder as it is; a hub id downloaded, or from the cache. Raises BadInput where neither is there."""
    path = Path(folder).expanduser()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        if not (path / "config.json").is_file():
            raise BadInput(f"head {folder}: {'no config.json in it' if path.is_dir() else 'no such folder'}")
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=list(WANTED_FILES)))
    except Exception as error:  # the hub's own, of the network, of a missing repository
        raise BadInput(f"head {folder}: no such folder, and from the hub: {first_line(error)}") from error


def read_all(folder: Path) -> tuple[dict[str, Any], Stored]:
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"head {folder}: no config.json in it")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    stored = read_stored(folder)
    broken = [problem for problem in stored.problems if "not a whole" in problem or "names " in problem]
    if broken:
        raise BadInput(f"head {folder}: {broken[0]}")
    if not stored.files:
        pickles = "; pickles are not read: convert them to safetensors" if stored.problems[1:] else ""
        raise BadInput(f"head {folder}: no safetensors file in it{pickles}")
    return config, stored


def check_target(folder: Path, config: dict[str, Any], target: Target) -> None:
    """Raises BadInput where one of our exports was trained on another target."""
    trained_on = config.get(PROVENANCE, {}).get("target")
    if trained_on is not None and trained_on["fingerprint"] != target.fingerprint:
        raise BadInput(
            f"head {folder}: trained on target {trained_on['name']} (fingerprint {trained_on['fingerprint'][:12]}), "
            f"not on {target.name} ({target.fingerprint[:12]})"
        )


def own_config(config: dict[str, Any], *, plain: type[HeadConfig]) -> HeadConfig | None:
    """What our export says the head is, None where it says nothing. `plain`: the family that is expected."""
    raw = config.get(PROVENANCE, {}).get("head")
    if raw is None:
        return None
    known = {f.name for f in fields(plain)}
    unknown = sorted(raw.keys() - known)
    if unknown:
        raise BadInput(f"config keys of another version of Headstart: {unknown}")
    return plain(**raw)


def import_eagle3(folder: Path, config: dict[str, Any], stored: Stored, target: Target) -> DraftHead:
    """Also of speculators, whose layer has a config within the config and where norm_before_residual is the default."""
    layer = config.get("transformer_layer_config", config)
    num_layers = layer.get("num_hidden_layers") or 1
    tensors = without_tables({bare(name): stored.read(name) for name in stored.files}, target, keep_output=True)
    for i in range(1, num_layers):  # the same norm under two names
        hidden, given = (f"layers.{i}.{name}.weight" for name in ("hidden_norm", "input_layernorm"))
        if hidden in tensors:
            tensors.setdefault(given, tensors.pop(hidden))
    if num_layers == 1:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()}
    ids = draft_ids(tensors, target)
    options: dict[str, Any] = {
        "feature_layers": feature_layers(config, layer, tensors, target),
        "num_layers": num_layers,
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
        "draft_vocab_size": None if ids is None else len(ids),
    }
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if methods[0].get("speculative_tokens"):
        options["num_depths"] = methods[0]["speculative_tokens"]
    nested = config.get("eagle_config") or {}
    extra: dict[str, Any] = {
        "norm_before_residual": bool(config.get("norm_before_residual", "speculators_config" in config)),
        "norm_before_fc": bool(config.get("norm_before_fc", nested.get("norm_before_fc", False))),
    }
    architecture = architecture_of(layer, target)
    is_plain = not architecture and not any(extra.values())
    made = own_config(config, plain=Eagle3Config if is_plain else PublishedEagle3Config)
    if is_plain:
        head = build_head(made or Eagle3Config(**options), target, draft_token_ids=ids)
    else:
        made = made or PublishedEagle3Config(**options, **extra, architecture=architecture)
        head = PublishedEagle3(made, target, ids).to(target.device)  # pyright: ignore[reportArgumentType]
        target.check_layers(head.feature_layers)
    if "lm_head.weight" not in tensors:
        if ids is not None:
            raise BadInput("tensor lm_head.weight: missing, and the draft vocabulary is cut")
        tensors["lm_head.weight"] = target.output_layer.weight
    load_weights(head, tensors, folder)
    return head


def feature_layers(config: dict[str, Any], layer: dict[str, Any], tensors: Tensors, target: Target) -> list[int]:
    """Which features are read, counted as HF `hidden_states`: vLLM's key at the top as it is, SGLang's one more."""
    num = tensors["fc.weight"].shape[1] // target.hidden_size if "fc.weight" in tensors else 3
    key, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    found = config.get(key) or layer.get(key)
    if found is None and nested.get(key) is not None:
        found = [i + 1 for i in nested[key]]
    if found is None:
        found = [2, target.num_layers // 2, target.num_layers - 3]
    if len(found) == num + 1 and found[-1] == target.num_layers:  # the state that labels are made of, not a feature
        found = found[:-1]
    if len(found) != num:
        raise BadInput(f"{key}: {found} for the {num} features that fc.weight reads")
    return list(found)


def draft_ids(tensors: Tensors, target: Target) -> Tensor | None:
    """[Vd] the target ids of a cut draft vocabulary, whose maps are taken out of the tensors."""
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if offsets is None or (len(offsets) == target.vocab_size and not offsets.any()):
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise BadInput(f"tensor d2t: expected offsets to ascending target tokens below {target.vocab_size}")
    return ids


def import_eagle(folder: Path, config: dict[str, Any], stored: Stored, target: Target) -> DraftHead:
    tensors = without_tables({bare(name): stored.read(name) for name in stored.files}, target, keep_output=False)
    bias = tensors.get("fc.bias")
    options = {"num_layers": config.get("num_hidden_layers") or 1, "bias": bias is not None and bool(bias.any())}
    architecture = architecture_of(config, target)
    made = own_config(config, plain=PublishedEagleConfig if architecture else EagleConfig)
    if architecture:
        made = made or PublishedEagleConfig(**options, architecture=architecture)
        head: DraftHead = PublishedEagle(made, target).to(target.device)  # pyright: ignore[reportArgumentType]
    else:
        head = build_head(made or EagleConfig(**options), target)
    tensors.setdefault("fc.bias", torch.zeros(target.hidden_size))
    load_weights(head, tensors, folder)
    return head


def bare(name: str) -> str:
    return name.removeprefix("model.")


def without_tables(tensors: Tensors, target: Target, *, keep_output: bool) -> Tensors:
    """Without the target's own tables and what is computed. Raises BadInput on tables that are not the target's."""
    tensors = {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    tables = {"embed_tokens.weight": target.input_embedding.weight}
    if not keep_output:
        tables["lm_head.weight"] = target.output_layer.weight
    for name, reference in tables.items():
        value = tensors.pop(name, None)
        if value is not None and not same_tensor(value, reference.detach().cpu()):  # pyright: ignore
            raise BadInput(f"tensor {name} {list(value.shape)}: not that of {target.name}; a head reads the target's")
    return tensors


def import_medusa(folder: Path, config: dict[str, Any], stored: Stored, target: Target) -> DraftHead:
    raw = {name: stored.read(name) for name in stored.files}
    blocks = [
        found for name in raw if (found := re.search(r"(\d+)\.(\d+)\.linear\.|blocks\.(\d+)\.layers\.(\d+)\.", name))
    ]
    if "token_map" in raw or not blocks:
        raise BadInput("a truncated Medusa vocabulary is not supported" if blocks else "no Medusa block in it")
    numbers = [[int(part) for part in found.groups() if part is not None] for found in blocks]
    num_depths, num_blocks = 1 + max(k for k, _ in numbers), 1 + max(j for _, j in numbers)
    tensors = from_blocks(raw, num_blocks=num_blocks)
    outputs = [f"{k}.{num_blocks}.weight" for k in range(num_depths)]
    is_shared = not any(name in tensors for name in outputs)
    if is_shared and "lm_head.weight" in raw:
        without_tables({"lm_head.weight": raw["lm_head.weight"]}, target, keep_output=False)
    made = own_config(config, plain=MedusaConfig)
    if made is None:
        how = "shared" if is_shared else "own"
        made = MedusaConfig(num_depths=num_depths, num_blocks=num_blocks, output=how)
    assert isinstance(made, MedusaConfig)
    if made.output == "shared":
        tensors = {name: value for name, value in tensors.items() if name not in outputs}
    for k, j in numbers:
        tensors.setdefault(f"{k}.{j}.linear.bias", torch.zeros(target.hidden_size))
    adapter = read_adapter(folder / ADAPTER_FOLDER)
    tensors |= {ADAPTER + name: value for name, value in adapter.items()}
    head = build_head(made, target)
    load_weights(head, tensors, folder)
    return head


def import_mtp(folder: Path, config: dict[str, Any], stored: Stored, target: Target) -> DraftHead:
    """The modules of a whole checkpoint, whose other tensors are the target's."""
    inner = config.get("text_config", config)
    name = mtp_layout(stored.shapes)
    if name is None:
        raise BadInput(f"no MTP module in it: {', '.join(key for key in COUNT_KEYS if inner.get(key))} says otherwise")
    num = next((inner[key] for key in COUNT_KEYS if inner.get(key)), 1)
    is_many = num > 1 and LAYOUTS[name].has_many
    options: dict[str, Any] = {"num_depths": num} if is_many else {}
    head = build_head(MtpConfig(layout=name, init="random", independent=is_many, **options), target)
    head.load_state_dict(read_modules(folder, head.state_dict()))
    return head


def import_draft_model(folder: Path, config: dict[str, Any], stored: Stored, target: Target) -> DraftHead:
    made = own_config(config, plain=head_class("draft_lm").config_class)
    if made is None:
        return build_head(DraftLMConfig(path=str(folder)), target)
    head = build_head(made, target)
    load_weights(head, {name: stored.read(name) for name in stored.files}, folder)
    return head


IMPORTERS: dict[str, Callable[[Path, dict[str, Any], Stored, Target], DraftHead]] = {
    "eagle": import_eagle,
    "eagle3": import_eagle3,
    "speculators": import_eagle3,
    "medusa": import_medusa,
    "mtp": import_mtp,
    "draft model": import_draft_model,
}
