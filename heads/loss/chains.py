"""Where draft chains start on given rows, which of their depths are supervised, the losses' denominators and sums."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..nn.sight import Block, behind_window, blocks_of
from .chunked import ChunkPlan, plan_gaps, plan_rows


@dataclass
class ChainStarts:
    """The draft chains of a batch, row by row, padded to the row with the most; shapes as in base.py."""

    positions: Tensor  # [B, S] start t of each chain
    valid: Tensor  # [B, S, K] whether depth k of the chain is supervised
    widths: Tensor | None = None  # [B, S] number of tokens that each chain drafts, for block drafters; None: all K
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
        widths = None if self.widths is None else self.widths[:, taken]
        return ChainStarts(self.positions[:, taken], valid, widths, has_gaps=True)

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


def drawn_starts(starts: ChainStarts, *, most: int, narrow_share: float = 0.0) -> ChainStarts:
    """`most` chains of each row (all, if it has fewer), sampled without replacement by torch's generator, in order.

    Args: narrow_share: share of the chains that draft, and are supervised on, only 1 to K tokens, drawn uniformly.
    """
    is_start, num_depths = starts.valid[..., 0], starts.num_depths  # [B, S]
    if most >= is_start.shape[1] and narrow_share == 0:
        return starts
    order = torch.rand(is_start.shape, device=is_start.device).masked_fill(~is_start, 2.0)
    drawn = order.topk(min(most, order.shape[1]), largest=False).indices.sort(1).values  # [B, most]
    positions, valid = starts.positions.gather(1, drawn), starts.valid[torch.arange(len(drawn))[:, None], drawn]
    if narrow_share == 0:
        return ChainStarts(positions, valid, has_gaps=True)
    narrow = torch.rand(drawn.shape, device=drawn.device) < narrow_share
    widths = torch.randint(1, num_depths + 1, drawn.shape, device=drawn.device)
    widths = torch.where(narrow, widths, num_depths)
    valid = valid & (torch.arange(num_depths, device=drawn.device) < widths[..., None])
    return ChainStarts(positions, valid, widths, has_gaps=True)


def expected_share(probs: Tensor, valid: Tensor, *, smoothing: float) -> Tensor:
    """[K, N] each depth's share in the expected number of accepted drafts (D-PACE, arXiv 2605.18810).

    With q_k the draft's probability of the data's token and p_k the product of (1 - smoothing) q_j + smoothing over
    j <= k, it is the sum of p_j over j >= k. Without smoothing, cross entropies with these weights have the gradient of
    -sum_k p_k.

    Args: probs: [K, N] q. valid: [K, N] the depths that are supervised, without gaps.
    """
    reached = ((1 - smoothing) * probs + smoothing).cumprod(0) * valid
    return reached.flip(0).cumsum(0).flip(0)
