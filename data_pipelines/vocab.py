"""The draft vocabulary: the target tokens that answers really use, so that the draft lm_head can be small."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress

import torch

from ..configs.errors import BadInput
from .chat import Sample


def draft_vocabulary(
    samples: Iterable[Sample], *, size: int, vocab_size: int, always: Sequence[int] = ()
) -> torch.LongTensor:
    """The `size` target token ids most frequent at supervised positions, ascending: [size], int64.

    The ids in `always` (eos, other special tokens) are kept whatever their count. Ties, and the places left when fewer
    than `size` ids were seen, go to the lowest ids. BadInput: a size outside 1..vocab_size or below the number of
    `always` ids, an id outside the vocabulary.
    """
    if not 1 <= size <= vocab_size:
        raise BadInput(f"draft vocabulary of {size} tokens: should be between 1 and the target's {vocab_size}")
    if len(set(always)) > size:
        raise BadInput(f"draft vocabulary of {size} tokens: {len(set(always))} ids are to be kept always")
    counts = _count_supervised(samples)
    for token_id in (*always, *counts):
        if not 0 <= token_id < vocab_size:
            raise BadInput(f"token id {token_id} is outside the target's vocabulary of {vocab_size}")
    rank = torch.zeros(vocab_size, dtype=torch.int64)  # [V]
    rank[list(counts.keys())] = torch.tensor(list(counts.values()), dtype=torch.int64)
    rank[list(always)] = torch.iinfo(torch.int64).max
    kept = rank.argsort(descending=True, stable=True)[:size]  # [V] -> [size]; stable: ties to the lowest id
    return torch.LongTensor(kept.sort().values)


def coverage(samples: Iterable[Sample], ids: torch.Tensor) -> float:
    """The share (0..1) of supervised tokens that are in the draft vocabulary `ids`: [size].

    BadInput when no token is supervised.
    """
    counts = _count_supervised(samples)
    if not counts:
        raise BadInput("coverage of a draft vocabulary: no token is supervised")
    kept = set(ids.tolist())
    return sum(count for token_id, count in counts.items() if token_id in kept) / counts.total()


def _count_supervised(samples: Iterable[Sample]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(compress(sample.input_ids, sample.loss_mask))
    return counts
