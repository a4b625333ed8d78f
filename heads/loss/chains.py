"""Where draft chains start on given rows, which of their depths are supervised, the losses' denominators and sums."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .chunked import ChunkPlan, plan_gaps, plan_rows
from .sight import Block, behind_window, blocks_of


@dataclass
class ChainStarts:
    """The draft chains of a batch, row by row, padded to the row with the most; shapes as in base.py."""

    positions: Tensor  # [B, S] start t of each chain
    valid: Tensor  # [B, S, K] whether depth k of the chain is supervised
    has_gaps: bool = False  # whether some chains, or the last depths of some, were left out by sampling

    def take(self, values: Tensor, *, offset: int = 0) -> Tensor:
        """[B, S, ...] the values [B, T, ...] at position t + offset of each chain, clamped to the last position."""
        index = (self.positions + offset).clamp(max=values.shape[1] - 1)
        rows = torch.arange(len(values), device=values.device)[:, None]  # [B, 1]
        return values[rows, index]

    @property
    def num_depths(self) -> int:
        """K, the number of drafts per chain."""
        return self.valid.shape[-1]

    @cached_property
    def blocks(self) -> list[Block]:
        """Blocks of queries for the chains' attention; unsupervised starts are padding and see position 0 only."""
        last = torch.where(self.valid[..., 0], self.positions, 0).amax(0)  # [S]
        return blocks_of(last.tolist(), last.device)

    def blocks_within(self, window: int | None) -> list[Block]:
        """`blocks`, without the keys that a sliding window of so many tokens hides from all chains of a block."""
        if window is None:
            return self.blocks
        oldest = torch.where(self.valid[..., 0], self.positions, self.positions.amax()).amin(0)  # [S]
        return behind_window(self.blocks, oldest.tolist(), window)

    def part(self, index: int, num: int) -> "ChainStarts":
        """The chains of one of `num` processes that learn these between them.

        Of 2 * num runs of neighbouring chains it has one from the front and one from the back: later chains see more
        keys, and neighbours share most of the positions that the target scores. Every supervised depth is in one part.

        Args: index: of the process, from 0.
        """
        if num == 1:
            return self
        size = self.positions.shape[1]
        order = torch.arange(size, device=self.positions.device).tensor_split(2 * num)
        taken = torch.cat([order[index], order[-1 - index]])
        is_empty = len(taken) == 0  # fewer chains than processes: one that teaches nothing
        taken = order[0].new_zeros(1) if is_empty else taken
        valid = self.valid[:, taken] & (not is_empty)
        return ChainStarts(self.positions[:, taken], valid, has_gaps=True)

    def plan(self, num_positions: int, *, size: int) -> ChunkPlan:
        """The order in which the loss scores rows of num_positions tokens, `size` positions at a time.

        Depth k of the chain that starts at t is scored at position t + 1 + k. Rows are flattened: chain s of row b is
        chain b * S + s, and position p is b * T + p.
        """
        num_rows, num_starts, num_depths = self.valid.shape
        rows = torch.arange(num_rows, device=self.positions.device)[:, None]
        index = torch.zeros(num_rows, num_positions, dtype=torch.long, device=self.positions.device)
        chain = rows * num_starts + torch.arange(num_starts, device=rows.device)  # [B, S]
        index = index.scatter_(1, self.positions, chain)  # [B, T] the chain that starts at each position
        is_scored = torch.zeros(num_rows, num_positions, num_depths, dtype=torch.bool, device=rows.device)
        is_scored[rows, self.positions] = self.valid
        chains = torch.stack([index.roll(depth + 1, 1) for depth in range(num_depths)])  # [K, B, T]
        scored = torch.stack([is_scored[..., depth].roll(depth + 1, 1) for depth in range(num_depths)])
        plan = plan_gaps if self.has_gaps else plan_rows
        return plan(chains.flatten(1), scored.flatten(1), size=size)

    def counts(self, weights: Tensor | None = None) -> Tensor:
        """[K] the denominator of the loss at each depth: its supervised chains, or the sum of their labels' weights.

        Args: weights: [B, T] weight of each token as a label; None: all 1.
        """
        if weights is None:
            return self.valid.sum((0, 1)).float()
        labels = [self.take(weights, offset=depth + 2) for depth in range(self.num_depths)]
        return (torch.stack(labels, -1) * self.valid).sum((0, 1)).float()


@dataclass
class LossOutput:
    """The loss of a batch, with sums and counts by depth."""

    loss: Tensor  # scalar
    depth_loss: Tensor  # [K] summed over this batch
    depth_count: Tensor  # [K] `ChainStarts.counts` of this batch
    starts: ChainStarts
    hits: Tensor  # [B, S, K] bool, whether the teacher-forced greedy draft is the data's token; False where not valid


def mean_of(sums: Tensor, counts: Tensor) -> Tensor:
    """sums / counts; 0 where the count is 0, as the sum is then 0 too."""
    return sums / torch.where(counts > 0, counts, 1.0)


def chain_starts(loss_mask: Tensor, num_depths: int) -> ChainStarts:
    """The chains that decoding could run on these rows.

    Depth k of the chain that starts at t is supervised iff x_{t+1}, ..., x_{t+2+k} all are. x_{t+1} is the token that
    the target itself produced, so the first chain of an answer starts at the last position of its prompt.

    Args: loss_mask: [B, T] bool, True on supervised tokens.
    """
    num_rows, num_positions = loss_mask.shape
    ends = torch.arange(num_positions, device=loss_mask.device).expand_as(loss_mask)
    stops = torch.where(loss_mask, num_positions, ends)  # [B, T] first unsupervised position at or after each ...
    stops = stops.flip(1).cummin(1).values.flip(1)
    run = torch.zeros_like(stops)  # [B, T] number of consecutive supervised tokens from t + 1 on
    run[:, :-1] = stops[:, 1:] - ends[:, 1:]
    is_start = run >= 2
    num_starts = max(1, int(is_start.sum(1).max()))
    positions = torch.argsort(~is_start, dim=1, stable=True)[:, :num_starts]  # [B, S] starts first, in order
    depths = torch.arange(num_depths, device=loss_mask.device)
    valid = run.gather(1, positions)[..., None] >= depths + 2  # [B, S, K]
    return ChainStarts(positions, valid)


def drawn_starts(starts: ChainStarts, *, most: int) -> ChainStarts:
    """`most` chains of each row (all, if it has fewer), sampled without replacement by torch's generator, in order."""
    is_start = starts.valid[..., 0]  # [B, S]
    if most >= is_start.shape[1]:
        return starts
    order = torch.rand(is_start.shape, device=is_start.device).masked_fill(~is_start, 2.0)
    drawn = order.topk(most, largest=False).indices.sort(1).values  # [B, most]
    valid = starts.valid[torch.arange(len(drawn))[:, None], drawn]
    return ChainStarts(starts.positions.gather(1, drawn), valid, has_gaps=True)
