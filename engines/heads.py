"""Entry points for heads: build one, load one from any folder or hub id, or start training from one."""

from pathlib import Path

import torch
from torch import Tensor

from ..base.errors import BadInput
from ..heads.base import DraftHead, HeadConfig
from ..heads.families import HEADS, build_head, head_class
from ..heads.stored.folder import (
    ADAPTER,
    config_of,
    is_head_folder,
    load_weights,
    read_record,
    read_tensors,
    save_head,
)
from ..heads.stored.record import HeadRecord
from ..targets.adapters import adapted_layers
from ..targets.target import Target
from .importers import import_head, imported_start, naming_head, read_import_record

__all__ = [
    "HEADS",
    "build_head",
    "check_family",
    "head_class",
    "head_record",
    "load_head",
    "save_head",
    "start_head",
    "start_vocabulary",
]


def head_record(folder: str | Path) -> HeadRecord:
    """The record in a head's folder or hub repository, read without a target.

    Raises BadInput if it holds no head, or one with a config of another version."""
    if not is_head_folder(folder):
        return read_import_record(folder)
    record = read_record(folder)
    with naming_head(folder):
        config_of(record, head_class(record.family).config_class)
    return record


def load_head(folder: str | Path, target: Target) -> DraftHead:
    """Load a head for the target it was trained on, in the target's dtype, on its device, in evaluation mode.

    Args: folder: a run's (RUN/final), an export of `headstart export`, a published head, or a hub id.
    Raises: BadInput if the folder holds no head, the head belongs to another target, or its tensors do not fit.
    """
    head = read_head(folder, target) if is_head_folder(folder) else import_head(folder, target)
    head.pack()
    return head


def read_head(folder: str | Path, target: Target) -> DraftHead:
    """`load_head` of a folder that we wrote."""
    record = read_record(folder)
    record.check_target(folder, target)
    tensors, draft_token_ids = read_tensors(folder)
    with naming_head(folder):
        config = config_of(record, head_class(record.family).config_class)
        head = build_head(config, target, draft_token_ids=draft_token_ids)
        load_weights(head, tensors, folder)
    return head.to(target.dtype).eval().requires_grad_(False)


def start_head(
    config: HeadConfig, target: Target, folder: str | Path, *, draft_token_ids: Tensor | None = None, seed: int = 0
) -> DraftHead:
    """A new head in fp32 with the weights and the draft vocabulary of a head folder, to continue training from.

    The folder's head may be of another target. A head that adapts its target may start from one that does not, and a
    head may draft more tokens than the folder's does: their rows are made by `with_more_rows`.

    Args:
        folder: as in `load_head`.
        draft_token_ids: [Vd] ascending: the draft vocabulary, which contains the folder's; None: the folder's.

    Raises: BadInput if the folder holds another family, another draft vocabulary or tensors of other shapes.
    """
    tensors, stored = start_tensors(config, target, folder)
    ids = stored if draft_token_ids is None else draft_token_ids
    size = None if ids is None else len(ids)
    if size != config.draft_vocab_size:
        raise BadInput(f"head {folder}: its draft_vocab_size is {size}, not {config.draft_vocab_size}")
    head = build_head(config, target, draft_token_ids=ids, seed=seed)
    if adapted_layers(head):
        raise BadInput(
            f"head {folder}: a head with adapters of its own cannot start from it; train.lora_rank adds them"
        )
    if stored is not None and ids is not None and len(stored) < len(ids):
        places = torch.isin(ids, stored)
        if int(places.sum()) < len(stored):
            raise BadInput(f"head {folder}: the draft vocabulary to start with does not contain the head's own")
        tensors = with_more_rows(tensors, head.state_dict(), places)
    if not any(name.startswith(ADAPTER) for name in tensors):
        tensors |= {name: value for name, value in head.state_dict().items() if name.startswith(ADAPTER)}
    load_weights(head, tensors, folder)
    return head


def with_more_rows(tensors: dict[str, Tensor], fresh: dict[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """A head's tensors, with rows for tokens that it could not draft before: R rows become Vd.

    New rows are those of a fresh head, times what is left of the fresh head's rows in the old ones: the factor by which
    the fresh rows approximate the old ones best (least squares over all of them).

    Args:
        tensors: by name, with R rows where they depend on the draft vocabulary.
        fresh: the tensors of a fresh head, with Vd rows there.
        places: [Vd] bool, which of the Vd rows are the old ones; R of them.
    """
    grown = dict(tensors)
    for name, old in tensors.items():
        new = fresh.get(name)
        if new is None or (len(old), len(new)) != (int(places.sum()), len(places)) or old.shape[1:] != new.shape[1:]:
            continue
        alike = new[places].float()
        factor = (alike * old.float()).sum() / alike.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
        rows = new.float() * factor
        rows[places] = old.float()
        grown[name] = rows.to(old.dtype)
    return grown


def start_tensors(config: HeadConfig, target: Target, folder: str | Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """`read_tensors` of any folder that `load_head` takes. Raises BadInput if its family is not the config's."""
    if not is_head_folder(folder):
        imported = imported_start(folder, config, target)
        return dict(imported.tensors), imported.draft_token_ids
    check_family(config, folder)
    return read_tensors(folder)


def check_family(config: HeadConfig, folder: str | Path) -> None:
    """Raises BadInput if a folder, as in `load_head`, holds no head, or one of another family than the config's."""
    family = head_record(folder).family
    if family != config.type:
        raise BadInput(f"head {folder}: is of type {family}, not {config.type}")


def start_vocabulary(config: HeadConfig, target: Target, folder: str | Path) -> list[int] | None:
    """The ascending token ids that a head drafts from which training starts; None if its vocabulary is whole.

    Args and Raises: as in `start_head`.
    """
    ids = start_tensors(config, target, folder)[1]
    return None if ids is None else ids.tolist()
