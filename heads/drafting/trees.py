"""Drafting chains and trees of tokens with any head that implements `Expands`.

A tree is stored flat: S nodes in an order in which parents precede their children, and `parents` [B, S], the index of
each node's parent or -1 for the root, the last committed token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...base.errors import BadInput
from ...targets.cpu.products import best


@dataclass
class Proposal:
    """What was drafted.

    draft_probs: of a sampled chain, the distribution that each token was drawn from. confidence: of a chain, the
    probability that each token is accepted given that those before it are, estimated before the token was chosen; None:
    no estimate.
    """

    tokens: Tensor  # [B, S] target ids
    parents: Tensor | None = None  # [B, S]; None: a chain, node j follows node j - 1
    draft_probs: Tensor | None = None  # [B, K, V]
    logits: list[Tensor] = field(default_factory=list)  # per depth of a chain [B, Vd]; empty: the drafter has none
    confidence: Tensor | None = None  # [B, K]

    def estimates(self) -> Tensor | None:
        """[B, K] the confidence; without one, the draft's probability of each token of a greedy chain, by which EAGLE-2
        (Li et al. 2024) orders its nodes; None if neither is known."""
        if self.confidence is not None or self.draft_probs is not None or not self.logits:
            return self.confidence
        return torch.stack([1 / (one.float() - one.amax(-1, True)).exp().sum(-1) for one in self.logits], 1)

    def first(self, num_tokens: int) -> "Proposal":
        """The first tokens of a chain, without logits and confidence."""
        parents = None if self.parents is None else self.parents[:, :num_tokens]
        probs = None if self.draft_probs is None else self.draft_probs[:, :num_tokens]
        return Proposal(self.tokens[:, :num_tokens], parents, probs)

    def to(self, device: torch.device) -> "Proposal":
        """A copy on a device, without the logits."""
        tensors = (self.parents, self.draft_probs, self.confidence)
        parents, probs, confidence = (None if one is None else one.to(device) for one in tensors)
        return Proposal(self.tokens.to(device), parents, probs, confidence=confidence)


def worth_verifying(estimates: Tensor, cost: float) -> Tensor:
    """[B] how many drafts of each chain are worth verifying, 0..K: those before the first that costs more than it adds.

    Verifying k drafts takes 1 + cost * k, where 1 is the time of a round that verifies none, and commits
    1 + r_1 + ... + r_k tokens on average: r_i, the product of the first i of `estimates` [B, K], is the probability
    that draft i is accepted. Draft k + 1 raises the tokens per time if r_{k+1} is at least `cost` times the tokens per
    time so far. As r falls, no later draft pays once one does not.

    Lossless: whether draft i is verified depends only on the tokens before it, as its estimate was made before it was
    chosen. Verified, it is committed by the target's distribution; if not, the target's own choice is. An estimate that
    depended on the sampled token itself would bias the text towards likely samples; a greedy draft is not sampled, so
    its own probability may be used.
    """
    reach = estimates.float().clamp(0, 1).cumprod(1)  # [B, K] r
    num_before = torch.arange(reach.shape[1], device=reach.device)
    pays = reach * (1 + cost * num_before) >= cost * (1 + reach.cumsum(1) - reach)
    return pays.long().cumprod(1).sum(1)


@dataclass(frozen=True)
class DynamicTree:
    """The tree of EAGLE-2 (Li et al. 2024, section 4): at each of `depth` levels the `top_k` most probable nodes are
    expanded, and of all candidates the `num_nodes` with the highest joint draft probability are verified."""

    num_nodes: int = 31
    depth: int = 5
    top_k: int = 8

    def __post_init__(self) -> None:
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if min(self.num_nodes, self.depth, self.top_k) < 1 or self.num_nodes > most:
            raise BadInput(f"dynamic tree: {self.num_nodes} nodes of depth {self.depth}: expected 1 to {most}")

    @property
    def num_expanded(self) -> int:
        """Nodes that the head reads to draft the others."""
        return self.top_k * (self.depth - 1)


@dataclass(frozen=True)
class SampledChain:
    """A chain whose tokens are drawn from the draft's distribution, at temperature > 0, instead of being its best
    guesses (Leviathan et al. 2023, Algorithm 1)."""

    depth: int

    @property
    def num_nodes(self) -> int:
        return self.depth

    @property
    def num_expanded(self) -> int:
        """Nodes that the head reads to draft the others."""
        return self.depth - 1


Tree = DynamicTree | SampledChain


class Expands:
    """What a head implements to draft chains and trees."""

    def first_logits(self, state: Any) -> Tensor:
        """[B, Vd] draft logits behind the last committed token."""
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        """Read drafted tokens and score what follows each.

        Args:
            tokens: [B, F] target ids at this depth (1: the first drafted).
            parents: [B, F] index of each token's parent among the tokens of the last call (all 0 at depth 1); None: F
                is 1 and the token follows the last one read, as in a chain.

        Returns: [B, F, Vd].
        """
        raise NotImplementedError

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids to target ids, any shape."""
        raise NotImplementedError

    def confidence(self, state: Any, tokens: Tensor) -> Tensor | None:
        """[B, K] `Proposal.confidence` of a drafted chain with tokens [B, K]; None if the head makes no estimate."""


@dataclass(frozen=True)
class Draws:
    """How the tokens of a sampled chain are drawn."""

    temperature: float  # of the draft's distribution, above 0
    vocab_size: int  # the target's V
    generator: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token [B] for each row of logits [B, Vd], and the probabilities [B, Vd] that it was drawn from: of these
        over exponential noise, the largest (the Gumbel-max trick)."""
        probs = (logits.float() / self.temperature).softmax(-1)
        clocks = torch.empty_like(probs).exponential_(generator=self.generator)
        return (probs / clocks.clamp_min(torch.finfo(probs.dtype).tiny)).argmax(-1), probs


def draft_chain(head: Expands, state: Any, *, num_draft_tokens: int, draws: Draws | None = None) -> Proposal:
    """Each depth's most probable token or, with draws, a sample."""
    logits: list[Tensor] = []  # per depth [B, Vd]; not list[Tensor](), which torch.compile does not trace
    tokens: list[Tensor] = []  # per depth [B]
    probs: list[Tensor] = []  # per depth [B, V]
    for depth in range(num_draft_tokens):
        if depth == 0:
            logits.append(head.first_logits(state))
        else:
            logits.append(head.expand(state, tokens[-1][:, None], None, depth=depth)[:, 0])
        if draws is None:
            chosen = best(logits[-1])
        else:
            chosen, own = draws(logits[-1])
            ids = head.to_target(torch.arange(own.shape[1], device=own.device)).expand_as(own)
            probs.append(own.new_zeros(len(own), draws.vocab_size).scatter(1, ids, own))
        tokens.append(head.to_target(chosen))
    chain = torch.stack(tokens, 1)  # [B, K]
    draft_probs = torch.stack(probs, 1) if probs else None
    return Proposal(chain, draft_probs=draft_probs, logits=logits, confidence=head.confidence(state, chain))


def draft_dynamic(head: Expands, state: Any, tree: DynamicTree) -> Proposal:
    """EAGLE-2: expand the most probable frontier, then keep the most probable nodes of all candidates."""
    k = tree.top_k
    scores, ids = head.first_logits(state).float().log_softmax(-1).topk(k, -1)  # [B, k]
    frontier, frontier_scores = head.to_target(ids), scores
    frontier_index = torch.arange(k, device=ids.device).expand(len(ids), -1)  # [B, k] among all candidates
    rows = torch.zeros_like(frontier_index)  # parent's row in the last expansion
    tokens, parents, all_scores = [frontier], [torch.full_like(frontier_index, -1)], [scores]
    for depth in range(1, tree.depth):
        log_probs = head.expand(state, frontier, rows, depth=depth).float().log_softmax(-1)  # [B, k, Vd]
        best, ids = log_probs.topk(k, -1)  # [B, k, k]
        # a child never outranks its parent, also where its probability rounds to 1
        joint = (frontier_scores[..., None] + best - 1e-4).flatten(1)  # [B, k * k]
        first = k + (depth - 1) * k * k  # of the new candidates among all
        tokens.append(head.to_target(ids).flatten(1))
        parents.append(frontier_index.repeat_interleave(k, 1))
        all_scores.append(joint)
        frontier_scores, chosen = joint.topk(k, -1)  # [B, k]
        frontier = tokens[-1].gather(1, chosen)
        rows = chosen // k
        frontier_index = first + chosen
    likeliest = torch.cat(all_scores, 1).topk(tree.num_nodes, -1).indices.sort(-1).values  # [B, S] parents first
    renumber = torch.full_like(torch.cat(parents, 1), -1).scatter(
        1, likeliest, torch.arange(tree.num_nodes, device=likeliest.device).expand_as(likeliest)
    )
    up = torch.cat(parents, 1).gather(1, likeliest)  # [B, S] parents among all candidates
    up = torch.where(up < 0, up, renumber.gather(1, up.clamp(min=0)))
    return Proposal(torch.cat(tokens, 1).gather(1, likeliest), up)
