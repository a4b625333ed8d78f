"""Accept rules: which drafted tokens are committed. Pure functions, in fp32, on the device, without copies to the host.

A rule is lossless if the tokens it commits are distributed as the target's own samples. To add a rule, write a function
from `Candidates` to `AcceptedPath` and give it a line in ACCEPT_RULES; the tests of what it claims go over that table.

A tree of S drafted nodes: parents [B, S] hold the index of each node's parent, -1 for the root, which is the last
committed token; parents precede their children, and siblings are distinct tokens. In tensors per position,
[B, S + 1, ...], index 0 is the root and node j has index j + 1. depth: nodes on the longest path. A chain is a tree
with parents -1, 0, 1, ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ...heads.decoders.tree_nodes import agreeing_paths
from .sampling import Sampling, choose_tokens, sample, target_probs


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
    their argmax if `chosen` needs no more. draft_probs: [B, S + 1, V], as in `Proposal`; None: the tokens were not
    sampled. history: [B, S + 1, V], as in `target_probs`.
    """

    tokens: Tensor
    parents: Tensor
    depth: int
    is_chain: bool
    read_logits: Callable[[], Tensor]
    read_best: Callable[[], Tensor] | None
    draft_probs: Tensor | None
    sampling: Sampling
    history: Tensor | None = None
    generator: torch.Generator | None = None
    most_children: Sequence[int] | None = None  # for a tree of fixed shape, as in `accept_sampled`
    offered: Tensor | None = None  # [B] for a chain, how many of its tokens are verified; None: all

    @property
    def logits(self) -> Tensor:
        return self.read_logits()

    def target_probs(self) -> Tensor:
        """[B, S + 1, V] the target's distribution of the next token at the root and each node."""
        return target_probs(self.logits, self.sampling, self.history)

    def chosen(self) -> Tensor:
        """[B, S + 1] the target's own next token at the root and each node."""
        if self.read_best is not None:
            return self.read_best()
        return choose_tokens(self.logits, sampling=self.sampling, history=self.history, generator=self.generator)


# Deterministic drafts


def accept_chain(chosen: Tensor, drafted: Tensor) -> Tensor:
    """How many tokens of a drafted chain are accepted: those before the first that differs from the target's choice.

    Lossless for greedy drafts at any temperature: the target's own choice given the accepted prefix is emitted at every
    position, whether the draft guessed it or not. A drafted token x is accepted with probability target_probs[x], the
    most that a deterministic draft allows (Leviathan et al. 2023 with a one-hot draft distribution).

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


# Children sampled from the draft


def as_probabilities(weights: Tensor) -> Tensor:
    """weights [B, V] scaled to sum 1; rows of zeros stay zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def drawn_from(draft: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution [B, V] that the child token [B, 1] was drawn from, and its probability there [B, 1]. One that
    the draft gives probability 0 is deterministic: it counts as certain."""
    weight = draft.gather(1, token)
    is_drawn = weight > 0
    weight = torch.where(is_drawn, weight, 1.0)
    return torch.where(is_drawn, draft, 0.0).scatter(1, token, weight), weight


def without(draft: Tensor, token: Tensor) -> Tensor:
    """The distribution [B, V] that the next sibling was drawn from, without the drawn token [B, 1]."""
    return as_probabilities(draft.scatter(1, token, 0.0))


def residual_behind(residual: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """The residual distribution after the rejection of token [B, 1]: max(residual - draft, 0), normalised. [B, V]

    The difference is empty only if rounding rejected what exact arithmetic accepts: then it is the residual without the
    token or, if nothing else is left, the residual itself. So a token of target probability 0 is never emitted.
    """
    rest = (residual - draft).clamp_min(0)
    struck = residual.scatter(1, token, 0.0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, struck)
    return as_probabilities(torch.where(rest.sum(1, keepdim=True) > 0, rest, residual))


def accept_sampled(
    probs: Tensor,
    draft_probs: Tensor,
    drafted: Tensor,
    parents: Tensor,
    *,
    depth: int,
    most_children: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> AcceptedPath:
    """Recursive rejection, for children drawn from the draft without replacement, in the order of their index.

    Lossless (Leviathan et al. 2023 for a chain; Sequoia, Chen et al. 2024, Algorithm 2 for a tree): child x is accepted
    with probability min(1, residual[x] / draft[x]); if rejected, the residual becomes max(residual - draft, 0) and x is
    removed from the draft, both normalised. At the last accepted node the bonus is drawn from its residual. A single
    child is accepted with probability sum(min(target, draft)), usually more than for a deterministic one.

    A child with draft probability 0 was not drawn from the draft. It is treated as deterministic and accepted with
    probability residual[x]; so zeros in draft_probs mean that the children of that node are deterministic.

    Args:
        probs: [B, S + 1, V] target_probs at the root and each node.
        draft_probs: [B, S + 1, V] at index i the distribution that the children of i were drawn from, 0 outside the
            draft vocabulary; not used at nodes without children.
        drafted: [B, S] tokens. parents: [B, S].
        most_children: for each depth the largest number of children of one node, as many as are tried there; None: not
            known, so as many as there are nodes, which takes more kernels and has the same result.
    """
    probs, draft_probs = probs.float(), draft_probs.float()
    num_rows, num_nodes = drafted.shape
    uniform = torch.rand(num_rows, num_nodes, device=probs.device, generator=generator)  # [B, S] in [0, 1)
    residual, draft = probs[:, 0], draft_probs[:, 0]  # [B, V]
    at, rows = parents.new_zeros(num_rows, 1), torch.arange(num_rows, device=probs.device)  # [B, 1] 0: the root; [B]
    num_accepted, path = at, parents.new_zeros(num_rows, depth)
    levels = torch.arange(depth, device=probs.device)
    numbers = torch.arange(1, num_nodes + 1, device=probs.device)[:, None]  # 1 + each node's index
    rank = (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1, keepdim=True)  # [B, S, 1] among its siblings
    for num_tried in most_children or [num_nodes] * depth:
        here = (parents + 1 == at)[..., None] & (rank == torch.arange(num_tried, device=probs.device))  # [B, S, n]
        nodes = torch.where(here, numbers, 0).amax(1)  # [B, n] 1 + the index of each child of `at`; 0: no child
        is_child, children = nodes > 0, (nodes - 1).clamp(min=0)
        tokens, draws = drafted.gather(1, children), uniform.gather(1, children)
        going, behind = torch.ones_like(at, dtype=torch.bool), torch.full_like(at, -1)  # [B, 1]; the accepted position
        for i in range(num_tried):
            token, tried = tokens[:, i : i + 1], is_child[:, i : i + 1] & going  # [B, 1]
            source, weight = drawn_from(draft, token)
            taken = tried & (draws[:, i : i + 1] * weight < residual.gather(1, token))
            rejected, going = tried ^ taken, going ^ taken
            behind = torch.where(taken, nodes[:, i : i + 1], behind)
            residual = torch.where(rejected, residual_behind(residual, source, token), residual)
            if i + 1 < num_tried:  # not read in rows without a further child
                draft = without(draft, token)
        next_at = behind.clamp(min=0).squeeze(1)
        residual = torch.where(going, residual, probs[rows, next_at])
        draft = torch.where(going, draft, draft_probs[rows, next_at])
        path = torch.where((levels == num_accepted) & ~going, behind - 1, path)  # [B, depth]
        num_accepted = num_accepted + ~going
        at = behind  # -1, where no node is: the row has stopped
    return AcceptedPath(num_accepted.squeeze(1), path, sample(residual, generator))


# Typical acceptance


def accept_typical(
    probs: Tensor, drafted: Tensor, parents: Tensor, *, depth: int, epsilon: float = 0.09, delta: float = 0.3
) -> AcceptedPath:
    """Medusa's typical acceptance (Cai et al. 2024): NOT lossless, the text is not distributed as the target's own.

    A node is accepted if its probability exceeds min(epsilon, delta * exp(-entropy)) of the target's distribution at
    its parent, and if its parent is accepted. The longest path wins, and of equally long ones that with the lowest last
    index; the bonus is the target's argmax after it.

    Args:
        probs: [B, S + 1, V] target_probs at the root and each node.
        drafted: [B, S] tokens. parents: [B, S].
    """
    probs = probs.float()
    entropy = torch.special.entr(probs).sum(-1)  # [B, S + 1]
    threshold = (delta * (-entropy).exp()).clamp_max(epsilon)
    above = parents + 1  # [B, S]
    rows = torch.arange(len(probs), device=probs.device)[:, None]  # [B, 1]
    typical = probs[rows, above, drafted] > threshold.gather(1, above)  # [B, S]
    length = torch.zeros_like(threshold, dtype=torch.long)  # [B, S + 1] of the path to each node
    accepted = torch.ones_like(length, dtype=torch.bool)
    for _ in range(depth):
        length = torch.cat([length[:, :1], 1 + length.gather(1, above)], 1)
        accepted = torch.cat([accepted[:, :1], typical & accepted.gather(1, above)], 1)
    length = torch.where(accepted, length, 0)
    at = length.argmax(1, keepdim=True)  # [B, 1] the root, of length 0, if no node is accepted
    num_accepted = length.gather(1, at)  # [B, 1]
    bonus = probs[rows, at].argmax(-1)  # [B, 1]
    up = torch.cat([torch.zeros_like(at), above], 1)  # [B, S + 1] parent of each position; the root is its own
    steps = [at[:, :0]]
    for level in reversed(range(depth)):
        inside = num_accepted > level  # [B, 1]
        steps.append(torch.where(inside, at - 1, 0))
        at = torch.where(inside, up.gather(1, at), at)
    return AcceptedPath(num_accepted.squeeze(1), torch.cat(steps, 1).flip(1), bonus.squeeze(1))


# The table


def exact(drafted: Candidates) -> AcceptedPath:
    """The lossless rule: rejection sampling for drafts sampled from draft_probs, else comparison with the choice."""
    tokens, parents, depth = drafted.tokens, drafted.parents, drafted.depth
    if drafted.draft_probs is not None:
        most_children = [1] * depth if drafted.is_chain else drafted.most_children
        given = drafted.target_probs(), drafted.draft_probs, tokens, parents
        return accept_sampled(*given, depth=depth, most_children=most_children, generator=drafted.generator)
    chosen = drafted.chosen()
    if not drafted.is_chain:
        return accept_tree(chosen, tokens, parents, depth=depth)
    num_accepted, offered = accept_chain(chosen, tokens), drafted.offered
    num_accepted = num_accepted if offered is None else torch.minimum(num_accepted, offered)
    return AcceptedPath(num_accepted, parents + 1, chosen.gather(1, num_accepted[:, None]).squeeze(1))


def typical(drafted: Candidates, *, epsilon: float, delta: float) -> AcceptedPath:
    """Medusa's rule, `accept_typical`."""
    probs, tokens, parents = drafted.target_probs(), drafted.tokens, drafted.parents
    return accept_typical(probs, tokens, parents, depth=drafted.depth, epsilon=epsilon, delta=delta)


@dataclass(frozen=True)
class AcceptRule:
    """An accept rule, under the name that `--accept` and reports have for it.

    needs_draft_probs: it applies only to sampled drafts that come with their probabilities. takes_offered: on chains
    that were not sampled it minds `Candidates.offered` itself. settings: further arguments of the function, by name.
    """

    name: str
    function: Callable[..., AcceptedPath]
    is_lossless: bool = False
    needs_draft_probs: bool = False
    takes_offered: bool = False
    settings: dict[str, float] = field(default_factory=dict)

    def __call__(self, drafted: Candidates) -> AcceptedPath:
        """Apply the rule to the offered drafts; if all of these are accepted, the target's own choice is the bonus."""
        offered, history = drafted.offered, drafted.history
        if offered is None or (drafted.is_chain and drafted.draft_probs is None and self.takes_offered):
            return self.function(drafted, **self.settings)
        logits = drafted.logits  # computed once, for the rule and the bonus
        accepted = self.function(drafted._replace(read_logits=lambda: logits), **self.settings)
        rows = torch.arange(len(offered), device=offered.device)
        history = None if history is None else history[rows, offered][:, None]
        own = choose_tokens(
            logits[rows, offered][:, None], drafted.sampling, history=history, generator=drafted.generator
        )
        bonus = torch.where(accepted.num_accepted >= offered, own[:, 0], accepted.bonus)
        return AcceptedPath(torch.minimum(accepted.num_accepted, offered), accepted.path, bonus)

    def having(self, **settings: float | None) -> "AcceptRule":
        """The rule with these settings; None: as they are. Raises BadInput if it has no such setting."""
        given = {name: value for name, value in settings.items() if value is not None}
        if unknown := sorted(given.keys() - self.settings.keys()):
            raise BadInput(f"accept {self.name}: has no setting {unknown[0]}")
        return replace(self, settings=self.settings | given)

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not those of the table, under their names in reports: NAME_SETTING."""
        usual = ACCEPT_RULES[self.name].settings if self.name in ACCEPT_RULES else {}
        return {f"{self.name}_{key}": value for key, value in self.settings.items() if usual.get(key) != value}


ACCEPT_RULES = {
    rule.name: rule
    for rule in (
        AcceptRule("exact", exact, is_lossless=True, takes_offered=True),
        AcceptRule("typical", typical, settings={"epsilon": 0.09, "delta": 0.3}),
    )
}


def accept_rule(accept: str | AcceptRule) -> AcceptRule:
    """The rule of that name, or the rule itself. Raises BadInput on a name that is not in ACCEPT_RULES."""
    if isinstance(accept, AcceptRule):
        return accept
    if accept not in ACCEPT_RULES:
        raise BadInput(f"accept {accept!r}: expected one of {', '.join(ACCEPT_RULES)}")
    return ACCEPT_RULES[accept]
