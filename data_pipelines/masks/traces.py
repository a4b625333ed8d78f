"""Splits long rows, such as reasoning traces, into pieces of a maximum length, and counts tokens by segment."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ..rows.samples import SEGMENTS, Sample

CONTEXT_SHARE = 4  # a later piece repeats earlier tokens in 1/4 of its length after the prompt
SENTENCE_ENDS = tuple(".!?;。！？；")  # noqa: RUF001 (full-width ones end sentences too)


def split_sample(whole: Sample, *, max_length: int, text_of: Callable[[int], str]) -> list[Sample]:
    """Split a row into pieces of at most `max_length` tokens, with every supervised token supervised exactly once.

    A piece has three parts:
    - the prompt: the tokens before the first supervised one; if these are more than half of max_length, the first of
      them (a bos) and the last ones
    - context, in later pieces: the unsupervised tokens before the cut, a quarter of the length that the prompt leaves,
      or all tokens after the prompt if there are fewer
    - new tokens
    The tokens between prompt and context are missing, so the target's states are those of the shorter text.

    A cut is made after a paragraph, otherwise after a line, otherwise after a sentence, if one ends in the second half
    of the new tokens; otherwise at the maximum length. Pieces without a supervised token are left out.

    Args: text_of: returns the text of one token.
    """
    supervised = np.flatnonzero(whole.loss_mask)
    if len(supervised) == 0:
        return []
    body = int(supervised[0])
    prompt = _kept_prompt(body, max_length // 2)
    room = max_length - len(prompt)  # tokens of context and new tokens
    context = 0
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
    """Positions of the prompt's tokens that every piece starts with: all, or the first (a bos) and the last ones."""
    if length <= limit:
        return np.arange(length)
    return np.concatenate([np.arange(min(1, limit)), np.arange(length - max(0, limit - 1), length)])


def _piece(whole: Sample, prompt: np.ndarray, context: int, begin: int, end: int) -> Sample:
    positions = np.concatenate([prompt, np.arange(context, end)])
    loss_mask = whole.loss_mask[positions]
    loss_mask[: len(positions) - (end - begin)] = False
    parts = {name: getattr(whole, name)[positions] for name in ("input_ids", "segments")}
    return replace(whole, **parts, loss_mask=loss_mask, is_piece=True)


def _boundary(input_ids: np.ndarray, earliest: int, latest: int, text_of: Callable[[int], str]) -> int:
    """The last position in earliest..latest before which a paragraph ends, otherwise a line, otherwise a sentence;
    `latest` if there is none."""
    texts = [text_of(token) for token in input_ids[earliest - 1 : latest + 1].tolist()]  # texts[i + 1] is behind cut i

    def rank(cut: int) -> tuple[int, int]:
        """3 where a paragraph ends before the cut, 2 a line, 1 a sentence, 0 none; and of equal ones the later cut."""
        at = cut - earliest
        before, last, behind = texts[at - 1] if at else "", texts[at], texts[at + 1]
        if last.endswith("\n"):
            return 3 if last.endswith("\n\n") or (last == "\n" and before.endswith("\n")) else 2, cut
        return int(last.rstrip().endswith(SENTENCE_ENDS) and (last[-1:].isspace() or behind[:1].isspace())), cut

    return max(range(earliest, latest + 1), key=rank)


def segment_lengths(samples: Iterable[Sample]) -> dict[str, list[int]]:
    """The numbers of tokens of each segment that occurs, of the samples that have it; `supervised`: of supervised
    tokens."""
    lengths: dict[str, list[int]] = {name: [] for name in (*SEGMENTS, "supervised")}
    for sample in samples:
        counts = np.bincount(sample.segments, minlength=len(SEGMENTS)).tolist()
        for name, count in zip(lengths, [*counts, int(sample.loss_mask.sum())], strict=True):
            if count:
                lengths[name].append(count)
    return {name: counts for name, counts in lengths.items() if counts}
