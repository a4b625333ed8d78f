"""The loss of drafts at all depths, chunk by chunk: the target's logits are computed once per position and not kept.

Depth k of the chain that starts at t is scored at position t + 1 + k, whose target state predicts x_{t+2+k}, so one
position serves up to K chains. For each chunk of positions the target's distribution is computed once, the drafts of
all depths are scored against it, and the gradients of their hidden states and of the output layer are computed right
away, so that backward only scales them (as in fused linear cross entropy, Hsu et al. 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cross_entropy import CLOSED, closed_mix
from .functions import ALL_LOSSES, LossSpec, Rows, TargetRows

# logits (the target's and the drafts') that exist at a time. On a CPU few enough for its cache; on a GPU as many as
# fit, since every chunk is added to the gradient of the whole output layer
CHUNK = {"cpu": 2**21}
# logits per position above which a CPU's chunks hold no fewer positions: reading the output layer once per chunk would
# then cost more than the products
WIDEST = 2**15
CHUNK_ELSEWHERE, MOST_CHUNK = 2**28, 2**31
BYTES_PER_CHUNK = 20e9  # of GPU memory per CHUNK_ELSEWHERE logits, which take 1.4 GB


class DepthRows(NamedTuple):
    """What one depth scores in a chunk."""

    depth: int
    chains: Tensor  # [n]
    at: slice | Tensor  # [n] the chunk's positions at which these are scored


@dataclass
class ChunkPlan:
    """Which positions are scored together."""

    positions: Tensor  # [M] of the target's states, chunk by chunk
    chains: Tensor  # [K, M] the chain that depth k scores there; arbitrary where it scores none
    scored: (
        list[list[slice]] | list[list[Tensor]]
    )  # for each chunk and depth, the positions in the chunk that it scores
    size: int  # positions per chunk; the last may have fewer

    def positions_of(self, chunk: int) -> slice:
        """The chunk's part of `positions`."""
        return slice(chunk * self.size, (chunk + 1) * self.size)

    def rows_of(self, chunk: int, depth: int) -> DepthRows:
        at = self.scored[chunk][depth]
        return DepthRows(depth, self.chains[depth, self.positions_of(chunk)][at], at)


def chunk_size(num_logits: int, device: torch.device) -> int:
    """Positions per chunk, given the number of logits per position."""
    num_held = most_logits(device) if device.type == "cuda" else CHUNK.get(device.type, CHUNK_ELSEWHERE)
    widest = WIDEST if device.type in CHUNK else num_logits
    return max(1, num_held // max(1, min(num_logits, widest)))


@cache
def most_logits(device: torch.device) -> int:
    """Logits that exist at a time on a GPU. Depends on its total, not its free memory, so that runs are repeatable."""
    return logits_held(torch.cuda.get_device_properties(device).total_memory)


def logits_held(num_bytes: int) -> int:
    """`most_logits` of a GPU with that much memory."""
    return min(CHUNK_ELSEWHERE << int(math.log2(max(1.0, num_bytes / BYTES_PER_CHUNK))), MOST_CHUNK)


def plan_rows(chains: Tensor, is_scored: Tensor, *, size: int) -> ChunkPlan:
    """Chunks of `size` positions, for chains without gaps: a depth scores only positions that all smaller ones score,
    so a chunk's are sorted such that each depth scores the first of them.

    Args: chains, is_scored: [K, P] the chain of each depth at each position, and whether it is scored there.
    """
    num_depths = len(chains)
    counts = is_scored.sum(0)  # [P]
    positions = counts.nonzero()[:, 0]  # [M]
    chunks = torch.arange(len(positions), device=positions.device) // size
    order = torch.argsort(chunks * (num_depths + 1) + num_depths - counts[positions], stable=True)
    positions = positions[order]
    num_chunks = max(1, -(-len(positions) // size))  # one even without positions, to keep all parameters in the graph
    totals = torch.zeros(num_chunks, num_depths, dtype=torch.long, device=positions.device)
    totals.index_add_(0, chunks, is_scored[:, positions].T.long())
    scored = [[slice(num) for num in chunk] for chunk in totals.tolist()]
    return ChunkPlan(positions, chains[:, positions], scored, size)


def plan_gaps(chains: Tensor, is_scored: Tensor, *, size: int) -> ChunkPlan:
    """`plan_rows` for depths that may score any positions."""
    num_depths, positions = len(chains), is_scored.any(0).nonzero()[:, 0]  # [M]
    num_chunks = max(1, -(-len(positions) // size))
    depths, at = is_scored[:, positions].nonzero().T  # by depth, then by position
    totals = torch.bincount(depths * num_chunks + at // size, minlength=num_depths * num_chunks)
    parts = (at % size).split(totals.tolist())
    scored = [[parts[depth * num_chunks + i] for depth in range(num_depths)] for i in range(num_chunks)]
    return ChunkPlan(positions, chains[:, positions], scored, size)


class Scoring(torch.autograd.Function):
    """Computes gradients in forward; backward scales them in place, so it can run only once."""

    @staticmethod
    def forward(ctx: Any, drafts: "Drafts", *tensors: Tensor) -> Tensor:
        ctx.grads = drafts.gradients()
        return (drafts.sums * drafts.coefficients).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads, ctx.grads = ctx.grads, None  # drop the reference, so that autograd need not copy them
        if grads is None:
            raise RuntimeError("the loss of drafts can be differentiated once")
        torch._foreach_mul_([x for x in grads if x is not None], grad)  # pyright: ignore[reportPrivateImportUsage]
        return None, *grads


@dataclass(kw_only=True)
class Drafts:
    """The drafts of K depths for N chains, what they are scored against over P positions, and the scores."""

    hidden: Sequence[Tensor]  # per depth [N, D] input of the output layer
    specs: Sequence[LossSpec]  # per depth
    coefficients: Tensor  # [K] factor on each of the depth's losses in the total
    teacher_hidden: Tensor  # [P, D] the target's post-norm states, by position
    labels: Tensor  # [P] target ids
    weights: Tensor | None  # [P] of the labels; None: all 1
    plan: ChunkPlan
    parameters: Sequence[nn.Parameter] = ()  # all parameters that `draft_logits` and `predicted_state` use
    has_one_output: bool = False  # whether `draft_logits` is the same for all depths

    def __post_init__(self) -> None:
        self.with_gradients = torch.is_grad_enabled()
        shape = len(self.hidden), len(self.hidden[0])
        self.sums = self.coefficients.new_zeros(len(self.hidden))  # [K] sums of weighted losses
        self.guesses = self.labels.new_full(shape, -1)  # [K, N] the most probable target id; -1: not scored
        self.hidden_grads = [torch.zeros_like(states) for states in self.hidden] if self.with_gradients else []
        self.parameter_grads: list[Tensor | None] = [None] * len(self.parameters)

    def score(self) -> Tensor:
        """The loss, differentiable in `hidden` and `parameters`; fills sums and guesses."""
        return Scoring.apply(self, *self.hidden, *self.parameters)  # pyright: ignore[reportReturnType]

    def gradients(self) -> list[Tensor | None]:
        """The gradients of `hidden` and `parameters`, in one pass over the chunks."""
        plan = self.plan
        for i in range(len(plan.scored)):
            positions = plan.positions[plan.positions_of(i)]  # [n]
            target = TargetRows(self.specs[0], self.teacher_hidden[positions])
            depths = [plan.rows_of(i, k) for k in range(len(self.hidden))]
            for group in [depths] if self.has_one_output else [[rows] for rows in depths]:
                if i == 0 or any(len(rows.chains) for rows in group):  # once, to keep all parameters in the graph
                    self._score(group, positions, target)
        return [*self.hidden_grads, *self.parameter_grads]

    def _score(self, group: list[DepthRows], positions: Tensor, target: TargetRows) -> None:
        """Score depths that share an output layer, at positions of a chunk."""
        hidden = torch.cat([self.hidden[rows.depth][rows.chains] for rows in group])  # [n, D]
        with torch.set_grad_enabled(self.with_gradients):
            hidden = hidden.detach().requires_grad_(self.with_gradients)
            logits = self.specs[group[0].depth].draft_logits(hidden)  # [n, Vd]
        of_logits = torch.empty_like(logits) if self.with_gradients else None
        of_states: Tensor | None = None  # [n, D] gradients of losses of the predicted state
        end = 0
        for depth, chains, at in group:
            here, where = slice(end, end := end + len(chains)), positions[at]
            drafted = Rows(self.specs[depth], hidden[here], self.labels[where], target, at)
            weights = None if self.weights is None else self.weights[where].float()
            out = None if of_logits is None else of_logits[here]
            of_state = self._score_depth(depth, chains, drafted, logits[here].detach(), weights, out=out)
            if of_state is not None:
                of_states = torch.zeros_like(hidden) if of_states is None else of_states
                of_states[here] = of_state
        if of_logits is None:
            return
        inputs = [hidden, *edges_of(self.parameters, logits)]
        of_hidden, *of_parameters = torch.autograd.grad(logits, inputs, of_logits, allow_unused=True)
        self._add(of_parameters)
        of_hidden = of_hidden if of_states is None else of_hidden + of_states
        for (depth, chains, _), part in zip(group, of_hidden.split([len(rows.chains) for rows in group]), strict=True):
            self.hidden_grads[depth][chains] = part

    def _score_depth(
        self, depth: int, chains: Tensor, drafted: Rows, logits: Tensor, weights: Tensor | None, *, out: Tensor | None
    ) -> Tensor | None:
        """Record the loss and the best guesses of one depth's chains [n].

        Args: logits: [n, Vd]. weights: [n]. out: [n, Vd] receives the gradient of the logits; None: it is not wanted.
        Returns: [n, D] the gradient of the predicted states, where a loss is of these.
        """
        scale, of_state = self.coefficients[depth] if weights is None else weights * self.coefficients[depth], None
        if out is not None and all(name in CLOSED for name in drafted.spec.mix):
            values, guesses = closed_mix(drafted, logits, scale, out=out)
        else:
            drafted.draft_logits = logits.float()  # computed already
            guesses = drafted.best()
            if out is None:
                values = mix_of(drafted)
            else:
                values, out[:], of_state = self._differentiate(drafted, scale)
        vocabulary = drafted.spec.vocabulary
        guesses = guesses if vocabulary is None else vocabulary.to_target[guesses]
        self.sums[depth] += (values if weights is None else values * weights).sum()
        self.guesses[depth, chains] = guesses
        return of_state

    def _differentiate(self, rows: Rows, scale: Tensor) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """Any mix by autograd: values [n], and the gradients of draft_logits and of hidden (None if unused)."""
        leaves = [x.detach().requires_grad_() for x in (rows.draft_logits, rows.hidden)]
        rows.draft_logits, rows.hidden = leaves
        with torch.enable_grad():
            values = mix_of(rows)
            of_logits, of_hidden, *of_parameters = torch.autograd.grad(
                (values * scale).sum(), [*leaves, *self.parameters], allow_unused=True
            )
        self._add(of_parameters)
        return values.detach(), 0.0 if of_logits is None else of_logits, of_hidden

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a chunk's gradients of the parameters."""
        for i, gradient in enumerate(gradients):
            total = self.parameter_grads[i]
            if gradient is not None:
                self.parameter_grads[i] = gradient.float() if total is None else total.add_(gradient)


def edges_of(parameters: Sequence[nn.Parameter], logits: Tensor) -> list[Any]:
    """Graph edges at which to take the parameters' gradients: below autocast's casts, in its dtype, so that a large
    output layer's gradient needs no extra fp32 copy per chunk."""
    edges: dict[int, Any] = {id(parameter): parameter for parameter in parameters}
    visited, waiting = set(), [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for after, _ in node.next_functions:
            parameter = getattr(after, "variable", None)
            if parameter is not None and id(parameter) in edges and node.name() == "ToCopyBackward0":
                edges[id(parameter)] = torch.autograd.graph.GradientEdge(node, 0)
            waiting.append(after)
    return list(edges.values())


def mix_of(rows: Rows) -> Tensor:
    """[n] the weighted sum of the mix's losses."""
    return sum((weight * ALL_LOSSES[name](rows) for name, weight in rows.spec.mix.items()), rows.hidden.new_zeros(()))


def summed_loss(
    hidden: Tensor,
    spec: LossSpec,
    *,
    labels: Tensor,
    teacher_hidden: Tensor,
    weights: Tensor | None = None,
    size: int,
) -> Tensor:
    """A mix summed over rows of one depth, a scalar in fp32; the output layer gets no gradient.

    Args: as in `Drafts`, with N rows each. size: rows per chunk, see `chunk_size`.
    """
    rows = torch.arange(len(hidden), device=hidden.device)[None]
    return Drafts(
        hidden=[hidden],
        specs=[spec],
        coefficients=torch.ones(1, device=hidden.device),
        teacher_hidden=teacher_hidden,
        labels=labels,
        weights=weights,
        plan=plan_rows(rows, torch.ones_like(rows, dtype=torch.bool), size=size),
    ).score()
