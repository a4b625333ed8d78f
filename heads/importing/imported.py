"""A head of any layout in our terms, and what several layouts have in common."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ..base import HeadConfig
from ..export.folder import PROVENANCE
from ..folder import HeadRecord
from ..target import Target

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Imported:
    """A head of any layout in our terms."""

    config: HeadConfig
    tensors: Tensors  # by our names
    draft_token_ids: Tensor | None = None  # [Vd], where it drafts a cut vocabulary


def provenance(config: dict[str, Any]) -> HeadRecord | None:
    """The record of the head that our export left in config.json; None where others wrote it."""
    return HeadRecord.from_json(config[PROVENANCE]) if config.get(PROVENANCE) else None


def own_config(config: dict[str, Any], *, plain: type[HeadConfig]) -> HeadConfig | None:
    """The head's config where our export recorded it, else None. `plain`: the config class of the expected family."""
    record = provenance(config)
    if record is None:
        return None
    unknown = sorted(record.head.keys() - {f.name for f in fields(plain)})
    if unknown:
        raise BadInput(f"config keys of another version of Headstart: {unknown}")
    return plain(**record.head)


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


def bare(name: str) -> str:
    return name.removeprefix("model.")


def without_tables(tensors: Tensors, *, keep_output: bool) -> Tensors:
    """Without the target's own tables, which `check_tables` holds against it, and what is computed."""
    tables = ("embed_tokens.weight",) if keep_output else ("embed_tokens.weight", "lm_head.weight")
    return {n: value for n, value in tensors.items() if n not in tables and not n.endswith("rotary_emb.inv_freq")}
