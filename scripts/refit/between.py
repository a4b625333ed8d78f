"""Heads between the old one and the trained one: how far to go is chosen on validation rows.

What a head learns on new rows costs it something on old ones. Weights between the two lose less of the old than they
give up of the new (interpolated weights: Wortsman 2022, WiSE-FT, arXiv 2109.01903).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ...heads.base import DraftHead
from ...heads.folder import config_of, read_record, read_tensors, save_head
from ...heads.registry import head_class, start_head
from ...heads.target import Target
from .data import LEAST_HELD_OUT, NEW, OLD, Keyed
from .journal import Share
from .reading import Reading

SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the way from the old head's weights to the trained ones
KEPT = 0.995  # smallest ratio on old validation rows: a few rows alone cannot tell 1 % from nothing


@torch.no_grad()
def head_between(old: str, trained: str, target: Target, share: float) -> DraftHead:
    """A head in fp32 whose weights are `share` of the way from the old head's to the trained one's.

    Args: old: any head folder or hub id. trained: a folder that `headstart train` wrote; it drafts what the old one
        does, or more (`start_head`).
    """
    record, (tensors, ids) = read_record(trained), read_tensors(trained)
    config = config_of(record, head_class(record.family).config_class)
    head = start_head(config, target, old, draft_token_ids=ids)
    for name, value in head.state_dict().items():
        value.lerp_(tensors[name].to(value), share)
    return head


def write_between(old: str, trained: str, target: Target, share: float, folder: Path) -> Path:
    """Writes `head_between` as a head folder, with how the trained one was trained and `share`; returns the folder."""
    training = {**(read_record(trained).training or {}), "share": share}
    return save_head(head_between(old, trained, target, share), folder, training=training)


def ready(head: DraftHead, target: Target) -> DraftHead:
    """The head as `load_head` returns heads: in the target's dtype and on its device, by the kernels of the machine."""
    head = head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    head.pack()
    return head


def share_of(share: float, rows: Keyed, readings: Iterable[Reading]) -> Share:
    """The journal's entry for a head that read the validation rows."""
    read = {reading.key: reading for reading in readings}

    def length(side: str) -> float | None:
        found = [read[key] for key in rows if key.startswith(side) and key in read]
        rounds = sum(each.rounds for each in found)
        return round(sum(each.committed for each in found) / rounds, 4) if rounds else None

    return Share(share, length(NEW), length(OLD))


def is_enough(rows: Keyed, *, has_old: bool) -> bool:
    """Whether there are enough validation rows of each side to choose by."""
    sides = (NEW, OLD) if has_old else (NEW,)
    return all(sum(key.startswith(side) for key in rows) >= LEAST_HELD_OUT for side in sides)


def best_share(shares: Sequence[Share]) -> float:
    """The share with the longest acceptance on new rows among those that keep what the old head has on old rows.

    Args: shares: of 0, the old head, and of all SHARES.
    Returns the smallest share if none keeps it.
    """
    before = next(each for each in shares if each.share == 0)
    others = [each for each in shares if each.share > 0 and each.new is not None]
    kept = [each for each in others if before.old is None or (each.old or 0.0) >= KEPT * before.old]
    if not kept:
        return min(SHARES)
    return max(kept, key=lambda each: each.new or 0.0).share
