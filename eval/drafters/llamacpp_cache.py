"""Answers as llama-server looks them up: the file of its `--spec-type ngram-cache`, by llama.cpp of November 2026."""

import struct
from collections import Counter, defaultdict
from pathlib import Path

from ...configs.files import replacing
from .answers import LEAD_IN, Answers

DYNAMIC, STATIC = "answers.ngrams", "bigrams.ngrams"
LONGEST = 4  # tokens of an n-gram there
STATIC_SIZE = 2
NO_TOKEN = -1
MOST_DRAFTED = 8  # fixed there

Counts = dict[tuple[int, ...], Counter[int]]  # behind each n-gram, how often each token


def write_cache(answers: Answers, folder: str | Path) -> int:
    """What followed each n-gram of 1 to 4 tokens in answers, as the dynamic file, and behind bigrams alone, as the
    static one. Returns how many n-grams there are.

    Of the first it trusts an n-gram that was seen twice (a single token four times) and was followed by the same token
    in two of three cases, else of the second a bigram that was seen twice, in one of two; it drafts up to 8 tokens, as
    long as it trusts.
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


def cache_flags(dynamic: str | Path) -> list[str]:
    """What tells llama-server to look up in such a file, and in the static one where that lies beside it."""
    static = Path(dynamic).with_name(STATIC)
    also = ["--lookup-cache-static", str(static)] if static.is_file() else []
    return ["--spec-type", "ngram-cache", "--lookup-cache-dynamic", str(dynamic), *also]


def _write(counts: Counts, path: Path) -> None:
    """Per n-gram, in 32-bit integers of the machine: its tokens, filled up with -1; how many tokens followed; each of
    these and its count."""
    with replacing(path) as part, part.open("wb") as file:
        for ngram, behind in counts.items():
            filled = ngram + (NO_TOKEN,) * (LONGEST - len(ngram))
            pairs = [number for pair in behind.items() for number in pair]
            file.write(struct.pack(f"={LONGEST + 1 + len(pairs)}i", *filled, len(behind), *pairs))
