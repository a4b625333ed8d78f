"""A folder to import, what its family makes of it, and functions that several families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ...configs.typed import TypedKeys
from ..export.tensor_files import TensorFiles
from ..target import Target

Tensors = dict[str, Tensor]


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
        return {name: self.stored.read(name) for name in self.stored.files}

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
