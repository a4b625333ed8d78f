"""The contract of a drafter: what the engine gives it, and what it gives back. Heads are drafters that are trained."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from .drafting import Proposal
from .nn.cache import SlotCache
from .target import TargetOutput


@dataclass
class Reading:
    """What the target read in one forward: Q positions per row, of which the first num_valid hold committed tokens.

    tokens: [B, Q] the token at each position (x_p). next_tokens: [B, Q] the one that follows it (x_{p+1}). output: the
    target's states. start: [B] the first position. num_valid: [B]; what lies beyond was rejected or is padding. 0 in
    rows that had ended. extent: no position of this round, drafts included, lies at or beyond it; 0: not known.
    follows_draft: it is what became of the drafter's last proposal, a chain, so accepted drafts are nothing new to it.
    cache: the target's own, with these positions in it, to be read only; None for drafters on the host.
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


class Drafter(Protocol):
    """Anything that proposes tokens to the engine. `state` is the drafter's own and opaque to everyone else.

    Drafting on the device is recorded (CUDA graphs, compiled code): from `commit` to the proposal nothing is read to
    the host, shapes are fixed, and all that `propose` needs was set by the last `commit` or lies in caches written in
    place. A `commit` of what was committed before changes nothing. A drafter that drafts `on_host` is free of this.
    """

    @property
    def on_host(self) -> bool:
        """Whether it drafts from texts on the host."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """What it reads of the target besides `post_norm`."""
        ...

    @property
    def max_draft_tokens(self) -> int | None:
        """The longest chain it can draft; None: any."""
        ...

    def begin(self, *, batch_size: int, max_length: int) -> Any:
        """A fresh state for rows of at most max_length tokens, drafts included."""
        ...

    def commit(self, state: Any, read: "Reading") -> None:
        """Take in what the target has read since the last call: drafted states are replaced by true ones."""
        ...

    def propose(self, state: Any, *, num_draft_tokens: int) -> Proposal:
        """Draft a greedy chain that follows the last committed token."""
        ...
