"""The contract of a head: what it reads of the target, how it is trained, how it drafts.

Shape legend, used everywhere: B rows, T positions, K draft depth, S chain starts per row, D hidden size, V target
vocabulary, Vd draft vocabulary, L captured layers, N attention heads, H head dimension, Q positions of one forward.

One definition of position and label serves training and decoding. A draft chain starts at position t, where the target
has read x_0..x_t and has itself produced x_{t+1}. The draft at depth k (0-based) predicts x_{t+2+k}. So a round that
follows n committed tokens starts at t = n - 2, and the first round of an answer starts at the last prompt position.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..configs.errors import BadInput
from .drafting import Draws, Proposal, StaticTree, Tree, draft_chain, draft_dynamic, draft_static
from .losses import DraftVocabulary, summed_loss
from .target import Target, TargetOutput


@dataclass(kw_only=True)
class HeadConfig:
    """What every family can be told; each family adds its own keys.

    feature_layers: HF `hidden_states` indices that the head reads; None: the family's default for the target's depth.
    num_depths: how many tokens ahead the head is trained to draft.
    depth_decay: weight of the loss at depth k is depth_decay ** k.
    labels: `soft`, the target's distribution, or `hard`, the tokens of the data.
    draft_vocab_size: draft only this many tokens, the most frequent in the training data; None: all.
    """

    type: str
    feature_layers: list[int] | None = None
    num_depths: int = 4
    depth_decay: float = 0.8
    labels: str = "soft"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.labels not in ("soft", "hard"):
            raise BadInput(f"labels {self.labels!r}: expected soft or hard")
        if self.num_depths < 1:
            raise BadInput(f"num_depths {self.num_depths}: expected at least 1")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class ChainStarts:
    """Where draft chains of a batch start, row by row, padded to the row with the most.

    positions: [B, S] start t of each chain. valid: [B, S, K] whether depth k of the chain is supervised.
    """

    positions: Tensor
    valid: Tensor

    def take(self, values: Tensor, *, offset: int = 0) -> Tensor:
        """values [B, T, ...] at position t + offset of each chain: [B, S, ...]; beyond the end, the last position."""
        index = (self.positions + offset).clamp(max=values.shape[1] - 1)
        rows = torch.arange(len(values), device=values.device)[:, None]  # [B, 1]
        return values[rows, index]


def chain_starts(loss_mask: Tensor, num_depths: int) -> ChainStarts:
    """The chains that decoding could run on these rows.

    Depth k of the chain that starts at t is supervised iff x_{t+1}, ..., x_{t+2+k} all are: x_{t+1} is the token that
    the target itself produced, so the first start of an answer is the last position of its prompt.

    Args: loss_mask: [B, T] bool, True on supervised tokens.
    """
    num_rows, num_positions = loss_mask.shape
    ends = torch.arange(num_positions, device=loss_mask.device).expand_as(loss_mask)
    stops = torch.where(loss_mask, num_positions, ends)  # [B, T] first unsupervised position at or after each ...
    stops = stops.flip(1).cummin(1).values.flip(1)
    run = torch.zeros_like(stops)  # [B, T] supervised tokens in a row from t + 1 on
    run[:, :-1] = stops[:, 1:] - ends[:, 1:]
    is_start = run >= 2
    num_starts = max(1, int(is_start.sum(1).max()))
    positions = torch.argsort(~is_start, dim=1, stable=True)[:, :num_starts]  # [B, S] starts first, in order
    depths = torch.arange(num_depths, device=loss_mask.device)
    valid = run.gather(1, positions)[..., None] >= depths + 2  # [B, S, K]
    return ChainStarts(positions, valid)


@dataclass
class DraftBatch:
    """Right-padded rows and what the target made of them; filled by the live target or from shards, alike.

    input_ids: [B, T]. loss_mask: [B, T] bool, True on the tokens that count. output: the target's states on the rows.
    """

    input_ids: Tensor
    loss_mask: Tensor
    output: TargetOutput


@dataclass
class LossOutput:
    """loss: scalar. depth_loss [K] sums, depth_count [K] supervised rows, over this batch. hits: [B, S, K] whether the
    greedy draft token is the data's token, given the data's tokens before it; False where not valid."""

    loss: Tensor
    depth_loss: Tensor
    depth_count: Tensor
    starts: ChainStarts
    hits: Tensor


@dataclass
class Reading:
    """What the target read in one forward: Q positions per row, of which the first num_valid hold committed tokens.

    tokens: [B, Q] the token at each position (x_p). next_tokens: [B, Q] the one that follows it (x_{p+1}). output: the
    target's states. start: [B] the first position. num_valid: [B]; what lies beyond was rejected or is padding. 0 in
    rows that had ended.
    """

    tokens: Tensor
    next_tokens: Tensor
    output: TargetOutput
    start: Tensor
    num_valid: Tensor

    @property
    def last(self) -> Tensor:
        """[B] index, among the Q, of the last committed position."""
        return (self.num_valid - 1).clamp(min=0)


class Drafter(Protocol):
    """Anything that proposes tokens to the engine. `state` is the drafter's own and opaque to everyone else."""

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


class DraftHead(nn.Module):
    """A trained drafter. A family subclasses this in one file; see medusa.py for the smallest.

    The target is held outside the module tree: its parameters are in no optimizer, gradient or checkpoint of the head.
    """

    config_class: ClassVar[type[HeadConfig]] = HeadConfig
    default_draft_tokens: ClassVar[int] = 5

    def __init__(self, config: HeadConfig, target: Target, draft_token_ids: Tensor | None = None):
        """Args: draft_token_ids: [Vd] ascending target ids, where the config cuts the draft vocabulary."""
        super().__init__()
        self.config = config
        object.__setattr__(self, "target", target)  # not a submodule
        self.target: Target
        self.vocabulary: DraftVocabulary | None = None
        if config.draft_vocab_size is not None:
            if draft_token_ids is None or len(draft_token_ids) != config.draft_vocab_size:
                raise BadInput(f"head.draft_vocab_size {config.draft_vocab_size}: needs as many draft token ids")
            self.vocabulary = DraftVocabulary.of(draft_token_ids.to(target.device), target.vocab_size)

    # what a family says of itself

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.feature_layers or ())

    @property
    def max_draft_tokens(self) -> int | None:
        return None

    @property
    def num_depths(self) -> int:
        return self.config.num_depths

    def serving_config(self) -> dict[str, Any]:
        """The keys of config.json that serving engines read."""
        raise NotImplementedError

    # training

    def unroll(self, batch: DraftBatch, starts: ChainStarts) -> Iterator[Tensor]:
        """Teacher-forced drafting: for each depth, [B, S, D] what `draft_logits` reads for every chain start."""
        raise NotImplementedError

    def draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """[..., D] -> [..., Vd] draft logits at a depth."""
        raise NotImplementedError

    def forward(self, batch: DraftBatch, denominators: Tensor | None = None) -> LossOutput:
        """The loss; named forward so that distributed wrappers see it."""
        return self.loss(batch, denominators)

    def loss(self, batch: DraftBatch, denominators: Tensor | None = None) -> LossOutput:
        """sum_k depth_decay^k * (mean over supervised chains of the loss at depth k).

        Args: denominators: [K] number of supervised chains per depth over all ranks and accumulated batches; None:
            of this batch.
        """
        starts = chain_starts(batch.loss_mask, self.num_depths)
        counts = starts.valid.sum((0, 1)).float()  # [K]
        denominators = counts if denominators is None else denominators
        sums, hits = [], torch.zeros_like(starts.valid)
        for depth, hidden in enumerate(self.unroll(batch, starts)):
            valid = starts.valid[..., depth]
            labels = starts.take(batch.input_ids, offset=depth + 2)[valid]  # [rows]
            teacher = starts.take(batch.output.post_norm, offset=depth + 1)[valid]  # [rows, D]
            total, tokens = summed_loss(
                hidden[valid],
                draft_logits=lambda x, depth=depth: self.draft_logits(x, depth),
                labels=labels,
                teacher_hidden=teacher if self.config.labels == "soft" else None,
                target_logits=self.target.logits,
                vocabulary=self.vocabulary,
            )
            sums.append(total)
            hits[..., depth][valid] = tokens == labels
        depth_loss = torch.stack(sums)  # [K]
        weights = self.config.depth_decay ** torch.arange(self.num_depths, device=depth_loss.device)
        loss = (weights * depth_loss / denominators.clamp(min=1)).sum()
        return LossOutput(loss, depth_loss.detach(), counts, starts, hits)

    @torch.no_grad()
    def teacher_forced_logits(self, batch: DraftBatch) -> tuple[ChainStarts, Tensor]:
        """[B, S, K, Vd] fp32 draft logits that the loss scores; for tests and small inputs."""
        starts = chain_starts(batch.loss_mask, self.num_depths)
        logits = [self.draft_logits(h, depth).float() for depth, h in enumerate(self.unroll(batch, starts))]
        return starts, torch.stack(logits, 2)

    # drafting: see `Drafter` and `drafting.Expands`

    def begin(self, *, batch_size: int, max_length: int) -> Any:
        raise NotImplementedError

    def commit(self, state: Any, read: Reading) -> None:
        raise NotImplementedError

    def first_logits(self, state: Any) -> Tensor:
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, parents: Tensor | None, *, depth: int) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def propose(self, state: Any, *, num_draft_tokens: int) -> Proposal:
        return draft_chain(self, state, num_draft_tokens=num_draft_tokens)

    @torch.no_grad()
    def propose_tree(self, state: Any, tree: Tree, *, draws: Draws | None = None) -> Proposal:
        """Draft a tree instead of a chain; with `draws`, a sampled one. Raises BadInput where it is too deep."""
        if tree.depth > (self.max_draft_tokens or tree.depth):
            raise BadInput(f"a tree of depth {tree.depth}: this head drafts {self.max_draft_tokens} tokens ahead")
        if isinstance(tree, StaticTree):
            return draft_static(self, state, tree, draws if tree.sampled else None)
        return draft_dynamic(self, state, tree)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocabulary is None else self.vocabulary.to_target[draft_ids]
