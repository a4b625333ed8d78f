"""The draft vocabulary: the target tokens that answers really use, so that the draft lm_head can be small."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..configs.errors import BadInput
from .storage.samples import Sample


def count_supervised(samples: Iterable[Sample], *, vocab_size: int) -> np.ndarray:
    """How often each token id is supervised: [vocab_size] int64. BadInput: an id outside the vocabulary."""
    counts = np.zeros(vocab_size, dtype=np.int64)  # [V]
    for sample in samples:
        ids = sample.input_ids[sample.loss_mask]
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise BadInput(f"token id {outside[0]} is outside the target's vocabulary of {vocab_size}")
        np.add.at(counts, ids, 1)
    return counts


def draft_vocabulary(counts: np.ndarray, *, size: int, always: Sequence[int] = ()) -> torch.LongTensor:
    """The `size` target token ids most frequent at supervised positions, ascending: [size], int64.

    The ids in `always` (see `always_kept`) are kept whatever their count. Ties, and the places left when fewer than
    `size` ids were seen, go to the lowest ids. BadInput: a size outside 1..vocab_size or below the number of `always`
    ids, one of those outside the vocabulary.

    Args: counts: [V], `count_supervised`.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise BadInput(f"draft vocabulary of {size} tokens: should be between 1 and the target's {vocab_size}")
    if len(set(always)) > size:
        raise BadInput(f"draft vocabulary of {size} tokens: {len(set(always))} ids are to be kept always")
    for token_id in always:
        if not 0 <= token_id < vocab_size:
            raise BadInput(f"token id {token_id} is outside the target's vocabulary of {vocab_size}")
    return torch.LongTensor(np.sort(_most_frequent_first(counts, always)[:size]))


def always_kept(tokenizer: Any, *, eos_token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids that a draft vocabulary holds whatever the data: what ends a text, the tokenizer's special tokens, and
    the added tokens that its chat template writes; ascending."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else "".join(map(str, template.values()))
    written = {token_id for token, token_id in tokenizer.get_added_vocab().items() if token in text}
    ids = {*eos_token_ids, *tokenizer.all_special_ids, *written}
    return sorted(token_id for token_id in ids if token_id < vocab_size)


def coverage(counts: np.ndarray, ids: torch.Tensor) -> float:
    """The share (0..1) of supervised tokens that are in the draft vocabulary `ids`: [size].

    BadInput when no token is supervised.
    """
    if not counts.any():
        raise BadInput("coverage of a draft vocabulary: no token is supervised")
    return float(counts[ids.numpy()].sum() / counts.sum())


def coverage_curve(counts: np.ndarray, *, always: Sequence[int] = (), num_points: int = 64) -> list[tuple[int, float]]:
    """(size, coverage) of draft vocabularies from the smallest possible to the whole, evenly spaced in log size."""
    smallest = max(1, len(set(always)))
    sizes = np.unique(np.geomspace(smallest, len(counts), num_points).round().astype(int))
    covered = counts[_most_frequent_first(counts, always)].cumsum() / max(1, counts.sum())
    return [(int(size), float(covered[size - 1])) for size in sizes]


def _most_frequent_first(counts: np.ndarray, always: Sequence[int]) -> np.ndarray:
    """All token ids [V], those in `always` before the others, ties by the lowest id."""
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    return np.argsort(-rank, kind="stable")
