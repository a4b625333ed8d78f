"""What folders of whole models must hold: draft models, and targets with MTP modules."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...configs.errors import first_line
from ..importing.mtp_checkpoint import LAYOUTS, count_key, mtp_layout, unlike_ours, views_on_disk
from ..loading import quiet_loading
from .contracts import Contract, sizes_of, trained_config
from .tensor_files import TensorFiles

PARTS = ("enorm", "hnorm", "eh_proj", "norm", "block")
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def draft_model(folder: Path, config: Mapping[str, Any], stored: TensorFiles) -> Contract:
    """All tensors of transformers' model for the config, and a tokenizer."""
    contract = Contract("draft model")
    if "auto_map" in config:
        contract.problems.append("auto_map: asks engines to run code of the folder")
        return contract
    has_tokenizer = any(folder.glob("tokenizer*"))
    contract.report(not has_tokenizer, "tokenizer.json: missing; engines compare it with the target's")
    try:
        with quiet_loading(), torch.device("meta"):
            made = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # whatever a config class raises
        contract.problems.append(f"config.json: transformers makes no model of it: {first_line(error)}")
        return contract
    token, size, key = config.get("pard_token"), made.get_text_config().vocab_size, "pard_token"
    is_parallel = trained_config(config).get("parallel")
    contract.report(is_parallel and token is None, f"{key}: missing; vLLM drafts behind that token")
    outside = token is not None and (type(token) is not int or not 0 <= token < size)
    contract.report(outside, f"{key}: {token!r}, expected 0 to {size - 1}")
    found, own = config.get("architectures"), [type(model).__name__]
    contract.report(found != own, f"architectures: found {found}, expected {own}")
    tied = (
        set(getattr(model, "all_tied_weights_keys", {}))
        if getattr(made.get_text_config(), "tie_word_embeddings", False)
        else set()
    )
    state = model.state_dict()
    contract.optional = {name: tuple(state.pop(name).shape) for name in tied if name in state}
    contract.shapes = {name: tuple(value.shape) for name, value in views_on_disk(state, stored.files).items()}
    return contract


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: of a model of several parts its text part."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def mtp(config: Mapping[str, Any], stored: TensorFiles) -> Contract:
    """The tensors of MTP modules: a decoder layer like the target's last one with attention, a projection and norms."""
    inner = text_part(config)
    name = mtp_layout(stored.shapes) or "deepseek_v3"
    layout, contract = LAYOUTS[name], Contract(f"mtp ({name})")
    if why := unlike_ours(stored.shapes):
        contract.problems.append(f"not checked: {why}")
        return contract
    key = count_key(str(config.get("model_type")))
    contract.report(not inner.get(key), f"{key}: expected the number of modules, found {inner.get(key)}")
    sizes = sizes_of(inner, contract, ("hidden_size", "vocab_size", "num_hidden_layers"))
    if sizes is None or contract.problems:
        return contract
    hidden, num_layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    last = last_attending(stored, num_layers)
    for i in range(num_layers):
        is_there = any(f".layers.{i}." in key for key in stored.shapes)
        contract.report(
            not is_there, f"layer {i} of the target: no tensor of it: MTP modules are served within the target"
        )
    if not last:
        return contract
    for k in range(inner[key]):
        place = {part: getattr(layout, part).format(module=k, layer=num_layers + k) for part in PARTS}
        contract.shapes |= {f"{place[part]}.weight": (hidden,) for part in ("enorm", "hnorm", "norm")}
        contract.shapes[f"{place['eh_proj']}.weight"] = (hidden, 2 * hidden)
        block = {f"{place['block']}.{rest}": torch.empty(shape, device="meta") for rest, shape in last.items()}
        contract.shapes |= {one: tuple(value.shape) for one, value in views_on_disk(block, stored.files).items()}
        if name == "deepseek_v3":
            for table in ("embed_tokens", "shared_head.head"):
                contract.shapes[f"{place['block']}.{table}.weight"] = (sizes["vocab_size"], hidden)
    is_tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    has_output = any(key.endswith("lm_head.weight") for key in stored.shapes)
    contract.report(not is_tied and not has_output, "lm_head.weight: missing in the target")
    return contract


def last_attending(stored: TensorFiles, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Names within the layer, and shapes, of the tensors of the target's last layer with full attention."""
    for i in reversed(range(num_layers)):
        found = {
            key.split(f".layers.{i}.", 1)[1]: shape
            for key, shape in stored.shapes.items()
            if f".layers.{i}." in key and not key.startswith("mtp.")
        }
        if any(key.startswith("self_attn.") for key in found):
            return joined_experts(found)
    return {}


def joined_experts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A layer's shapes with all experts in one tensor, as transformers keeps them, however the checkpoint does."""
    joined: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found is None:
            joined[name] = shape
            continue
        stem, number, kind = found.groups()
        if kind != "up":  # as large as its gate
            whole = f"{stem}.{'down' if kind == 'down' else 'gate_up'}_proj"
            num_experts = max(joined.get(whole, (0,))[0], int(number) + 1)
            joined[whole] = (num_experts, shape[0] if kind == "down" else 2 * shape[0], *shape[1:])
    return joined


def is_module(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a checkpoint belongs to an MTP module."""
    num_layers = text_part(config).get("num_hidden_layers", 0)
    found = re.search(r"\.layers\.(\d+)\.", name)
    behind = found is not None and not name.startswith("mtp.") and int(found.group(1)) >= num_layers
    return behind or name.startswith("mtp.") or ".mtp_layers." in name
