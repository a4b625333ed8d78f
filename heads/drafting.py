"""Drafting chains and trees of tokens with any head that implements `Expands`.

A tree is stored flat: S nodes in an order in which parents precede their children, and `parents` [B, S], the index of
each node's parent or -1 for the root, the last committed token.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..configs.errors import BadInput
from .decoders.cpu.products import best


@dataclass
class Proposal:
    """What was drafted.

    draft_probs: for sampled nodes, the distribution that the children of the root (row 0) and of each node were drawn
    from; zeros for nodes without children. confidence: of a chain, or a tree that is one path, the probability that
    each token is accepted given that those before it are, estimated before the token was chosen; None: no estimate.
    """

    tokens: Tensor  # [B, S] target ids
    parents: Tensor | None = None  # [B, S]; None: a chain, node j follows node j - 1
    draft_probs: Tensor | None = None  # [B, S + 1, V]
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
        probs = None if self.draft_probs is None else self.draft_probs[:, : num_tokens + 1]
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
class StaticTree:
    """A tree of fixed shape (Cai et al. 2024, section 2.3.3): a node is the path of ranks that leads to it, so (0, 1)
    is the second guess after the best first one. Paths are distinct, ordered by length and follow their prefixes.

    sampled: at temperature > 0, children are drawn from the draft's distribution without replacement, in order of rank,
    instead of being its best guesses; a tree of one path is then a sampled chain. Raises: BadInput on other paths."""

    paths: tuple[tuple[int, ...], ...]
    sampled: bool = False

    def __post_init__(self) -> None:
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            elder = (*path[:-1], path[-1] - 1) if self.sampled and path and path[-1] else path[:-1]
            if path in known or not {path[:-1], elder} <= known or len(path) < max(map(len, known)):
                raise BadInput(f"tree path {path}: needs its prefix (sampled: its rank - 1) before it, by length")
            known.add(path)
        if not self.paths:
            raise BadInput("a tree needs at least one node")

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def num_expanded(self) -> int:
        """Nodes that the head reads to draft the others."""
        return len({path[:-1] for path in self.paths} - {()})

    @property
    def is_chain(self) -> bool:
        """Whether this is one path of best guesses, which needs no tree attention."""
        return not self.sampled and all(path == (0,) * i for i, path in enumerate(self.paths, 1))

    @property
    def most_children(self) -> list[int]:
        """For each depth, the largest number of children of one node."""
        children = Counter(path[:-1] for path in self.paths)
        return [max(num for path, num in children.items() if len(path) == depth) for depth in range(self.depth)]

    @property
    def parents(self) -> list[int]:  # [S]
        index = {path: i for i, path in enumerate(self.paths)}
        return [index.get(path[:-1], -1) for path in self.paths]


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


Tree = StaticTree | DynamicTree


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


def draft_chain(head: Expands, state: Any, *, num_draft_tokens: int) -> Proposal:
    """The greedy chain: each depth's most probable token."""
    logits = [head.first_logits(state)]  # [B, Vd] per depth
    tokens = [head.to_target(best(logits[0]))]  # [B] per depth
    for depth in range(1, num_draft_tokens):
        logits.append(head.expand(state, tokens[-1][:, None], None, depth=depth)[:, 0])
        tokens.append(head.to_target(best(logits[-1])))
    chain = torch.stack(tokens, 1)  # [B, K]
    return Proposal(chain, logits=logits, confidence=head.confidence(state, chain))


@dataclass(frozen=True)
class Draws:
    """How sampled nodes are drawn."""

    temperature: float  # of the draft's distribution, above 0
    vocab_size: int  # the target's V
    generator: torch.Generator | None = None


def ranked(logits: Tensor, count: int, draws: Draws | None) -> tuple[Tensor, Tensor | None]:
    """`count` children for each row of logits [B, F, Vd]: draft ids [B, F, count] in order of rank.

    Without draws the most probable ones. Else samples without replacement, which are the largest log-probabilities
    after adding Gumbel noise (Kool et al. 2019), and the probabilities [B, F, Vd] that they were drawn from.
    """
    if draws is None:
        return logits.topk(count, -1).indices, None
    probs = (logits.float() / draws.temperature).softmax(-1)
    clocks = torch.empty_like(probs).exponential_(generator=draws.generator)  # -log of it is Gumbel noise
    return (probs / clocks.clamp_min(torch.finfo(probs.dtype).tiny)).topk(count, -1).indices, probs


class Level(NamedTuple):
    """The n nodes of one depth, and the F of them that have children."""

    row: Tensor  # [n] index of each node's parent among the nodes last expanded
    rank: Tensor  # [n] of each node among that parent's children
    num_ranks: int  # guesses needed per parent
    parents: list[int]  # the nodes last expanded: 0 for the root, else 1 + index
    kept: Tensor  # [F] the nodes that have children
    kept_row: Tensor  # [F] `row` of these


@cache  # never evicted: a captured graph reads the tensors it was captured with
def levels(tree: StaticTree, device: torch.device) -> tuple[list[Level], Tensor]:
    """A static tree's index tensors by depth, and its parents [S]; made once per device."""
    inner = {path[:-1] for path in tree.paths}
    index = {path: i for i, path in enumerate([(), *tree.paths])}
    expanded: list[tuple[int, ...]] = [()]
    plan = []
    for depth in range(1, tree.depth + 1):
        level = [path for path in tree.paths if len(path) == depth]
        row, rank = [expanded.index(path[:-1]) for path in level], [path[-1] for path in level]
        nodes = [i for i, path in enumerate(level) if path in inner]
        rows, ranks, kept_nodes, kept_rows = (
            torch.tensor(x, dtype=torch.long, device=device) for x in (row, rank, nodes, [row[i] for i in nodes])
        )
        parents = [index[path] for path in expanded]
        plan.append(Level(rows, ranks, max(rank) + 1, parents, kept_nodes, kept_rows))
        expanded = [level[i] for i in nodes]
    return plan, torch.tensor(tree.parents, device=device)


def draft_static(head: Expands, state: Any, tree: StaticTree, draws: Draws | None = None) -> Proposal:
    """Draft a tree of fixed shape: the node of rank r takes its parent's r-th most probable token, or r-th sample."""
    logits = head.first_logits(state)[:, None]  # [B, F, Vd]
    device, batch_size = logits.device, len(logits)
    drafted_ids = head.to_target(torch.arange(logits.shape[-1], device=device))  # [Vd]
    draft_probs = torch.zeros(batch_size, tree.num_nodes + 1, draws.vocab_size, device=device) if draws else None
    plan, parents = levels(tree, device)
    drafted = []
    for depth, level in enumerate(plan, 1):
        best, probs = ranked(logits, level.num_ranks, draws)  # [B, F, ranks], [B, F, Vd]
        if draft_probs is not None and probs is not None:
            for i, parent in enumerate(level.parents):
                draft_probs[:, parent, drafted_ids] = probs[:, i]
        tokens = head.to_target(best[:, level.row, level.rank])  # [B, n]
        drafted.append(tokens)
        if len(level.kept):
            rows = level.kept_row.expand(batch_size, -1)  # [B, F]
            logits = head.expand(state, tokens[:, level.kept], rows, depth=depth)
    tokens = torch.cat(drafted, 1)  # [B, S]
    confidence = head.confidence(state, tokens) if tree.depth == tree.num_nodes else None
    return Proposal(tokens, parents.expand(batch_size, -1), draft_probs, confidence=confidence)


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
