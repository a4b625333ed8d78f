"""How much texts repeat themselves: greedy texts may fall into a loop, which any look-up drafter drafts easily."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .metrics import Ends

GRAM = 4  # tokens
LOOPING = 0.5  # share of repeated 4-grams above which a text counts as looping
LONGEST_PERIOD = 1024  # tokens; loops with a longer period are not detected


@dataclass(frozen=True)
class TextRepetition:
    """Repetition in one prompt's text (of several texts, the mean and the longest). repeated: the share of its 4-grams
    that occurred in it before. longest_loop: tokens of the longest stretch that repeats what is right before it."""

    prompt: int
    repeated: float
    longest_loop: int

    @property
    def is_looping(self) -> bool:
        return self.repeated > LOOPING


@dataclass(frozen=True)
class Repetition:
    """mean_repeated: mean over the texts. num_looping: texts with more than half of their 4-grams repeated."""

    mean_repeated: float | None = None
    num_looping: int = 0
    longest_loop: int = 0
    texts: list[TextRepetition] = field(default_factory=list)

    @classmethod
    def of(cls, texts: Sequence[TextRepetition]) -> "Repetition":
        """Of all of them."""
        if not texts:
            return cls()
        mean = round(sum(text.repeated for text in texts) / len(texts), 4)
        longest = max(text.longest_loop for text in texts)
        return cls(mean, sum(text.is_looping for text in texts), longest, list(texts))


@dataclass(frozen=True)
class WithoutLoops:
    """A result's figures without the prompts whose texts loop. num_timed: prompts, or batches without such prompts."""

    num_prompts: int
    num_timed: int
    acceptance_length: float | None
    speedup: float | None
    speedup_ci95: Ends


def text_repetition(prompt: int, texts: Sequence[Sequence[int]]) -> TextRepetition:
    """Args: prompt: its number. texts: the new tokens of each of its texts."""
    shares = [repeated_share(text) for text in texts]
    return TextRepetition(prompt, round(sum(shares) / len(shares), 4), max(map(longest_loop, texts)))


def repeated_share(text: Sequence[int]) -> float:
    """The share of a text's 4-grams that stood in it before, 0 to 1."""
    grams = list(zip(*(text[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def longest_loop(text: Sequence[int]) -> int:
    """Length in tokens of the longest stretch, at least one period long, that equals the text one period earlier."""
    ids, longest = np.asarray(text), 0
    for period in range(1, min(len(ids) // 2, LONGEST_PERIOD) + 1):
        if len(ids) - period <= longest:
            break
        breaks = np.flatnonzero(ids[period:] != ids[:-period])
        run = int(np.diff(breaks, prepend=-1, append=len(ids) - period).max()) - 1
        longest = run if run >= max(period, longest) else longest
    return longest
