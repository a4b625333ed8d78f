"""Parallel drafting by a head that otherwise drafts token by token, with mask tokens for what is not drafted yet.

The last committed token is followed by mask tokens, one per further draft, each of which sees everything before it. So
one forward gives all drafts, and none depends on another (PARD, An et al. 2025, arXiv 2504.18583; P-EAGLE of the
speculators library and vLLM).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import BadInput
from ..targets.caches.masks import visibility_mask
from ..targets.layers.documents import Documents
from ..targets.target import Target
from .base import HeadConfig
from .loss.chains import ChainStarts, drawn_starts
from .nn.mask_token import mask_token_of

# COD: the share of the chains at a depth that train on the next depth too, and the least share of all chains
DEPTH_SHARE, DEPTH_LEAST = 0.7, 0.2


@dataclass(kw_only=True)
class ParallelConfig(HeadConfig):
    """The keys of families that can draft in one pass."""

    parallel: bool = False  # draft all tokens in one pass, with mask tokens
    mask_token_id: int | None = None  # None: see `default_mask_token`
    chains_per_row: int = 256  # chains that a step of parallel training draws per row

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(0, "mask_token_id")
        self.check_least(1, "chains_per_row")
        if self.parallel and self.num_depths == 1:
            raise BadInput("num_depths 1: parallel drafting needs 2 or more, or no mask token would ever be read")

    def mask_token(self, target: Target) -> int | None:
        """The mask token's id; None without `parallel`. Raises BadInput if the target has no such token."""
        return mask_token_of(target, self.mask_token_id) if self.parallel else None

    def drawn(self, starts: ChainStarts) -> ChainStarts:
        """The chains that a step trains on: if `parallel`, chains_per_row per row, fewer at greater depths (COD)."""
        if not self.parallel:
            return starts
        starts = drawn_starts(starts, most=self.chains_per_row)
        depths = torch.arange(starts.num_depths, device=starts.positions.device)
        shares = (DEPTH_SHARE**depths).clamp(min=DEPTH_LEAST)  # [K]
        drawn = torch.rand(starts.positions.shape, device=depths.device)  # [B, S]
        return ChainStarts(starts.positions, starts.valid & (drawn[..., None] < shares), has_gaps=True)


def with_masks_behind(tokens: Tensor, num_read: Tensor, *, num_more: int, mask_token: int) -> tuple[Tensor, Tensor]:
    """The first num_read [B] of tokens [B, Q], and mask tokens in place of the others and num_more behind them.

    Returns: ids [B, Q + num_more], and which of them are no mask tokens.
    """
    is_read = torch.arange(tokens.shape[1] + num_more, device=tokens.device) < num_read[:, None]
    return torch.where(is_read, F.pad(tokens, (0, num_more)), mask_token), is_read


def last_and_behind(hidden: Tensor, last: Tensor, num: int) -> Tensor:
    """[B, num, D] the states [B, Q, D] at indices last, ..., last + num - 1, last [B]."""
    index = last[:, None] + torch.arange(num, device=last.device)  # [B, num]
    return hidden[torch.arange(len(hidden), device=last.device)[:, None], index]


@dataclass
class MaskedChains(Documents):
    """Rows of T tokens followed by M mask tokens of chains. A mask token sees the text up to the token that its chain
    follows, and the chain's mask tokens up to itself. ids: 0 for text, 1 + its chain for a mask token."""

    rows: Tensor  # [B, T + M] index of the last token of the text that each token sees

    def mask(self, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """The mask as `Documents.mask` makes it."""
        index = torch.arange(self.rows.shape[1], device=self.rows.device)
        mask = visibility_mask(self.rows, extent=len(index), dtype=dtype)  # [B, 1, T + M, T + M]
        is_own = (self.ids[:, :, None] == self.ids[:, None]) & (self.ids[:, None] > 0)
        is_own &= index[:, None] >= index
        mask = mask.masked_fill_(is_own[:, None], 0.0)
        if window is None:
            return mask
        hidden = self.positions[:, :, None] - self.positions[:, None] >= window  # [B, T + M, T + M]
        return mask.masked_fill_(hidden[:, None], torch.finfo(dtype).min)


def with_masks(input_ids: Tensor, starts: ChainStarts, *, mask_token: int) -> tuple[Tensor, MaskedChains, Tensor]:
    """Rows [B, T] followed by a mask token for each supervised depth of each chain except its first.

    Returns: ids [B, T + M]; their visibility; and [B, S, K] the index whose state drafts each depth.
    """
    num_rows, length = input_ids.shape
    index = torch.arange(length, device=input_ids.device).expand(num_rows, -1)  # [B, T]
    read = starts.positions + 1  # [B, S] the token that a chain follows
    needed = starts.valid[..., 1:].flatten(1)  # [B, S * (K - 1)]
    num_masks, more = int(needed.sum(1).max()), starts.num_depths - 1
    order = torch.argsort(~needed, dim=1, stable=True)[:, :num_masks]  # [B, M] needed ones first
    chain, depth = order // max(more, 1), order % max(more, 1) + 1
    row = read.gather(1, chain).clamp(max=length - 1)
    ids = torch.cat([input_ids, torch.full_like(order, mask_token)], 1)
    apart = MaskedChains(
        ids=torch.cat([torch.zeros_like(index), 1 + chain], 1),
        positions=torch.cat([index, row + depth], 1),
        rows=torch.cat([index, row], 1),
    )
    where = torch.zeros_like(needed, dtype=torch.long)
    where = where.scatter_(1, order, length + torch.arange(num_masks, device=order.device).expand_as(order))
    where = torch.cat([read.clamp(max=length - 1)[..., None], where.view(*read.shape, more)], -1)
    return ids, apart, where
