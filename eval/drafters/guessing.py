"""A head that guesses for a drafter on the host: it reads late what was committed, and drafts a chain. Where steps are
recorded, reading and drafting are one of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.drafting.drafter import Drafter, Reading
from ...heads.drafting.windowed import PART, Windowed
from ...targets.layers.target_output import TargetOutput
from ..decoding.replay import Replay
from .unread import Unread

MOST_READ = 2048  # positions that the head reads at a time


@dataclass(frozen=True)
class Guess:
    """A token and the head's probability of it."""

    token: int
    probability: float


Chain = list[Guess]  # a head's greedy chain


@dataclass
class Guessing:
    """A head, its state, and the positions that it has not read.

    num_tokens: of a chain. Once steps are recorded, replay: runs them; extent: the slots of this round; width: the
    positions that the step reads.
    """

    head: DraftHead
    state: Any
    unread: Unread
    num_tokens: int = 0
    replay: Replay | None = None
    extent: int = 0
    width: int = 0

    def read(self, *, is_asked: bool = False) -> None:
        """Read what was committed since the head read last; behind prompts their last positions again, as
        `Drafter.commit_prompts` asks for.

        Args: is_asked: whether `chains` comes next: each row's last position is left for it.
        """
        from_start = self.unread.is_from_start
        if (read := self.unread.take()) is None:
            return
        if from_start or isinstance(self.head, Windowed):
            self.head.commit_prompts(self.state, read, most=MOST_READ)
        else:  # a head's own way with prompts is for whole ones
            Drafter.commit_prompts(self.head, self.state, read, most=MOST_READ)
        last = replace(read.again(1), num_valid=read.num_valid.clamp(max=1), extent=read.extent)
        if is_asked:
            self.unread.add(last)
        elif from_start:
            self.head.commit(self.state, last)

    def chains(self, num_tokens: int) -> list[Chain]:
        """Each row's chain of num_tokens tokens."""
        self.num_tokens = num_tokens
        most = MOST_READ if self.replay is None else self.width
        if isinstance(self.head, Windowed) and self.head.draft_window is not None:
            most = min(most, PART)
        if self.unread.is_from_start or max(self.unread.lengths) > most:
            self.read(is_asked=True)
        read = self.unread.take()
        assert read is not None
        if self.replay is None:
            self.head.commit(self.state, read)
            guesses = self._drafted()
        else:
            guesses = self._replayed(self.replay, self._in_shape(read))
        rows = zip(*(one.tolist() for one in guesses), strict=True)
        return [[Guess(*pair) for pair in zip(*row, strict=True)] for row in rows]

    def record(self, replay: Replay, *, extent: int, width: int, num_tokens: int) -> None:
        """Have this round's step recorded, if it is not, by reading nothing into slots that are yet to be written."""
        self.replay, self.extent, self.width = replay, extent, width
        self.num_tokens = num_tokens
        if replay.has(self._key):
            return
        target, rows = self.head.target, len(self.unread.first)
        tokens = torch.zeros(rows, width, dtype=torch.long, device=target.device)
        post_norm = torch.zeros(rows, width, target.hidden_size, dtype=target.dtype, device=target.device)
        features = post_norm.new_zeros(rows, width, len(self.head.feature_layers), target.hidden_size)
        start = torch.tensor(self.unread.first, device=target.device).clamp(max=extent - width)
        output = TargetOutput(features, post_norm)
        # tokens as a clone, as compiled code knows aliases
        nothing = Reading(tokens, tokens.clone(), output, start, torch.zeros_like(start), shift=self.unread.shift)
        self._step(*nothing.tensors)  # the head's caches come into being
        self._replayed(replay, nothing)

    @property
    def _key(self) -> tuple[Any, ...]:
        return "guess", self.extent, self.width, self.num_tokens

    def _in_shape(self, read: Reading) -> Reading:
        """A Reading as wide as the step."""
        more, output = self.width - read.tokens.shape[1], read.output
        states = F.pad(output.features, (0, 0, 0, 0, 0, more)), F.pad(output.post_norm, (0, 0, 0, more))
        tokens, next_tokens = (F.pad(one, (0, more)) for one in (read.tokens, read.next_tokens))
        start = read.start.clamp(max=self.extent - self.width)  # of rows that have ended
        return replace(read, tokens=tokens, next_tokens=next_tokens, output=TargetOutput(*states), start=start)

    def _replayed(self, replay: Replay, read: Reading) -> tuple[Tensor, ...]:
        return replay(self._key, self._step, *read.tensors)  # pyright: ignore[reportReturnType]

    def _step(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Commit `Reading.tensors` to the head, and draft."""
        self.head.commit(self.state, Reading.of(tensors, extent=self.extent))
        return self._drafted()

    def _drafted(self) -> tuple[Tensor, Tensor]:
        """[B, K] each: target ids, and the head's probabilities of them."""
        proposal = self.head.propose(self.state, num_draft_tokens=self.num_tokens)
        estimates = proposal.estimates()
        assert estimates is not None, "a greedy chain comes with its logits"
        return proposal.tokens, estimates
