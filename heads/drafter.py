"""The contract of a drafter: what the engine gives it, and what it gives back. Heads are drafters that are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..configs.errors import BadInput
from .drafting import Draws, Proposal, Tree
from .nn.cache import SlotCache
from .target import TargetOutput


@dataclass
class Reading:
    """What the target read in one forward: Q positions per row, of which the first num_valid hold committed tokens.

    tokens: [B, Q] the token at each position (x_p). next_tokens: [B, Q] the one that follows it (x_{p+1}). output: the
    target's states. start: [B] the first position. num_valid: [B]; what lies beyond was rejected or is padding. 0 in
    rows that had ended. extent: no position of this round, drafts included, lies at or beyond it; 0: not known.
    follows_draft: it is what became of the drafter's last proposal, a chain, so accepted drafts are nothing new to it.
    cache: the target's own, with these positions in it, to be read only.
    """

    tokens: Tensor
    next_tokens: Tensor
    output: TargetOutput
    start: Tensor
    num_valid: Tensor
    extent: int = 0
    follows_draft: bool = False
    cache: SlotCache | None = None

    @property
    def last(self) -> Tensor:
        """[B] index, among the Q, of the last committed position."""
        return (self.num_valid - 1).clamp(min=0)

    def part(self, first: int, end: int) -> "Reading":
        """Positions first..end-1 of the Q; num_valid is 0 in rows that end before."""
        tokens, next_tokens = self.tokens[:, first:end], self.next_tokens[:, first:end]
        output = TargetOutput(self.output.features[:, first:end], self.output.post_norm[:, first:end])
        num_valid = (self.num_valid - first).clamp(0, tokens.shape[1])
        start = self.start + first
        return replace(self, tokens=tokens, next_tokens=next_tokens, output=output, start=start, num_valid=num_valid)

    def again(self, width: int) -> "Reading":
        """Each row's last committed position once more, in the shape of a round that reads `width` positions."""
        last, tail = self.last[:, None], self.output.at(self.last)
        return Reading(
            self.tokens.gather(1, last).repeat(1, width),
            self.next_tokens.gather(1, last).repeat(1, width),
            TargetOutput(tail.features.repeat(1, width, 1, 1), tail.post_norm.repeat(1, width, 1)),
            self.start + self.last,
            torch.ones_like(self.num_valid),
        )


class Drafter:
    """Anything that proposes tokens to the engine. `state` is the drafter's own and opaque to everyone else.

    A round is one `commit`, of what the target has read since the last one, and one `propose` or `propose_tree`.
    Drafting on the device is recorded (CUDA graphs, compiled code): from `commit` to the proposal nothing is read to
    the host, shapes are fixed, and all that `propose` needs was set by the last `commit` or lies in caches written in
    place. A `commit` of what was committed before changes nothing. A drafter that drafts `on_host` is free of this.

    The defaults are of drafters that draft chains on the device, and read nothing of the target but tokens.
    """

    on_host: bool = False  # whether it drafts from texts there: all of a Reading but `output` lies there, of any width
    feature_layers: tuple[int, ...] = ()  # what it reads besides `post_norm`, as `Target.forward` takes it
    max_draft_tokens: int | None = None  # the longest chain, and the deepest tree, that it can draft; None: any
    default_draft_tokens: int = 5  # length of its chains where nothing else is asked; max_draft_tokens comes first
    drafts_trees: bool = False  # whether it can `propose_tree`
    estimates: bool = False  # whether its chains come with estimates of what is accepted: `Proposal.estimates`
    # whether it computes with adapters on the target, which so becomes another model for all drafters
    adapts_target: bool = False

    def begin(self, *, batch_size: int, max_length: int) -> Any:
        """A fresh state for rows of at most max_length tokens, drafts included.

        For continuous batching, which copies rows between states, it is a cache, or a dataclass of caches, tensors,
        lists with an entry per row, and such dataclasses.
        """
        raise NotImplementedError

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        """Forget answers to these prompts, token ids each, where it has them: they are about to be measured on. Also
        those to the same questions in other prompts, which may have had another system prompt."""

    def commit(self, state: Any, read: Reading) -> None:
        """Take in what the target has read since the last call: drafted states are replaced by true ones."""
        raise NotImplementedError

    def commit_prompts(self, state: Any, read: Reading, *, most: int) -> None:
        """`commit` of whole prompts, `most` positions at a time: a mask over all at once would be their length squared.

        The first round behind them reads each prompt's last position again, and sets all but caches anew.
        """
        for first in range(0, read.tokens.shape[1], most):
            self.commit(state, read.part(first, first + most))

    def propose(self, state: Any, *, num_draft_tokens: int) -> Proposal:
        """Draft a chain that follows the last committed token.

        Where tokens are drawn at random, the proposal brings draft_probs, or the text would not be the target's. It may
        bring a confidence, by which the engine verifies fewer of them.
        """
        raise NotImplementedError

    def propose_tree(self, state: Any, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        """Draft a tree that follows the last committed token. draws: at temperature > 0, for trees of sampled nodes."""
        raise BadInput(f"{type(self).__name__} drafts chains, not trees")

    def propose_chain_or_tree(
        self, state: Any, num_draft_tokens: int, tree: Tree | None, *, draws: Draws | None = None
    ) -> Proposal:
        """The tree, or without one a chain of that length."""
        if tree is None:
            return self.propose(state, num_draft_tokens=num_draft_tokens)
        return self.propose_tree(state, tree, draws=draws)
