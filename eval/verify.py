"""Accept rules as pure functions on logits: fp32, on the device, without a host read.

What the target says is sampling applied to its logits, everywhere: for a drafted token, for the bonus token, and for
each token of the baseline. A rule is lossless if the tokens it commits are distributed as the target's own samples.

A tree of S drafted nodes: parents [B, S] hold the index of each node's parent, -1 for the last committed token, the
root; parents precede their children, and siblings are distinct tokens. Where values are held per position, [B, S + 1],
index 0 is the root and node j has index j + 1. depth: nodes on the longest path. A chain is a tree, its parents
-1, 0, 1, ...
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..configs.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target turns logits into tokens, as transformers defines it; temperature 0 is greedy.

    top_k: 0 is off. top_p: 1 is off. repetition_penalty: 1 is off; it holds at temperature 0 too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadInput(f"temperature {self.temperature}: expected 0 or more")
        if not self.top_k >= 0 or self.top_k != int(self.top_k):
            raise BadInput(f"top_k {self.top_k}: expected a whole number, 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p}: expected more than 0 and at most 1 (off)")
        if not 0 < self.repetition_penalty < math.inf:
            raise BadInput(f"repetition_penalty {self.repetition_penalty}: expected more than 0; 1 is off")


@dataclass
class Verdict:
    """What stands of a drafted tree.

    num_accepted: [B]. path: [B, depth] accepted node at each depth, 0..S-1; behind num_accepted, any valid index.
    bonus: [B] the token to commit behind the accepted ones.
    """

    num_accepted: Tensor
    path: Tensor
    bonus: Tensor


# What the target says


def penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """fp32 logits after the repetition penalty (Keskar et al. 2019, CTRL; as transformers has it)."""
    logits = logits.float()
    penalty = sampling.repetition_penalty
    if penalty == 1:
        return logits
    assert seen is not None, "a repetition penalty needs the tokens seen"
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def target_probs(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The distribution that the target samples from: penalty, temperature, top-k, top-p, in transformers' order.

    top-k keeps all that tie with the k-th, top-p the lowest ids. Temperature 0: one-hot of the best, the lowest id of
    those that tie.

    Args:
        logits: [..., V].
        seen: [..., V] bool, tokens of the prompt and of the text before this position, drafted ones on the path
            included; what the penalty falls on. Needed with a penalty only.

    Returns: [..., V] fp32, summing to 1.
    """
    logits = penalised(logits, sampling, seen)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]))[0][..., -1:]  # [..., 1]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        falling, order = logits.sort(dim=-1, descending=True, stable=True)  # the lowest id first of those that tie
        dropped = (falling.flip(-1).softmax(-1).cumsum(-1) <= 1 - sampling.top_p).flip(-1)
        dropped[..., :1].fill_(False)
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
    return logits.softmax(-1)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per distribution [..., V], which need not sum to 1: [...] ids; never one of probability 0.

    The race of exponential clocks that torch.multinomial runs, without its checks, which read from the device.
    """
    clocks = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / clocks.clamp_min(torch.finfo(probs.dtype).tiny)).argmax(-1)


def choose(
    logits: Tensor, sampling: Sampling, *, seen: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The token that the target itself emits at each position: its argmax, or one sample at temperature > 0.

    Used for every token of every run, the baseline's and the bonus token included, so that ties break alike.

    Args: as target_probs. Returns: [...] token ids.
    """
    if sampling.temperature == 0:
        return penalised(logits, sampling, seen).argmax(-1)
    return sample(target_probs(logits, sampling, seen), generator)


# Deterministic drafts


def accept_chain(chosen: Tensor, drafted: Tensor) -> Tensor:
    """How many tokens of a drafted chain stand: those that equal the target's own choice, up to the first that differs.

    Lossless for greedy drafts at any temperature: the target's choice given the accepted prefix is emitted at every
    position, whether the draft guessed it or not, so the text is distributed as the target's own. A drafted token x is
    accepted with probability p(x), the most that a deterministic draft allows (Leviathan et al. 2023 with q one-hot).

    Args:
        chosen: [B, K + 1] the target's choices at the last committed token and behind each drafted one.
        drafted: [B, K].

    Returns: [B] number of accepted tokens a, 0..K. chosen[:, : a + 1] are the tokens to commit, bonus token last.
    """
    return (chosen[:, : drafted.shape[1]] == drafted).long().cumprod(1).sum(1)


def accept_tree(chosen: Tensor, drafted: Tensor, parents: Tensor, *, depth: int) -> Verdict:
    """Walks down from the root as long as a child equals the target's own choice; the choice behind it is the bonus.

    Lossless for deterministic children (top-k of the draft, n-grams) at any temperature: what is committed at each node
    is the target's own choice there. In law this is SpecInfer's and EAGLE-2's loop with draft probability 1: accept
    child x with its residual probability, else strike it out and renormalise.

    Args:
        chosen: [B, S + 1] the target's choice at the root and behind each node, from choose.
        drafted: [B, S] tokens. parents: [B, S].
    """
    at = chosen.new_zeros(len(chosen), 1)  # [B, 1] 0: the root
    steps, found = [], [at[:, :0] > 0]
    for _ in range(depth):
        match = (parents + 1 == at) & (drafted == chosen.gather(1, at))  # [B, S] one at most
        node = match.long().argmax(1, keepdim=True)  # [B, 1]
        found.append(match.any(1, keepdim=True))
        steps.append(node)
        at = torch.where(found[-1], node + 1, at)  # a row that has stopped finds nothing again
    path = torch.cat([at[:, :0], *steps], 1)  # [B, depth]
    return Verdict(torch.cat(found, 1).long().sum(1), path, chosen.gather(1, at).squeeze(1))


# Children sampled from the draft


def normalised(weights: Tensor) -> Tensor:
    """weights [B, V] to sum 1; all 0 where they are all 0."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def without(draft: Tensor, token: Tensor) -> Tensor:
    """The draft [B, V] that the next sibling was drawn from, token [B, 1] being taken."""
    return normalised(draft.scatter(1, token, 0.0))


def residual_behind(residual: Tensor, draft: Tensor, token: Tensor) -> Tensor:
    """What the target still owes after the rejection of token [B, 1]: max(residual - draft, 0), normalised. [B, V]

    Nothing is left only where rounding rejected what exact sums accept: then the residual without the token, or, if
    that is the whole of it, the residual as it was. So no token of target probability 0 is ever emitted.
    """
    rest = (residual - draft).clamp_min(0)
    struck = residual.scatter(1, token, 0.0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, struck)
    return normalised(torch.where(rest.sum(1, keepdim=True) > 0, rest, residual))


def accept_sampled(
    probs: Tensor,
    draft_probs: Tensor,
    drafted: Tensor,
    parents: Tensor,
    *,
    depth: int,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Recursive rejection, for children drawn from the draft without replacement, in the order of their index.

    Lossless (Leviathan et al. 2023 for a chain; Sequoia, Chen et al. 2024, Algorithm 2 for a tree): child x is accepted
    with min(1, residual[x] / draft[x]); if not, the residual becomes max(residual - draft, 0) and the draft loses x,
    both normalised; behind the last accepted node the bonus is drawn from its residual. One child is accepted with
    probability sum(min(target, draft)), more than a deterministic one mostly is.

    A child to which the draft gives no probability was not drawn from it. It counts as deterministic, accepted with
    residual[x]: so a row of zeros in draft_probs means that the children of that node are deterministic.

    Args:
        probs: [B, S + 1, V] target_probs at the root and behind each node.
        draft_probs: [B, S + 1, V] at index i the distribution that the children of i were drawn from, 0 outside the
            draft vocabulary; what it says of a node without children is not used.
        drafted: [B, S] tokens. parents: [B, S].
    """
    probs, draft_probs = probs.float(), draft_probs.float()
    num_rows, num_nodes = drafted.shape
    luck = torch.rand(num_rows, num_nodes, device=probs.device, generator=generator)  # [B, S] in [0, 1)
    residual, draft = probs[:, 0], draft_probs[:, 0]  # [B, V]
    at = parents.new_zeros(num_rows, 1)  # [B, 1] 0: the root
    num_accepted, path = at, parents.new_zeros(num_rows, depth)
    levels = torch.arange(depth, device=probs.device)
    for j in range(num_nodes):  # parents precede children: one pass in the order of index is the whole walk
        token = drafted[:, j : j + 1]  # [B, 1]
        tried = parents[:, j : j + 1] + 1 == at
        sure = torch.zeros_like(draft).scatter(1, token, 1.0)  # [B, V]
        drawn_from = torch.where(draft.gather(1, token) > 0, draft, sure)
        accepted = luck[:, j : j + 1] * drawn_from.gather(1, token) < residual.gather(1, token)  # [B, 1]
        taken, rejected = tried & accepted, tried & ~accepted
        residual = torch.where(rejected, residual_behind(residual, drawn_from, token), residual)
        residual = torch.where(taken, probs[:, j + 1], residual)
        draft = torch.where(taken, draft_probs[:, j + 1], torch.where(rejected, without(draft, token), draft))
        path = torch.where(taken & (levels == num_accepted), j, path)  # [B, depth]
        num_accepted, at = num_accepted + taken, torch.where(taken, j + 1, at)
    return Verdict(num_accepted.squeeze(1), path, sample(residual, generator))


def accept_typical(
    probs: Tensor, drafted: Tensor, parents: Tensor, *, depth: int, epsilon: float = 0.09, delta: float = 0.3
) -> Verdict:
    """Medusa's typical acceptance (Cai et al. 2024): NOT lossless, the text is not distributed as the target's own.

    A node stands if its probability exceeds min(epsilon, delta * exp(-entropy)) of the target's distribution at its
    parent, and if its parent stands. The longest path wins, of equals the one that ends at the lowest index; the bonus
    is the target's argmax behind it.

    Args:
        probs: [B, S + 1, V] target_probs at the root and behind each node.
        drafted: [B, S] tokens. parents: [B, S].
    """
    probs = probs.float()
    entropy = torch.special.entr(probs).sum(-1)  # [B, S + 1]
    threshold = (delta * (-entropy).exp()).clamp_max(epsilon)
    above = parents + 1  # [B, S]
    rows = torch.arange(len(probs), device=probs.device)[:, None]  # [B, 1]
    good = probs[rows, above, drafted] > threshold.gather(1, above)  # [B, S]
    length = torch.zeros_like(threshold, dtype=torch.long)  # [B, S + 1] of the path to each node
    stands = torch.ones_like(length, dtype=torch.bool)
    for _ in range(depth):
        length = torch.cat([length[:, :1], 1 + length.gather(1, above)], 1)
        stands = torch.cat([stands[:, :1], good & stands.gather(1, above)], 1)
    length = torch.where(stands, length, 0)
    at = length.argmax(1, keepdim=True)  # [B, 1] the root, at length 0, wins where no node stands
    num_accepted = length.gather(1, at)  # [B, 1]
    bonus = probs[rows, at].argmax(-1)  # [B, 1]
    up = torch.cat([torch.zeros_like(at), above], 1)  # [B, S + 1] parent of each position; the root is its own
    steps = [at[:, :0]]
    for level in reversed(range(depth)):
        inside = num_accepted > level  # [B, 1]
        steps.append(torch.where(inside, at - 1, 0))
        at = torch.where(inside, up.gather(1, at), at)
    return Verdict(num_accepted.squeeze(1), torch.cat(steps, 1).flip(1), bonus.squeeze(1))
