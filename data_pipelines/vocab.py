"""The draft vocabulary: a head drafts only the target's most frequent tokens, so that its output layer is small."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..base.errors import BadInput
from .rows.samples import Sample

SIZE_STEP = 256  # of which the size of a draft vocabulary is a multiple
# a token is worth drafting if its share of the answers is this many times its row's share of the target's weights: the
# output layer's row is read for each drafted token
WORTH = 5.0


def count_supervised(samples: Iterable[Sample], *, vocab_size: int) -> np.ndarray:
    """[vocab_size] int64: how often each token id is supervised. Raises BadInput on an id outside the vocabulary."""
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V]
    for sample in samples:
        ids = sample.input_ids[sample.loss_mask]
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise BadInput(f"token id {outside[0]} is outside the target's vocabulary of {vocab_size}")
        np.add.at(counts, ids, 1)
    return counts


def most_frequent(counts: np.ndarray, *, size: int, always: Sequence[int] = ()) -> torch.LongTensor:
    """[size] int64, ascending: the `size` target token ids with the highest counts; of equal counts the lowest ids.

    Args:
        counts: [V] from `count_supervised`.
        always: ids to include whatever their count, see `always_kept`.
    Raises: BadInput if size is outside 1..V or below the number of `always` ids, or one of these is outside 0..V-1.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise BadInput(f"draft vocabulary of {size} tokens: should be between 1 and the target's {vocab_size}")
    if len(set(always)) > size:
        raise BadInput(f"draft vocabulary of {size} tokens: {len(set(always))} ids must always be kept")
    for token_id in always:
        if not 0 <= token_id < vocab_size:
            raise BadInput(f"token id {token_id} is outside the target's vocabulary of {vocab_size}")
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    return torch.LongTensor(np.sort(np.argsort(-rank, kind="stable")[:size]))


def always_kept(tokenizer: Any, *, eos_token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The token ids, ascending, that a draft vocabulary includes whatever the data: end-of-text tokens, the tokenizer's
    special tokens, and added tokens that occur in its chat template."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else "".join(map(str, template.values()))
    written = {token_id for token, token_id in tokenizer.get_added_vocab().items() if token in text}
    ids = {*eos_token_ids, *tokenizer.all_special_ids, *written}
    return sorted(token_id for token_id in ids if token_id < vocab_size)


def coverage(counts: np.ndarray, ids: torch.Tensor) -> float:
    """The share (0..1) of supervised tokens that the draft vocabulary `ids` [size] includes. counts: [V].

    Raises: BadInput if no token is supervised.
    """
    if not counts.any():
        raise BadInput("coverage of a draft vocabulary: no token is supervised")
    return float(counts[ids.numpy()].sum() / counts.sum())


def covering_size(counts: np.ndarray, always: Sequence[int], *, share: float) -> int | None:
    """Size of the smallest draft vocabulary that covers this share (0..1) of the answers' tokens.

    Args:
        counts: [V] from `count_supervised`.
        always: ids to include whatever their count, see `always_kept`.

    Returns None if that is more than half of the target's vocabulary, or nothing was counted.
    """
    sizes = range(in_steps(max(len(set(always)), 1)), len(counts) // 2 + 1, SIZE_STEP) if counts.any() else ()
    enough = (size for size in sizes if coverage(counts, most_frequent(counts, size=size, always=always)) >= share)
    return next(enough, None)


def worthwhile_size(counts: np.ndarray, always: Sequence[int], *, row_share: float) -> tuple[int | None, float | None]:
    """Size and `coverage` of the draft vocabulary of all tokens that occur often enough to be worth their output row.

    Source: our own; docs/log/training_losses.md, 2026-11-25. FR-Spec (Zhao et al. 2025) cuts by frequency too.

    Args: row_share: weights of a row of the output layer, relative to all of the target's. Others: as in
        `covering_size`.
    Returns (None, None) where `covering_size` returns None.
    """
    if not counts.any():
        return None, None
    size = in_steps(max(int((counts >= WORTH * row_share * counts.sum()).sum()), len(set(always)), 1))
    if size > len(counts) // 2:
        return None, None
    return size, round(coverage(counts, most_frequent(counts, size=size, always=always)), 4)


def in_steps(size: int) -> int:
    """The next multiple of SIZE_STEP."""
    return -(-size // SIZE_STEP) * SIZE_STEP
