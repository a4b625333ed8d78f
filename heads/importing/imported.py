"""The result of an import, and functions that several importers share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ...configs.typed import TypedKeys
from ..base import HeadConfig
from ..export.record import PROVENANCE, HeadRecord
from ..folder import config_of
from ..target import Target

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Imported:
    """A head of any layout, converted to ours."""

    config: HeadConfig
    tensors: Tensors  # by our names
    draft_token_ids: Tensor | None = None  # [Vd] if its draft vocabulary is cut


def provenance(config: Mapping[str, Any]) -> HeadRecord | None:
    """The record that our export wrote to config.json; None if there is none."""
    return HeadRecord.from_json(config[PROVENANCE]) if config.get(PROVENANCE) else None


def own_config(config: TypedKeys, *, plain: type[HeadConfig]) -> HeadConfig | None:
    """The head's config if our export recorded it, else None. `plain`: the config class of the expected family.

    Raises: BadInput if the record is damaged, or as `config_of`.
    """
    record = provenance(config.values)
    return None if record is None else config_of(record, plain, key=PROVENANCE)


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


def without_tables(tensors: Tensors, *, keep_output: bool) -> Tensors:
    """The tensors without copies of the target's tables, which `check_tables` compares, and without computed ones."""
    tables = ("embed_tokens.weight",) if keep_output else ("embed_tokens.weight", "lm_head.weight")
    return {n: value for n, value in tensors.items() if n not in tables and not n.endswith("rotary_emb.inv_freq")}
