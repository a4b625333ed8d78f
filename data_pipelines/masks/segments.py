"""Assigns a segment to each token: prompt, think (a reasoning trace with its markers), or answer."""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from ...targets.chat.reasoning import think_markers
from ...targets.chat.written_ids import tokenizer_fingerprint
from ..rows.samples import ANSWER, PROMPT, THINK

Span = tuple[int, int]  # [start, end)
LEAD_IN = 16  # tokens before an answer that are searched for an opening marker in the generation prompt


class TokenTable:
    """A tokenizer with cached texts of single tokens.

    special: ids of special tokens. markers: the texts that open and close a reasoning trace, from `think_markers`; None
    if there are none.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self.special = frozenset(added | set(tokenizer.all_special_ids))
        self.markers = think_markers(tokenizer)
        self._texts: dict[int, str] = {}

    @cached_property
    def fingerprint(self) -> str:
        """`tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def text(self, token: int) -> str:
        """The text of one token; U+FFFD for a part of a character that spans several tokens."""
        text = self._texts.get(token)
        if text is None:
            text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            if str(self.tokenizer.convert_ids_to_tokens(token)).startswith("▁") and not text.startswith(" "):
                text = f" {text}"  # SentencePiece drops the blank before the first word
            self._texts[token] = text
        return text

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, without bos and eos."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def is_blank(self, token: int) -> bool:
        return not self.text(token).strip()


@lru_cache(maxsize=4)
def token_table(tokenizer: Any) -> TokenTable:
    """The cached table of a tokenizer."""
    return TokenTable(tokenizer)


def segment_tokens(
    input_ids: Sequence[int], spans: Sequence[Span], table: TokenTable, markers: tuple[str, str] | None
) -> np.ndarray:
    """[T] uint8, indices into SEGMENTS: prompt outside the spans, think or answer within them.

    A trace lasts from the opening marker to the closing one, both included. The opening marker may be at the end of the
    prompt (DeepSeek-R1, Qwen3-Thinking). If there is only a closing marker, the trace begins with the answer, except if
    the marker ends the span: gpt-oss ends every message with the token that also closes traces.

    Args: input_ids: [T]. spans: of the assistant's tokens. markers: texts that open and close a trace; None: no traces.
    """
    segments = np.full(len(input_ids), PROMPT, dtype=np.uint8)
    for start, end in spans:
        segments[start:end] = ANSWER
        if markers is not None:
            lead_in = "".join(map(table.text, input_ids[max(0, start - LEAD_IN) : start]))
            is_open = lead_in.rstrip().endswith(markers[0])
            for first, last in _traces(list(input_ids[start:end]), table, markers, is_open):
                segments[start + first : start + last] = THINK
    return segments


def _traces(answer: list[int], table: TokenTable, markers: tuple[str, str], is_open: bool) -> list[Span]:
    runs: list[Span] = []
    begin = 0 if is_open else None
    for first, last, opens in _marked(answer, table, markers):
        if opens and begin is None:
            begin = first
        elif not opens and begin is not None:
            runs.append((begin, last))
            begin = None
        elif not opens and not runs and last < len(answer):
            runs.append((0, last))
    return runs if begin is None else [*runs, (begin, len(answer))]


def _marked(answer: list[int], table: TokenTable, markers: tuple[str, str]) -> list[tuple[int, int, bool]]:
    """(first token, end (exclusive), whether it is an opening one) of each marker in an answer's tokens, in order."""
    texts = [table.text(token) for token in answer]
    whole = "".join(texts)
    if markers[0] not in whole and markers[1] not in whole:
        return []
    ends = np.fromiter(accumulate(map(len, texts)), dtype=np.int64, count=len(texts))
    matches = list(re.finditer("|".join(map(re.escape, markers)), whole))
    firsts = np.searchsorted(ends, [match.start() for match in matches], side="right")
    lasts = np.searchsorted(ends, [match.end() for match in matches], side="left") + 1
    return [
        (int(first), int(last), match.group() == markers[0])
        for first, last, match in zip(firsts, lasts, matches, strict=True)
    ]
