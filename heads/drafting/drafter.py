"""The contract between the engine and a drafter. Heads are drafters that are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...targets.layers.target_output import TargetOutput
from .trees import Draws, Proposal, Tree


@dataclass
class Reading:
    """What the target read in one forward: Q positions per row, of which the first num_valid hold committed tokens.

    tokens: [B, Q] the token at each position (x_p). next_tokens: [B, Q] the one that follows it (x_{p+1}). output: the
    target's states. start: [B] the first position. num_valid: [B] valid positions, 0 in rows that had ended; the rest
    were rejected or are padding. extent: all positions of this round, drafts included, are below it; 0: not known.
    follows_draft: these positions verify the drafter's last proposal, a chain, so it has seen the accepted tokens.
    shift: of the target's cache, see `SlotCache`.
    """

    tokens: Tensor
    next_tokens: Tensor
    output: TargetOutput
    start: Tensor
    num_valid: Tensor
    extent: int = 0
    follows_draft: bool = False
    shift: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """[B, Q]."""
        return self.start[:, None] + torch.arange(self.tokens.shape[1], device=self.start.device)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What recorded steps take in place of a Reading; `of` makes it one again."""
        states = self.output.features, self.output.post_norm
        return self.tokens, self.next_tokens, *states, self.start, self.num_valid, self.shift

    @classmethod
    def of(cls, tensors: Sequence[Any], *, extent: int, follows_draft: bool = False) -> "Reading":
        """A Reading of these `tensors`."""
        tokens, next_tokens, features, post_norm, start, num_valid, shift = tensors
        output = TargetOutput(features, post_norm)
        return cls(tokens, next_tokens, output, start, num_valid, extent, follows_draft, shift)

    @property
    def last(self) -> Tensor:
        """[B] index, among the Q, of the last committed position."""
        return (self.num_valid - 1).clamp(min=0)

    def part(self, first: int, end: int) -> "Reading":
        """Positions first..end-1 of the Q; num_valid is 0 in rows without a valid position there."""
        tokens, next_tokens = self.tokens[:, first:end], self.next_tokens[:, first:end]
        output = TargetOutput(self.output.features[:, first:end], self.output.post_norm[:, first:end])
        num_valid = (self.num_valid - first).clamp(0, tokens.shape[1])
        start = self.start + first
        return replace(self, tokens=tokens, next_tokens=next_tokens, output=output, start=start, num_valid=num_valid)

    def part_or_last(self, first: int, end: int) -> "Reading":
        """`part`, but of rows that end before it their last position again: no row has more than its width behind."""
        offset = self.last.clamp(max=first)  # [B]
        index = offset[:, None] + torch.arange(end - first, device=offset.device)
        rows, num_valid = torch.arange(len(index), device=index.device)[:, None], self.num_valid - offset
        states = self.output.features, self.output.post_norm
        here = [one[rows, index] for one in (self.tokens, self.next_tokens, *states)]
        behind = self.start + offset, num_valid.clamp(0, end - first), self.shift
        return Reading.of([*here, *behind], extent=self.extent)

    def again(self, width: int) -> "Reading":
        """Each row's last committed position repeated `width` times, num_valid 1: the shape of a round that wide."""
        last, tail = self.last[:, None], self.output.at(self.last)
        return Reading(
            self.tokens.gather(1, last).repeat(1, width),
            self.next_tokens.gather(1, last).repeat(1, width),
            TargetOutput(tail.features.repeat(1, width, 1, 1), tail.post_norm.repeat(1, width, 1)),
            self.start + self.last,
            torch.ones_like(self.num_valid),
            shift=self.shift,
        )


class Drafter:
    """Anything that proposes tokens to the engine. `state` is the drafter's own and opaque to everyone else.

    A round is one `commit`, of what the target has read since the last one, and one `propose` or `propose_tree`.
    Drafting on the device is recorded (CUDA graphs, compiled code), so from `commit` to the proposal nothing may be
    copied to the host, shapes are fixed, and `propose` may read only what the last `commit` set and caches that are
    written in place. `commit` is idempotent. None of this applies to a drafter that drafts `on_host`.

    The defaults are those of a drafter that drafts chains on the device and reads only the target's tokens.
    """

    on_host: bool = False  # whether it drafts on the CPU: its Readings are there, except `output`, and of any width
    feature_layers: tuple[int, ...] = ()  # target features that it reads, as `Target.forward` takes them
    max_draft_tokens: int | None = None  # the longest chain, and the deepest tree, that it can draft; None: any
    default_draft_tokens: int = 5  # chain length if none is requested, of a drafter without max_draft_tokens
    drafts_trees: bool = False  # whether it can `propose_tree`
    estimates: bool = False  # whether its chains come with estimates of acceptance: `Proposal.estimates`
    adapts_target: bool = False  # whether it puts adapters on the target, which changes the model for all drafters

    def begin(self, *, batch_size: int, max_length: int) -> Any:
        """A fresh state for rows of at most max_length tokens, drafts included."""
        raise NotImplementedError

    def restart(self, state: Any, *, batch_size: int, max_length: int) -> Any:
        """A state for other texts, in place of this one. It keeps what recorded steps use, see `rehearse`."""
        return self.begin(batch_size=batch_size, max_length=max_length)

    def rehearse(self, state: Any, replay: Any, *, extent: int, depth: int) -> None:
        """Before a round of a drafter on the host, if steps are recorded: record those that it runs on the device.

        Args: replay: records and runs steps, of eval/decoding. extent: as in `Reading`. depth: K.
        """

    def leave_out(self, prompts: Sequence[Sequence[int]], questions: Sequence[str] = ()) -> None:
        """Drop stored answers to these prompts (token ids), which are about to be measured, and to these questions
        wherever they were asked, as with another system prompt. Only drafters that store answers do anything."""

    def commit(self, state: Any, read: Reading) -> None:
        """Update the state with what the target has read since the last call, replacing drafted states by true ones."""
        raise NotImplementedError

    def commit_prompts(self, state: Any, read: Reading, *, most: int) -> None:
        """`commit` whole prompts, `most` positions at a time, since a mask over all is quadratic in their length.

        The first round afterwards reads each prompt's last position again, which resets all state except caches.
        """
        for first in range(0, read.tokens.shape[1], most):
            self.commit(state, read.part(first, first + most))

    def propose(self, state: Any, *, num_draft_tokens: int) -> Proposal:
        """Draft a chain that follows the last committed token.

        If tokens are sampled, the proposal must have draft_probs, or verification would not be lossless. With a
        confidence, the engine may verify fewer of them.
        """
        raise NotImplementedError

    def propose_tree(self, state: Any, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        """Draft a tree that follows the last committed token. draws: how a sampled chain is drawn, at temperature > 0.

        Raises: BadInput if the drafter drafts chains only.
        """
        raise BadInput(f"{type(self).__name__} drafts chains, not trees")

    def propose_chain_or_tree(
        self, state: Any, num_draft_tokens: int, tree: Tree | None, *, draws: Draws | None = None
    ) -> Proposal:
        """Draft the tree or, if it is None, a chain of num_draft_tokens."""
        if tree is None:
            return self.propose(state, num_draft_tokens=num_draft_tokens)
        return self.propose_tree(state, tree, draws=draws)
