"""Answers as llama-server looks them up: the file of its `--spec-type ngram-cache`, by llama.cpp of November 2026."""

import struct
from collections import Counter, defaultdict
from pathlib import Path

from ...configs.files import replacing
from .answers import LEAD_IN, Answers

FILE = "answers.ngrams"
LONGEST = 4  # tokens of an n-gram there
NO_TOKEN = -1
MOST_DRAFTED = 8  # fixed there


def write_cache(answers: Answers, path: str | Path) -> int:
    """What followed each n-gram of 1 to 4 tokens, and how often. Returns how many n-grams there are.

    Per n-gram, in 32-bit integers of the machine: its tokens, filled up with -1; how many tokens followed; each of
    these and its count. It trusts an n-gram that was seen twice (a single token four times) and was followed by the
    same token in two of three cases, and drafts up to 8 tokens, none where it trusts nothing.
    """
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for prompt, answer in answers.rows:
        text = (*prompt[-LEAD_IN:], *answer)
        for end in range(1, len(text)):
            for size in range(1, min(LONGEST, end) + 1):
                counts[text[end - size : end]][text[end]] += 1
    with replacing(path) as part, part.open("wb") as file:
        for ngram, behind in counts.items():
            filled = ngram + (NO_TOKEN,) * (LONGEST - len(ngram))
            pairs = [number for pair in behind.items() for number in pair]
            file.write(struct.pack(f"={LONGEST + 1 + len(pairs)}i", *filled, len(behind), *pairs))
    return len(counts)
