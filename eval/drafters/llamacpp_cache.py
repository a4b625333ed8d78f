"""Answers in the format that llama-server looks up with `--spec-type ngram-cache` (llama.cpp of November 2026)."""

import struct
from collections import Counter, defaultdict
from pathlib import Path

from ...base.files import replacing
from ...engines.servers.llama_server import DYNAMIC, STATIC
from .answers import LEAD_IN, Answers

LONGEST = 4  # tokens of an n-gram in llama.cpp
STATIC_SIZE = 2
NO_TOKEN = -1

Counts = dict[tuple[int, ...], Counter[int]]  # for each n-gram, how often each token followed it


def write_cache(answers: Answers, folder: str | Path) -> int:
    """Write counts of the tokens that follow each n-gram of 1 to 4 tokens in the answers (the dynamic file), and those
    that follow bigrams only (the static file). Returns the number of n-grams.

    llama-server drafts from an n-gram of the dynamic file if it was seen twice (a single token four times) and the same
    token followed in 2/3 of the cases; else from a bigram of the static file seen twice, in 1/2 of the cases. It drafts
    up to 8 tokens, and stops when neither applies.
    """
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for prompt, answer in answers.rows:
        text = (*prompt[-LEAD_IN:], *answer)
        for end in range(1, len(text)):
            for size in range(1, min(LONGEST, end) + 1):
                counts[text[end - size : end]][text[end]] += 1
    _write(counts, Path(folder, DYNAMIC))
    _write({ngram: behind for ngram, behind in counts.items() if len(ngram) == STATIC_SIZE}, Path(folder, STATIC))
    return len(counts)


def _write(counts: Counts, path: Path) -> None:
    """Per n-gram, as 32-bit integers in native byte order: its tokens, padded with -1; the number of distinct tokens
    that followed; each of these with its count."""
    with replacing(path) as part, part.open("wb") as file:
        for ngram, behind in counts.items():
            filled = ngram + (NO_TOKEN,) * (LONGEST - len(ngram))
            pairs = [number for pair in behind.items() for number in pair]
            file.write(struct.pack(f"={LONGEST + 1 + len(pairs)}i", *filled, len(behind), *pairs))
