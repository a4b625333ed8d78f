"""Splits long rows, such as reasoning traces, into pieces that fit, and counts the tokens of each segment."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ..storage.samples import SEGMENTS, Sample

CONTEXT_SHARE = 4  # a later piece repeats earlier tokens in 1/4 of the room after its prompt
SENTENCE_ENDS = tuple(".!?;。！？；")  # noqa: RUF001 (full-width ones end sentences too)


def split_sample(whole: Sample, *, max_length: int, text_of: Callable[[int], str]) -> list[Sample]:
    """A row as pieces of at most `max_length` tokens in which every supervised token is supervised exactly once.

    A piece is the prompt (what precedes the first supervised token; where that is more than half of max_length, its
    first token and its end), then, unsupervised, the tokens before the cut, then new tokens. So the first new token of
    a later piece is predicted behind at least a quarter of the room that the prompt leaves, or all that there was.
    What lies between the prompt and that context is missing: the target's states there are those of the shorter text.

    A cut is made behind a paragraph, else a line, else a sentence, in the second half of the room for new tokens; else
    wherever that ends. Pieces without a supervised token are left out. text_of: the text of one token.
    """
    supervised = np.flatnonzero(whole.loss_mask)
    if len(supervised) == 0:
        return []
    body = int(supervised[0])
    prompt = _kept_prompt(body, max_length // 2)
    room = max_length - len(prompt)
    context = 0  # tokens repeated before the new ones
    pieces, begin, last = [], body, int(supervised[-1]) + 1
    while begin < last:
        end = min(begin + room - context, len(whole))
        if end < len(whole):
            end = _boundary(whole.input_ids, begin + (end - begin + 1) // 2, end, text_of)
        if whole.loss_mask[begin:end].any():
            pieces.append(_piece(whole, prompt, begin - context, begin, end))
        begin = end
        context = min(begin - body, room // CONTEXT_SHARE)
    return pieces


def _kept_prompt(length: int, limit: int) -> np.ndarray:
    """Positions of the prompt's tokens that every piece begins with: all, or the first (a bos) and the last ones."""
    if length <= limit:
        return np.arange(length)
    return np.concatenate([np.arange(min(1, limit)), np.arange(length - max(0, limit - 1), length)])


def _piece(whole: Sample, prompt: np.ndarray, context: int, begin: int, end: int) -> Sample:
    kept = np.concatenate([prompt, np.arange(context, end)])
    loss_mask = whole.loss_mask[kept]
    loss_mask[: len(kept) - (end - begin)] = False
    return Sample(input_ids=whole.input_ids[kept], segments=whole.segments[kept], loss_mask=loss_mask)


def _boundary(input_ids: np.ndarray, earliest: int, latest: int, text_of: Callable[[int], str]) -> int:
    """The last position in earliest..latest that has a paragraph before it, else a line, else a sentence."""
    texts = [text_of(token) for token in input_ids[earliest - 1 : latest + 1].tolist()]  # texts[i + 1] is behind cut i
    for is_end in (_ends_paragraph, _ends_line, _ends_sentence):
        for cut in range(latest, earliest - 1, -1):
            at = cut - earliest
            if is_end(texts[at - 1] if at else "", texts[at], texts[at + 1]):
                return cut
    return latest


def _ends_paragraph(before: str, last: str, behind: str) -> bool:
    return last.endswith("\n\n") or (last == "\n" and before.endswith("\n"))


def _ends_line(before: str, last: str, behind: str) -> bool:
    return last.endswith("\n")


def _ends_sentence(before: str, last: str, behind: str) -> bool:
    return last.rstrip().endswith(SENTENCE_ENDS) and (last[-1:].isspace() or behind[:1].isspace())


@dataclass(frozen=True)
class SegmentStatistics:
    """How many samples have a segment, and its tokens in these."""

    num_samples: int
    num_tokens: int
    mean: float
    p50: float
    p90: float
    max: int


def segment_statistics(samples: Iterable[Sample]) -> dict[str, SegmentStatistics]:
    """Of each segment that occurs, and of `supervised`."""
    lengths: dict[str, list[int]] = {name: [] for name in (*SEGMENTS, "supervised")}
    for sample in samples:
        counts = np.bincount(sample.segments, minlength=len(SEGMENTS)).tolist()
        for name, count in zip(lengths, [*counts, int(sample.loss_mask.sum())], strict=True):
            if count:
                lengths[name].append(count)
    return {name: _statistics(np.asarray(counts)) for name, counts in lengths.items() if counts}


def _statistics(counts: np.ndarray) -> SegmentStatistics:
    p50, p90 = np.percentile(counts, (50, 90)).tolist()
    return SegmentStatistics(len(counts), int(counts.sum()), float(counts.mean()), p50, p90, int(counts.max()))
