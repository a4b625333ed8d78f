"""Importing published heads and our own exports: the family is recognised by config.json and tensor names, and its
`Serving` reads the folder.

Pickles are refused. `registry.load_head` and `start_head` use this for hub ids and every folder that is not a run's.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.typed import TypedKeys
from ..heads.base import DraftHead, HeadConfig
from ..heads.families import build_head, head_class
from ..heads.stored.folder import config_of, load_weights
from ..heads.stored.record import PROVENANCE, HeadRecord
from ..targets.target import Target
from ..targets.weights.tensor_files import TensorFiles
from .check import recognised
from .families.table import SERVINGS
from .layouts.foreign import ForeignFolder, Imported, Tensors, bare, local_folder, read_all, same_tensor


def import_head(folder: str | Path, target: Target) -> DraftHead:
    """Load a published or exported head for a target, in its dtype, on its device, in evaluation mode.

    Args: folder: a local one, or a hub id, which is downloaded; no pickle is read.
    Raises: BadInput if the layout is unknown, the weights are pickles or do not fit, or a part is not supported.
    """
    folder = local_folder(folder)
    with naming_head(folder):
        config, imported = read_imported(folder, target)
        head = build_head(config, target, draft_token_ids=imported.draft_token_ids)
        load_weights(head, imported.tensors, folder)
    return head.to(target.dtype).eval().requires_grad_(False)


def imported_start(folder: str | Path, config: HeadConfig, target: Target) -> Imported:
    """A published or exported head of `config`'s family to start training from, perhaps of another target.

    Raises: BadInput as `import_head`, and if `config` computes something else, with the keys to set.
    """
    folder = local_folder(folder)
    with naming_head(folder):
        given, imported = read_imported(folder, target, is_its_target=False)
    if given.type != config.type:
        raise BadInput(f"head {folder}: is of type {given.type}, not {config.type}")
    theirs, ours = (one.resolved(target).as_dict() for one in (given, config))
    computes = ("feature_layers", "draft_vocab_size", *SERVINGS[config.type].computes)
    differing = {key: theirs[key] for key in computes if theirs[key] != ours[key]}
    their_size, our_size = differing.get("draft_vocab_size"), ours.get("draft_vocab_size")
    if their_size is not None and our_size is not None and our_size > their_size:  # it learns to draft more
        del differing["draft_vocab_size"]
    if differing:
        keys = " ".join(shlex.quote(f"head.{key}={json.dumps(value)}") for key, value in differing.items())
        raise BadInput(f"head {folder}: computes otherwise than this config: set {keys}")
    return imported


def read_imported(folder: Path, target: Target, *, is_its_target: bool = True) -> tuple[HeadConfig, Imported]:
    """The config of the head in a folder, the one that our export recorded or else one made of the folder's own, and
    its tensors by our names.

    Args: is_its_target: check that the head belongs to this target. Raises: BadInput.
    """
    config, stored = read_all(folder)
    family = family_of(folder, config, stored)
    config_class, serving = head_class(family).config_class, SERVINGS[family]
    record = provenance(config)
    if is_its_target and record is not None:
        record.check_target(folder, target)
    recorded = None if record is None else config_of(record, config_class, key=PROVENANCE)

    def fresh(keys: Mapping[str, Any]) -> Tensors:
        return build_head(config_class(**keys), target).state_dict()

    own = None if recorded is None else recorded.as_dict()
    imported = serving.read(ForeignFolder(folder, TypedKeys(config, "config.json: "), stored, target, own, fresh))
    if is_its_target and not serving.is_whole_model:
        check_tables(imported.tensors, stored, target)
    ids = imported.draft_token_ids
    head_config = recorded or config_class(**imported.keys)
    return replace(head_config, draft_vocab_size=None if ids is None else len(ids)), imported


@contextmanager
def naming_head(folder: str | Path) -> Iterator[None]:
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


def provenance(config: Mapping[str, Any]) -> HeadRecord | None:
    """The record that our export wrote to config.json; None if there is none."""
    return HeadRecord.from_json(config[PROVENANCE]) if config.get(PROVENANCE) else None


def family_of(folder: Path, config: dict[str, Any], stored: TensorFiles) -> str:
    """The family of the head in a folder. Raises BadInput if it is not recognised."""
    family = recognised(config, stored)
    if family is None:
        raise BadInput(f"head {folder}: neither its config nor its tensors are those of a head known here")
    return family


def check_tables(tensors: Tensors, stored: TensorFiles, target: Target) -> None:
    """Raises BadInput if a head's folder has copies of its target's tables that differ from this target's.

    Args: tensors: the head's own, by our names.
    """
    ids = torch.arange(target.vocab_size, device=target.device)[None]
    # as stored, and as the first layer reads it, which some targets scale
    tables = {"embed_tokens.weight": [target.input_embedding.weight, target.embed(ids)[0]]}
    if "lm_head.weight" not in tensors:
        tables["lm_head.weight"] = [target.output_layer.weight]
    for name in stored.files:
        references = tables.get(bare(name), [])
        value = stored.read(name) if references else None
        if value is not None and not any(same_tensor(value, table.detach().cpu()) for table in references):
            raise BadInput(f"tensor {name} {list(value.shape)}: not that of {target.name}; a head reads the target's")
