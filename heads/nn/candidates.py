"""Choosing a block's drafts among the most probable tokens of each slot, each behind the one before it."""

from dataclasses import dataclass, fields, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, nn

NEVER = float("-inf")  # the logit of tokens that are not among the candidates


@dataclass(frozen=True)
class SlotCandidates:
    """The tokens that slots choose from; a subclass has what scores them."""

    ids: Tensor  # [B, K, top_k] draft ids, the most probable first

    def at(self, depth: int) -> Self:
        """The part of a slot, [B, 1, ...]."""
        return replace(self, **{one.name: getattr(self, one.name)[:, depth : depth + 1] for one in fields(self)})

    def scores(self, previous: Tensor) -> Tensor:
        """[B, F, top_k] the logits of one slot's candidates behind tokens, as `Chooser.previous` has them of [B, F]."""
        raise NotImplementedError


Held = TypeVar("Held", bound=SlotCandidates)


class Chooser(nn.Module, Generic[Held]):
    """What scores the candidates of a slot behind the token before it."""

    def __init__(self, *, top_k: int):
        """Args: top_k: candidates of a slot."""
        super().__init__()
        self.top_k = top_k

    def previous(self, tokens: Tensor) -> Tensor:
        """What `scores` reads of the target ids [...] before a slot."""
        raise NotImplementedError

    def best(self, hidden: Tensor, logits: Tensor, *, anchors: Tensor, context: Tensor) -> Held:
        """The candidates of blocks.

        Args: hidden: [B, K, D] the slots' states. logits: [B, K, Vd] theirs. anchors: [B] target ids before the first
        slot. context: [B, D] the target's fused features where it has read last.
        """
        raise NotImplementedError

    def chain(self, candidates: Held, anchors: Tensor, to_target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Greedy chains.

        Args: anchors: [B] tokens before them. to_target: [Vd] of draft ids; None: the same.
        Returns target ids [B, K], and the logits [B, K, top_k] by which they were chosen.
        """
        tokens = [anchors]
        scores: list[Tensor] = []  # not list[Tensor](), which torch.compile does not trace
        for depth in range(candidates.ids.shape[1]):
            slot = candidates.at(depth)
            scores.append(slot.scores(self.previous(tokens[-1][:, None])))  # [B, 1, top_k]
            chosen = slot.ids.gather(-1, scores[-1].argmax(-1, keepdim=True))[:, 0, 0]
            tokens.append(chosen if to_target is None else to_target[chosen])
        return torch.stack(tokens[1:], 1), torch.cat(scores, 1)


def only(scores: Tensor, ids: Tensor, num_drafted: int) -> Tensor:
    """[..., Vd] the logits that candidates [..., k] are drafted with; all others are never drafted."""
    return scores.new_full((*scores.shape[:-1], num_drafted), NEVER).scatter(-1, ids.expand(scores.shape), scores)
