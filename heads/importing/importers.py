"""Importing published heads and our own exports; layouts are recognised by config.json and tensor names.

Layouts: EAGLE and EAGLE-3 of their authors, SpecForge and vLLM; EAGLE-3 and block drafters of the speculators library;
Medusa of FasterDecoding and of vLLM; MTP modules in their target's checkpoint; a plain draft model. Pickles are
refused. `registry.load_head` and `start_head` use this for hub ids and every folder that is not a run's.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...configs.errors import BadInput
from ...configs.typed import TypedKeys
from ..adapters import read_adapter
from ..base import DraftHead, HeadConfig
from ..draft_lm import DraftLMConfig
from ..eagle import EagleConfig
from ..eagle3 import Eagle3Config
from ..export.check import recognised
from ..export.eagle3 import MASK_KEYS
from ..export.medusa import ADAPTER_FOLDER, from_blocks
from ..export.mtp import COUNT_KEYS
from ..export.record import HeadRecord
from ..export.tensor_files import TensorFiles
from ..families import build_head, head_class
from ..folder import ADAPTER, load_weights
from ..medusa import MedusaConfig
from ..mtp import MtpConfig
from ..target import Target
from .block import import_block
from .imported import ForeignFolder, Imported, Tensors, bare, draft_ids, provenance
from .mtp_checkpoint import LAYOUTS, mtp_layout, read_modules, unlike_ours
from .published import architecture_of, local_folder, read_all, same_tensor, window_of

# config keys that change what a head computes without showing in tensor shapes: training must continue with the same
COMPUTES = (
    "feature_layers num_layers bias fc_norm norm_output norm_before_residual norm_before_fc architecture "
    "sliding_window num_blocks output layout independent feedback draft_vocab_size parallel sample_from_anchor "
    "markov_rank confidence has_head_norms mask_token_id selector_top_k"
).split()


def import_head(folder: str | Path, target: Target) -> DraftHead:
    """Load a published or exported head for a target, in its dtype, on its device, in evaluation mode.

    Args: folder: a local one, or a hub id, which is downloaded without any pickle.
    Raises: BadInput if the layout is unknown, the weights are pickles or do not fit, or a part is not supported.
    """
    folder = local_folder(folder)
    with naming(folder):
        imported = read_imported(folder, target)
        head = build_head(imported.config, target, draft_token_ids=imported.draft_token_ids)
        load_weights(head, imported.tensors, folder)
    return head.to(target.dtype).eval().requires_grad_(False)


def imported_start(folder: str | Path, config: HeadConfig, target: Target) -> Imported:
    """A published or exported head of `config`'s family to start training from, perhaps of another target.

    Raises: BadInput as `import_head`, and if `config` computes something else, with the keys to set.
    """
    folder = local_folder(folder)
    with naming(folder):
        imported = read_imported(folder, target, is_its_target=False)
    if imported.config.type != config.type:
        raise BadInput(f"head {folder}: is of type {imported.config.type}, not {config.type}")
    theirs, ours = imported.config.as_dict(), config.resolved(target).as_dict()
    other = {key: theirs[key] for key in COMPUTES if key in theirs and theirs[key] != ours[key]}
    drafted, wanted = other.get("draft_vocab_size"), ours.get("draft_vocab_size")
    if drafted is not None and wanted is not None and wanted > drafted:  # it learns to draft more
        del other["draft_vocab_size"]
    if other and config.type != "draft_lm":  # a draft model is determined by its own config.json
        keys = " ".join(shlex.quote(f"head.{key}={json.dumps(value)}") for key, value in other.items())
        raise BadInput(f"head {folder}: computes otherwise than this config: set {keys}")
    return imported


def read_imported(folder: Path, target: Target, *, is_its_target: bool = True) -> Imported:
    """Import the head in a folder; with is_its_target, check that it belongs to this target. Raises BadInput."""
    config, stored = read_all(folder)
    family = family_of(folder, config, stored)
    record = provenance(config)
    if is_its_target and record is not None:
        record.check_target(folder, target)
    if family not in IMPORTERS:
        raise BadInput(f"head {folder}: {family} heads of others are not imported")
    imported = IMPORTERS[family](ForeignFolder(folder, family, TypedKeys(config, "config.json: "), stored, target))
    if is_its_target:
        check_tables(imported, stored, target)
    return imported


@contextmanager
def naming(folder: str | Path) -> Iterator[None]:
    """Prefix errors raised within with the head's folder."""
    try:
        yield
    except BadInput as error:
        known = str(error).startswith(("head ", str(folder)))
        raise BadInput(str(error) if known else f"head {folder}: {error}") from error


def read_import_record(folder: str | Path) -> HeadRecord:
    """The record that our export wrote, else one with only the family. Raises BadInput as `import_head`."""
    folder = local_folder(folder)
    config, stored = read_all(folder)
    return provenance(config) or HeadRecord({"type": family_of(folder, config, stored)}, "", None)


def family_of(folder: Path, config: dict[str, Any], stored: TensorFiles) -> str:
    family = recognised(config, stored)
    if family is None:
        raise BadInput(f"head {folder}: neither its config nor its tensors are those of a head known here")
    return family


def import_eagle3(folder: ForeignFolder) -> Imported:
    """EAGLE-3, also of speculators, which nests the layer's config and has norm_before_residual as default."""
    config, target = folder.config, folder.target
    layer = config.inner_or_self("transformer_layer_config")
    num_layers = layer.read("num_hidden_layers", int) or 1
    tensors = folder.bare_tensors("embed_tokens.weight")
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
        **{key: bool(config.read(key, bool)) for key in ("fc_norm", "norm_output")},
        "draft_vocab_size": None if ids is None else len(ids),
    }
    is_speculators, in_speculators = "speculators_config" in config.values, config.inner("speculators_config")
    if methods := in_speculators.read("proposal_methods", list[dict]):
        first = TypedKeys(methods[0], f"{in_speculators.where}proposal_methods.0.")
        options |= {"num_depths": num} if (num := first.read("speculative_tokens", int)) else {}
    before_residual = config.read("norm_before_residual", bool)
    before_fc = [keys.read("norm_before_fc", bool) for keys in (config, config.inner("eagle_config"))]
    options |= {
        "norm_before_residual": is_speculators if before_residual is None else before_residual,
        "norm_before_fc": bool(before_fc[1] if before_fc[0] is None else before_fc[0]),
        "sliding_window": window_of(layer),
        "architecture": architecture_of(TypedKeys({**layer.values, "sliding_window": None}, layer.where), target),
    }
    if "mask_hidden" in tensors:
        token = next((token for key in MASK_KEYS if (token := config.read(key, int)) is not None), None)
        if token is None:
            raise BadInput("pard_token: missing, and there is a mask_hidden")
        options |= {"parallel": True, "mask_token_id": token}
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    if "lm_head.weight" not in tensors:
        if ids is not None:
            raise BadInput("tensor lm_head.weight: missing, and the draft vocabulary is cut")
        tensors["lm_head.weight"] = target.output_layer.weight
    return Imported(folder.own or Eagle3Config(**options), tensors, ids)


def feature_layers(config: TypedKeys, layer: TypedKeys, tensors: Tensors, target: Target) -> list[int]:
    """The feature layers as HF `hidden_states` indices: vLLM's top-level key as it is, SGLang's nested one plus 1.

    Raises: BadInput if their number does not match fc.weight.
    """
    num = tensors["fc.weight"].shape[1] // target.hidden_size if "fc.weight" in tensors else 3
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.read(key, list[int]) or layer.read(key, list[int])
    if layers is None and (nested := config.inner("eagle_config").read(key, list[int])) is not None:
        layers = [i + 1 for i in nested]
    if layers is None:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    if len(layers) == num + 1 and layers[-1] == target.num_layers:  # the final state, listed for labels, not a feature
        layers = layers[:-1]
    if len(layers) != num:
        raise BadInput(f"{key}: {layers} for the {num} features that fc.weight reads")
    return list(layers)


def import_eagle(folder: ForeignFolder) -> Imported:
    tensors = folder.bare_tensors("embed_tokens.weight", "lm_head.weight")
    bias = tensors.setdefault("fc.bias", torch.zeros(folder.target.hidden_size))
    made = folder.own or EagleConfig(
        num_layers=folder.config.read("num_hidden_layers", int) or 1,
        bias=bool(bias.any()),
        architecture=architecture_of(folder.config, folder.target),
    )
    return Imported(replace(made, draft_vocab_size=None), tensors)  # an export has no draft vocabulary


def check_tables(imported: Imported, stored: TensorFiles, target: Target) -> None:
    """Raises BadInput if a head's folder has copies of its target's tables that differ from this target's."""
    serving = head_class(imported.config.type).serving
    if serving is not None and serving.is_whole_model:
        return
    ids = torch.arange(target.vocab_size, device=target.device)[None]
    # as stored, and as the first layer reads it, which some targets scale
    tables = {"embed_tokens.weight": [target.input_embedding.weight, target.embed(ids)[0]]}
    if "lm_head.weight" not in imported.tensors:
        tables["lm_head.weight"] = [target.output_layer.weight]
    for name in stored.files:
        references = tables.get(bare(name), [])
        value = stored.read(name) if references else None
        if value is not None and not any(same_tensor(value, table.detach().cpu()) for table in references):
            raise BadInput(f"tensor {name} {list(value.shape)}: not that of {target.name}; a head reads the target's")


def import_medusa(folder: ForeignFolder) -> Imported:
    raw = folder.tensors()
    blocks = [
        match for name in raw if (match := re.search(r"(\d+)\.(\d+)\.linear\.|blocks\.(\d+)\.layers\.(\d+)\.", name))
    ]
    if "token_map" in raw or not blocks:
        raise BadInput("a truncated Medusa vocabulary is not supported" if blocks else "no Medusa block in it")
    numbers = [[int(part) for part in match.groups() if part is not None] for match in blocks]
    num_depths, num_blocks = 1 + max(k for k, _ in numbers), 1 + max(j for _, j in numbers)
    tensors = from_blocks(raw, num_blocks=num_blocks)
    outputs = [f"{k}.{num_blocks}.weight" for k in range(num_depths)]
    how = "own" if any(name in tensors for name in outputs) else "shared"
    made = folder.own or MedusaConfig(num_depths=num_depths, num_blocks=num_blocks, output=how)
    assert isinstance(made, MedusaConfig)
    if made.output == "shared":
        tensors = {name: value for name, value in tensors.items() if name not in outputs}
    for k, j in numbers:
        tensors.setdefault(f"{k}.{j}.linear.bias", torch.zeros(folder.target.hidden_size))
    adapter = read_adapter(folder.path / ADAPTER_FOLDER)
    return Imported(made, tensors | {ADAPTER + name: value for name, value in adapter.items()})


def import_mtp(folder: ForeignFolder) -> Imported:
    """The MTP modules of a whole checkpoint, whose other tensors are the target's."""
    inner, shapes = folder.config.inner_or_self("text_config"), folder.stored.shapes
    counts = {key: num for key in COUNT_KEYS if (num := inner.read(key, int))}
    name = mtp_layout(shapes)
    if name is None:
        raise BadInput(unlike_ours(shapes) or f"{', '.join(counts)}: set, but there is no MTP module")
    num = next(iter(counts.values()), 1)
    is_many = num > 1 and LAYOUTS[name].has_many
    options: dict[str, Any] = {"num_depths": num} if is_many else {}
    made = MtpConfig(layout=name, init="random", independent=is_many, **options)
    return Imported(made, read_modules(folder.path, build_head(made, folder.target).state_dict()))


def import_draft_model(folder: ForeignFolder) -> Imported:
    if folder.own is not None:
        return Imported(folder.own, folder.tensors())
    token = folder.config.read("pard_token", int)
    parallel: dict[str, Any] = {} if token is None else {"parallel": True, "mask_token_id": token, "num_depths": 8}
    head = build_head(DraftLMConfig(path=str(folder.path), **parallel), folder.target)
    return Imported(head.config, head.state_dict())


IMPORTERS: dict[str, Callable[[ForeignFolder], Imported]] = {
    "eagle": import_eagle,
    "eagle3": import_eagle3,
    "medusa": import_medusa,
    "mtp": import_mtp,
    "draft_lm": import_draft_model,
    "block": import_block,
}
