"""How much texts repeat themselves: greedy texts may fall into a loop, which any look-up drafter drafts easily."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .metrics import Ends, Observation

GRAM = 4  # tokens
LOOPING = 0.5  # share of repeated 4-grams above which a text counts as looping


@dataclass(frozen=True)
class TextRepetition:
    """How much one prompt's text repeats itself: the share of its 4-grams that occurred in it before; of several texts
    the mean."""

    prompt: int
    repeated: float

    @property
    def is_looping(self) -> bool:
        return self.repeated > LOOPING


@dataclass(frozen=True)
class WithoutLoops:
    """A result's figures without the prompts whose texts loop. num_timed: prompts, or batches without such prompts.
    observations: as of a result."""

    num_timed: int
    acceptance_length: float | None
    speedup: float | None
    speedup_ci95: Ends
    observations: list[Observation] = field(default_factory=list)


@dataclass(frozen=True)
class Repetition:
    """How much the texts repeat themselves. without_loops: the figures without those that loop; None: no text loops."""

    texts: list[TextRepetition] = field(default_factory=list)
    without_loops: WithoutLoops | None = None

    @property
    def num_looping(self) -> int:
        """Texts with more than half of their 4-grams repeated."""
        return sum(text.is_looping for text in self.texts)


def text_repetition(prompt: int, texts: Sequence[Sequence[int]]) -> TextRepetition:
    """Args: prompt: its number. texts: the new tokens of each of its texts."""
    shares = [repeated_share(text) for text in texts]
    return TextRepetition(prompt, round(sum(shares) / len(shares), 4))


def repeated_share(text: Sequence[int]) -> float:
    """The share of a text's 4-grams that stood in it before, 0 to 1."""
    grams = list(zip(*(text[start:] for start in range(GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
