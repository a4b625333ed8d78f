"""The choice of the mask token, whose embedding stands for tokens that are not drafted yet."""

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...targets.target import Target

ROWS = 8192  # of the table, that are measured at a time
PLAIN = (0.2, 5.0)  # acceptable norms of an embedding, relative to the median norm


def mask_token_of(target: Target, chosen: int | None) -> int:
    """The mask token's id: the chosen one, else the default. Raises BadInput if the target has no such token."""
    token = default_mask_token(target) if chosen is None else chosen
    if token >= target.vocab_size:
        raise BadInput(f"head.mask_token_id {token}: the target has {target.vocab_size} tokens")
    return token


def default_mask_token(target: Target) -> int:
    """The id of the first token with an embedding of ordinary size (PLAIN) among: the tokenizer's mask token, ids that
    the tokenizer does not use, padding, end of text, all others."""
    weight = cast(Tensor, target.input_embedding.weight)  # [V, D]
    if weight.device.type == "meta":
        return 0  # only shapes matter there
    unused = range(0)
    candidates: list[int | None] = []
    if "/" in target.name or Path(target.name).is_dir():
        with suppress(BadInput):  # a folder without a tokenizer
            tokenizer: Any = target.tokenizer
            candidates, unused = [tokenizer.mask_token_id], range(len(tokenizer), target.vocab_size)
    candidates += [*unused, getattr(target.config, "pad_token_id", None), *sorted(target.eos_token_ids)]
    norms = torch.cat([rows.float().norm(dim=-1) for rows in weight.detach().split(ROWS)])
    least, most = (share * norms.median() for share in PLAIN)
    is_plain = ((norms > least) & (norms < most)).tolist()
    usable = (i for i in [*candidates, *range(target.vocab_size)] if i is not None and 0 <= i < target.vocab_size)
    return next(i for i in usable if is_plain[i])
