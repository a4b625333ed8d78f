"""Accept rules: which drafted tokens are committed. Pure functions, in fp32, on the device, without copies to the host.

A rule is lossless: the tokens it commits are distributed as the target's own samples. To add a rule, write a function
from `Candidates` to `AcceptedPath` and give it a line in ACCEPT_RULES; the tests hold every rule of that table to this.

A tree of S drafted nodes: parents [B, S] hold the index of each node's parent, -1 for the root, which is the last
committed token; parents precede their children, and siblings are distinct tokens. In tensors per position,
[B, S + 1, ...], index 0 is the root and node j has index j + 1. depth: nodes on the longest path. A chain is a tree
with parents -1, 0, 1, ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...targets.caches.tree_nodes import agreeing_paths
from .sampling import Sampling, choose_tokens, random_keys, sample, target_probs


@dataclass
class AcceptedPath:
    """The accepted part of a drafted tree. num_accepted: [B].

    path: [B, depth] the accepted node at each depth, 0..S-1; beyond num_accepted any valid index. bonus: [B] the token
    to commit after the accepted ones."""

    num_accepted: Tensor
    path: Tensor
    bonus: Tensor

    def committed(self, tokens: Tensor) -> Tensor:
        """[B, depth + 1] the accepted tokens, then the bonus, from `tokens`: the last committed one and the path's."""
        return tokens.roll(-1, 1).scatter(1, self.num_accepted[:, None], self.bonus[:, None])


class Candidates(NamedTuple):
    """The input of an accept rule: drafted tokens and the target's logits on them.

    tokens, parents: [B, S]. logits: [B, S + 1, V] at the root and each node, computed on demand; read_best: computes
    their argmax if `chosen` needs no more. draft_probs: [B, K, V], as in `Proposal`; None: the tokens were not sampled.
    keys: [B, S + 1], as in `choose_tokens`. generator: the source of what a rule draws besides the target's choice.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    is_chain: bool
    read_logits: Callable[[], Tensor]
    read_best: Callable[[], Tensor] | None
    draft_probs: Tensor | None
    sampling: Sampling
    keys: Tensor | None = None
    generator: torch.Generator | None = None
    offered: Tensor | None = None  # [B] for a chain, how many of its tokens are verified; None: all

    @property
    def logits(self) -> Tensor:
        return self.read_logits()

    def target_probs(self) -> Tensor:
        """[B, S + 1, V] the target's distribution of the next token at the root and each node."""
        return target_probs(self.logits, self.sampling)

    def chosen(self) -> Tensor:
        """[B, S + 1] the target's own next token at the root and each node."""
        if self.read_best is not None:
            return self.read_best()
        return choose_tokens(self.logits, self.sampling, keys=self.keys)


# Deterministic drafts


def accept_chain(chosen: Tensor, drafted: Tensor) -> Tensor:
    """How many tokens of a drafted chain are accepted: those before the first that differs from the target's choice.
    Lossless for greedy drafts at any temperature: the target's own choice given the accepted prefix is emitted at every
    position, whether the draft guessed it or not; it depends on no draft, so it is the baseline's. A drafted token x is
    accepted with probability target_probs[x], the most that a deterministic draft allows (Leviathan et al. 2023 with a
    one-hot draft distribution).

    Args:
        chosen: [B, K + 1] the target's own next token after the last committed token and after each drafted one.
        drafted: [B, K].

    Returns: [B] number of accepted tokens a, 0..K. chosen[:, : a + 1] are the tokens to commit, bonus token last.
    """
    return (chosen[:, : drafted.shape[1]] == drafted).cumprod(1).sum(1)


def accept_tree(chosen: Tensor, drafted: Tensor, parents: Tensor, *, depth: int) -> AcceptedPath:
    """Walk down from the root while a child equals the target's own choice; the choice at the last node is the bonus.

    Lossless for deterministic children (top-k of the draft, n-grams) at any temperature: what is committed at each node
    is the target's own choice there. In distribution this equals SpecInfer's and EAGLE-2's loop with draft probability
    1: accept child x with its residual probability, else remove it and renormalise.

    Args:
        chosen: [B, S + 1] the target's own next token at the root and each node, from `choose_tokens`.
        drafted: [B, S] tokens. parents: [B, S].
    """
    num_accepted, path, at = agreeing_paths(chosen, drafted, parents, depth=depth)
    return AcceptedPath(num_accepted, path, chosen.gather(1, at).squeeze(1))


# Tokens drawn from the draft


def as_probabilities(weights: Tensor) -> Tensor:
    """weights [B, V] scaled to sum 1; rows of zeros stay zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def residual_behind(target: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """The residual distribution after the rejection of token [B, 1]: max(target - draft, 0), normalised. [B, V]

    The difference is empty only if rounding rejected what exact arithmetic accepts: then it is the target's without the
    token or, if nothing else is left, the target's itself. So a token of target probability 0 is never emitted.
    """
    rest = (target - draft).clamp_min(0)
    struck = target.scatter(1, token, 0.0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, struck)
    return as_probabilities(torch.where(rest.sum(1, keepdim=True) > 0, rest, target))


def accept_sampled(
    probs: Tensor, draft_probs: Tensor, drafted: Tensor, *, generator: torch.Generator | None = None
) -> AcceptedPath:
    """Rejection sampling, for a chain whose tokens were drawn from the draft.

    Lossless (Leviathan et al. 2023): token x is accepted with probability min(1, target[x] / draft[x]); at the first
    that is rejected, the bonus is drawn from max(target - draft, 0), normalised. So a token is accepted with
    probability sum(min(target, draft)), usually more than a deterministic one.

    A token with draft probability 0 was not drawn from the draft: it counts as certain, and is accepted with the
    probability that the target gives it.

    Args:
        probs: [B, K + 1, V] target_probs behind the last committed token and behind each drafted one.
        draft_probs: [B, K, V] the distribution that each was drawn from, 0 outside the draft vocabulary.
        drafted: [B, K].
    """
    probs, draft_probs, tokens = probs.float(), draft_probs.float(), drafted[..., None]
    uniform = torch.rand(drafted.shape, device=probs.device, generator=generator)  # [B, K] in [0, 1)
    weight = draft_probs.gather(2, tokens)  # [B, K, 1]
    is_drawn = weight > 0
    weight = torch.where(is_drawn, weight, 1.0)
    draft_probs = torch.where(is_drawn, draft_probs, 0.0).scatter(2, tokens, weight)
    taken = uniform * weight[..., 0] < probs[:, :-1].gather(2, tokens)[..., 0]
    num_accepted = taken.long().cumprod(1).sum(1)  # [B]
    rows, at = torch.arange(len(drafted), device=probs.device), num_accepted.clamp(max=drafted.shape[1] - 1)
    residual = residual_behind(probs[rows, at], draft_probs[rows, at], tokens[rows, at])  # [B, V]
    left = torch.where((num_accepted < drafted.shape[1])[:, None], residual, probs[:, -1])
    bonus = sample(left, random_keys([len(left)], probs.device, generator))
    path = torch.arange(drafted.shape[1], device=probs.device).expand_as(drafted)
    return AcceptedPath(num_accepted, path, bonus)


# The table


def exact(drafted: Candidates) -> AcceptedPath:
    """The lossless rule: rejection sampling for drafts sampled from draft_probs, else comparison with the choice."""
    tokens, parents, depth = drafted.tokens, drafted.parents, drafted.depth
    if drafted.draft_probs is not None:
        return accept_sampled(drafted.target_probs(), drafted.draft_probs, tokens, generator=drafted.generator)
    chosen = drafted.chosen()
    if not drafted.is_chain:
        return accept_tree(chosen, tokens, parents, depth=depth)
    num_accepted, offered = accept_chain(chosen, tokens), drafted.offered
    num_accepted = num_accepted if offered is None else torch.minimum(num_accepted, offered)
    return AcceptedPath(num_accepted, parents + 1, chosen.gather(1, num_accepted[:, None]).squeeze(1))


@dataclass(frozen=True)
class AcceptRule:
    """An accept rule, under the name that `--accept` and reports have for it.

    needs_draft_probs: it applies only to sampled drafts that come with their probabilities. takes_offered: on chains
    that were not sampled it minds `Candidates.offered` itself.
    """

    name: str
    function: Callable[..., AcceptedPath]
    needs_draft_probs: bool = False
    takes_offered: bool = False

    def __call__(self, drafted: Candidates) -> AcceptedPath:
        """Apply the rule to the offered drafts; if all of these are accepted, the target's own choice is the bonus."""
        offered, keys = drafted.offered, drafted.keys
        if offered is None or (drafted.is_chain and drafted.draft_probs is None and self.takes_offered):
            return self.function(drafted)
        logits = drafted.logits  # computed once, for the rule and the bonus
        accepted = self.function(drafted._replace(read_logits=lambda: logits))
        rows = torch.arange(len(offered), device=offered.device)
        keys = None if keys is None else keys[rows, offered][:, None]
        own = choose_tokens(logits[rows, offered][:, None], drafted.sampling, keys=keys)
        bonus = torch.where(accepted.num_accepted >= offered, own[:, 0], accepted.bonus)
        return AcceptedPath(torch.minimum(accepted.num_accepted, offered), accepted.path, bonus)


ACCEPT_RULES = {
    rule.name: rule
    for rule in [
        AcceptRule("exact", exact, takes_offered=True),
    ]
}


def accept_rule(accept: str | AcceptRule) -> AcceptRule:
    """The rule of that name, or the rule itself. Raises BadInput on a name that is not in ACCEPT_RULES."""
    if isinstance(accept, AcceptRule):
        return accept
    if accept not in ACCEPT_RULES:
        raise BadInput(f"accept {accept!r}: expected one of {', '.join(ACCEPT_RULES)}")
    return ACCEPT_RULES[accept]
