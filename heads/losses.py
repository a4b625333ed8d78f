"""Losses of draft logits against the target, on supervised positions only and never all logits at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LogitsOf = Callable[[Tensor], Tensor]

CHUNK = 2048  # rows whose logits exist at a time


@dataclass
class DraftVocabulary:
    """The target tokens that a head can draft (EAGLE-3: `d2t`, `t2d`). Ids ascend.

    to_target: [Vd] target id of each draft id. to_draft: [V] draft id of each target id, -1 where it has none.
    """

    to_target: Tensor
    to_draft: Tensor

    @classmethod
    def of(cls, target_ids: Tensor, vocab_size: int) -> "DraftVocabulary":
        to_draft = torch.full((vocab_size,), -1, dtype=torch.long, device=target_ids.device)
        to_draft[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        return cls(target_ids, to_draft)


def soft_cross_entropy(draft_logits: Tensor, target_logits: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """-sum_v p(v) log q(v) per row: the target's distribution p against the draft's q (EAGLE-3, section 3.1).

    With a draft vocabulary, p keeps its full-vocabulary normaliser and only its columns are selected: its gradient
    equals that of the renormalised p, weighted by the probability that the vocabulary covers, so no row is dropped.

    Args: draft_logits [N, Vd], target_logits [N, V]. Returns [N].
    """
    target_probs = target_logits.softmax(-1)
    if vocabulary is not None:
        target_probs = target_probs[:, vocabulary.to_target]  # [N, Vd]
    return -(target_probs * draft_logits.log_softmax(-1)).sum(-1)


def hard_cross_entropy(draft_logits: Tensor, labels: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """-log q(label) per row (Medusa, eq. 1); a label outside the draft vocabulary contributes zero.

    Args: draft_logits [N, Vd], labels [N] target ids. Returns [N].
    """
    if vocabulary is not None:
        labels = vocabulary.to_draft[labels]
    return F.cross_entropy(draft_logits, labels, ignore_index=-1, reduction="none")


def summed_loss(
    hidden: Tensor,
    *,
    draft_logits: LogitsOf,
    labels: Tensor,
    teacher_hidden: Tensor | None,
    target_logits: LogitsOf,
    vocabulary: DraftVocabulary | None,
) -> tuple[Tensor, Tensor]:
    """Loss summed over rows, and the draft's greedy tokens; logits of CHUNK rows exist at a time.

    Args:
        hidden: [N, D] what the draft's output layer reads.
        labels: [N] target ids to be predicted.
        teacher_hidden: [N, D] the target's post-norm state that predicts `labels`: soft labels. None: hard labels.

    Returns: the sum (scalar, fp32) and [N] target ids.
    """

    def of_chunk(hidden: Tensor, labels: Tensor, teacher_hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = draft_logits(hidden).float()  # [n, Vd]
        greedy = logits.detach().argmax(-1)
        if teacher_hidden is None:
            return hard_cross_entropy(logits, labels, vocabulary).sum(), greedy
        with torch.no_grad():
            wanted = target_logits(teacher_hidden)  # [n, V]
        return soft_cross_entropy(logits, wanted, vocabulary).sum(), greedy

    total, greedy = hidden.new_zeros((), dtype=torch.float32), []
    recompute = len(hidden) > CHUNK and torch.is_grad_enabled()
    for start in range(0, max(len(hidden), 1), CHUNK):  # once also for no rows: every parameter stays in the graph
        part = slice(start, start + CHUNK)
        arguments = (hidden[part], labels[part], None if teacher_hidden is None else teacher_hidden[part])
        value, tokens = checkpoint(of_chunk, *arguments, use_reentrant=False) if recompute else of_chunk(*arguments)  # type: ignore[misc]
        total = total + value
        greedy.append(tokens)
    tokens = torch.cat(greedy)
    return total, tokens if vocabulary is None else vocabulary.to_target[tokens]
