"""Losses of drafts against the target, by name and in weighted mixes, on supervised positions only.

A loss is a function of `Rows` listed in `LOSSES`. Quantities that several losses read, such as the draft's
log-probabilities, are computed once per chunk, on first use.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import BadInput

TensorMap = Callable[[Tensor], Tensor]
TOP_K = 10  # of the target's tokens, that `topk_ce` reads
EXPONENT = 0.5  # g of `greedy_gce`


@dataclass
class DraftVocabulary:
    """The target tokens that a head can draft (EAGLE-3: `d2t`, `t2d`). Ids ascend."""

    to_target: Tensor  # [Vd] target id of each draft id
    to_draft: Tensor  # [V] draft id of each target id, -1 where it has none

    @classmethod
    def of(cls, target_ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        to_draft = torch.full((vocab_size,), -1, dtype=torch.long, device=target_ids.device)
        to_draft[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        return cls(target_ids, to_draft)


@dataclass(kw_only=True)
class LossSpec:
    """The loss of a head at one depth."""

    mix: Mapping[str, float]  # weight of each loss of `LOSSES`
    draft_logits: TensorMap  # [n, D] hidden -> [n, Vd]
    predicted_state: TensorMap  # [n, D] hidden -> [n, D] the head's estimate of the target's post-norm state
    target_logits: TensorMap  # [n, D] post-norm state -> [n, V]
    restricted_logits: TensorMap  # [n, D] post-norm state -> [n, Vd] those of the tokens that can be drafted
    confidence: TensorMap | None = None  # [n, D] hidden -> [n] logits of the probability that a draft is accepted
    # hidden [n, D], logits [n, Vd] -> draft ids [n, k] of the tokens among which drafting chooses; None: all
    candidates: Callable[[Tensor, Tensor], Tensor] | None = None
    # hidden [n, D], and their logits and draft ids [n, k] -> [n, k] by which it chooses
    select: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    vocabulary: DraftVocabulary | None = None


def output_layer_rows(output_layer: nn.Module, vocabulary: DraftVocabulary | None) -> dict[str, Tensor]:
    """The state dict of the target's output layer, restricted to the draft vocabulary; None: the whole."""
    rows = output_layer.state_dict()
    return rows if vocabulary is None else {name: value[vocabulary.to_target] for name, value in rows.items()}


@dataclass
class TargetRows:
    """The target's side of n rows, computed on first use and cached, as drafts of several depths are scored against it.

    With a draft vocabulary, the target's distribution is normalised over all tokens and then restricted to the drafted
    ones: their probabilities sum to less than 1, and no row is dropped.
    """

    spec: LossSpec
    teacher_hidden: Tensor  # [n, D] the target's post-norm states

    @cached_property
    def logits(self) -> Tensor:
        """[n, V] fp32, without gradient."""
        with self._as_the_target_computes():
            return self.spec.target_logits(self.teacher_hidden).float()

    @cached_property
    def probs(self) -> Tensor:
        """[n, Vd]; a row sums to the probability that the draft vocabulary covers."""
        return self._drafted(self.logits.softmax(-1))

    @cached_property
    def renormalised(self) -> Tensor:
        """[n, Vd] `probs` over their sum, without computing the logits of other tokens."""
        with self._as_the_target_computes():
            return self.spec.restricted_logits(self.teacher_hidden).float().softmax(-1)

    @cached_property
    def log_probs(self) -> Tensor:
        """[n, Vd]."""
        return self._drafted(self.logits.log_softmax(-1))

    @cached_property
    def covered(self) -> Tensor:
        """[n] the probability of the tokens that can be drafted."""
        return self.probs.sum(-1)

    @cached_property
    def negative_entropy(self) -> Tensor:
        """[n] sum_v p(v) log p(v) over the tokens that can be drafted."""
        return (self.probs * self.log_probs).sum(-1)

    @cached_property
    def best(self) -> Tensor:
        """[n] the draft id of the most probable token, -1 where the draft vocabulary lacks it."""
        ids = self.logits.argmax(-1)
        return ids if self.spec.vocabulary is None else self.spec.vocabulary.to_draft[ids]

    @contextmanager
    def _as_the_target_computes(self) -> Iterator[None]:
        """In its own dtype, as its states were computed, whatever the precision of training."""
        with torch.no_grad(), torch.autocast(self.teacher_hidden.device.type, enabled=False):
            yield

    def _drafted(self, of_target: Tensor) -> Tensor:
        return of_target if self.spec.vocabulary is None else of_target[:, self.spec.vocabulary.to_target]


@dataclass
class Rows:
    """n rows of one depth, the argument of a loss; derived tensors are computed on first use and cached."""

    spec: LossSpec
    hidden: Tensor  # [n, D] input of the draft's output layer
    labels: Tensor  # [n] target ids to be predicted
    target: TargetRows  # of all rows of the chunk, shared by all depths
    at: slice | Tensor = field(default_factory=lambda: slice(None))  # indices [n] of these rows in `target`

    @cached_property
    def draft_logits(self) -> Tensor:
        """[n, Vd] fp32."""
        return self.spec.draft_logits(self.hidden).float()

    @cached_property
    def draft_log_probs(self) -> Tensor:
        """[n, Vd]."""
        return self.draft_logits.log_softmax(-1)

    @cached_property
    def overlap(self) -> Tensor:
        """[n] sum_v min(p(v), q(v)): the probability that a sampled draft is accepted (Leviathan et al. 2023)."""
        return torch.minimum(self.target_probs, self.draft_log_probs.exp()).sum(-1)

    @cached_property
    def candidates(self) -> Tensor:
        """[n, k] draft ids of the tokens of which `select` chooses."""
        assert self.spec.candidates is not None
        return self.spec.candidates(self.hidden.detach(), self.draft_logits.detach())

    def selected(self) -> Tensor:
        """[n, k] fp32 logits of the candidates by which drafting chooses."""
        assert self.spec.select is not None
        return self.spec.select(self.hidden, self.draft_logits.gather(-1, self.candidates), self.candidates).float()

    def best(self) -> Tensor:
        """[n] draft ids that are drafted first."""
        if self.spec.select is None:
            return self.draft_logits.argmax(-1)
        with torch.no_grad():
            return self.candidates.gather(-1, self.selected().argmax(-1, keepdim=True))[:, 0]

    @cached_property
    def draft_labels(self) -> Tensor:
        """[n] draft ids of the labels, -1 where the draft vocabulary has none."""
        return self.labels if self.spec.vocabulary is None else self.spec.vocabulary.to_draft[self.labels]

    @property
    def target_probs(self) -> Tensor:
        """[n, Vd], without gradient."""
        return self.target.probs[self.at]

    @property
    def target_log_probs(self) -> Tensor:
        """[n, Vd], without gradient."""
        return self.target.log_probs[self.at]


# the losses, [n] each: p is the target's distribution, q the draft's


def hard_ce(rows: Rows) -> Tensor:
    """-log q(label) (Medusa, eq. 1); a label outside the draft vocabulary contributes zero."""
    return F.nll_loss(rows.draft_log_probs, rows.draft_labels, ignore_index=-1, reduction="none")


def greedy_gce(rows: Rows) -> Tensor:
    """(1 - q(best)^g) / g, g EXPONENT: the generalised cross entropy (Zhang and Sabuncu 2018) of the target's most
    probable token, which verification accepts at temperature 0: cross entropy as g -> 0, 1 - q at g = 1.

    Its gradient is that of -log q times q^g, so tokens that a small head cannot predict, whose -log q would dominate,
    count less than those that greedy drafting can get accepted.
    """
    labels = rows.target.best[rows.at]
    loss = F.nll_loss(rows.draft_log_probs, labels, ignore_index=-1, reduction="none")
    return -torch.expm1(-EXPONENT * loss) / EXPONENT


def soft_ce(rows: Rows) -> Tensor:
    """-sum_v p(v) log q(v) (EAGLE-3, section 3.1).

    With a draft vocabulary, its gradient is that for the renormalised p times the covered probability.
    """
    return -(rows.target_probs * rows.draft_log_probs).sum(-1)


def restricted_ce(rows: Rows) -> Tensor:
    """soft_ce for p renormalised over the draft vocabulary; a label outside of it contributes zero.

    The target's other logits are not computed, which saves most of its output layer's time. soft_ce weighs a position
    by the probability that the draft vocabulary covers there, this by whether it has the data's token.
    """
    entropy = -(rows.target.renormalised[rows.at] * rows.draft_log_probs).sum(-1)
    return entropy * (rows.draft_labels >= 0)


def kl(rows: Rows) -> Tensor:
    """sum_v p(v) log(p(v) / q(v)): soft_ce minus the target's entropy, so it has the same gradient and is 0 at p = q.

    With a draft vocabulary that covers probability m, the minimum is m log m, at q = p / m.
    """
    return (rows.target_probs * (rows.target_log_probs - rows.draft_log_probs)).sum(-1)


def topk_ce(rows: Rows) -> Tensor:
    """soft_ce over the TOP_K most probable tokens of the draft vocabulary (HASS, Zhang et al. 2025)."""
    probs, ids = rows.target_probs.topk(min(TOP_K, rows.target_probs.shape[-1]), -1)  # [n, top_k]
    return -(probs * rows.draft_log_probs.gather(-1, ids)).sum(-1)


def l1(rows: Rows) -> Tensor:
    """sum_v |p(v) - q(v)| over the target's whole vocabulary, 2 - 2 sum_v min(p(v), q(v)): twice the chance that a
    sampled draft is rejected (Leviathan et al. 2023). DSpark: hard_ce 0.1 and l1 0.9.

    Its gradient vanishes where p and q hardly overlap, so alone and from scratch it trains badly (Samarin et al. 2026).
    """
    return 2 * (1 - rows.overlap)


def feature(rows: Rows) -> Tensor:
    """Smooth L1 between the predicted and the target's own post-norm state, mean over D (EAGLE-1: 1.0 beside
    soft_ce 0.1). Alone it trains no output layer."""
    predicted, true = rows.spec.predicted_state(rows.hidden), rows.target.teacher_hidden[rows.at]
    return F.smooth_l1_loss(predicted.float(), true.float(), reduction="none").mean(-1)


def confidence(rows: Rows) -> Tensor:
    """Binary cross entropy of the head's estimate of acceptance, against the probability that a sampled draft is
    accepted (DSpark: 1.0 beside hard_ce 0.1 and l1 0.9)."""
    assert rows.spec.confidence is not None
    estimate = rows.spec.confidence(rows.hidden).float()
    return F.binary_cross_entropy_with_logits(estimate, rows.overlap.detach().clamp(0, 1), reduction="none")


def selection(rows: Rows) -> Tensor:
    """Cross entropy of the choice among a slot's candidates; a label that is none of them contributes zero (DFlash2:
    1.0 beside hard_ce 1.0)."""
    is_label = rows.candidates == rows.draft_labels[:, None]  # [n, k]
    return -(rows.selected().log_softmax(-1) * is_label).sum(-1)


LOSSES: dict[str, Callable[[Rows], Tensor]] = {
    loss.__name__: loss for loss in (hard_ce, greedy_gce, soft_ce, restricted_ce, kl, topk_ce, l1, feature)
}
# including those that heads with a confidence head or a selector add to their mix
ALL_LOSSES = {**LOSSES, "confidence": confidence, "selection": selection}


def reads_all_logits(mix: Mapping[str, float]) -> bool:
    """Whether a mix reads the target's logits of tokens that cannot be drafted."""
    return not set(mix) <= {"hard_ce", "restricted_ce", "feature", "selection"}


def check_mix(mix: Mapping[str, float], *, key: str) -> None:
    """Raises BadInput unless the mix has known names and positive weights. Args: key: the mix's key in the config."""
    if not mix:
        raise BadInput(f"{key} {{}}: expected at least one of {', '.join(LOSSES)}")
    for name, weight in mix.items():
        if name not in LOSSES:
            raise BadInput(f"{key}.{name}: unknown loss; expected some of {', '.join(LOSSES)}")
        if not (weight > 0 and math.isfinite(weight)):
            raise BadInput(f"{key}.{name} {weight}: expected a weight above 0; leave a loss out to have none of it")


DEPTH_WEIGHTS = ("geometric", "normalised", "exponential")


def depth_weights_of(kind: str, *, decay: float, num_depths: int) -> list[float]:
    """The weight of the loss at each depth k, from 0.

    geometric: decay^k (Medusa, EAGLE-3). normalised: decay^k / sum_j decay^j (FastMTP's alpha_k). exponential:
    exp(-k / decay) (DFlash, DSpark: decay 4 and more).

    Raises: BadInput on an unknown kind or a decay that is not above 0.
    """
    if kind not in DEPTH_WEIGHTS:
        raise BadInput(f"depth_weights {kind!r}: expected one of {', '.join(DEPTH_WEIGHTS)}")
    if not (decay > 0 and math.isfinite(decay)):
        raise BadInput(f"depth_decay {decay}: expected more than 0")
    if kind == "exponential":
        return [math.exp(-k / decay) for k in range(num_depths)]
    weights = [decay**k for k in range(num_depths)]
    return [w / sum(weights) for w in weights] if kind == "normalised" else weights
