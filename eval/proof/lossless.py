"""Checks that speculative texts are the target's own: equal to the baseline's, or if one differs, proved (`proof`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Unproved = list[int | None]  # per row, index of the first token that is not proved to be the target's; None: all are


@dataclass(frozen=True)
class Divergence:
    """A text that differs from the baseline's, and the result of its proof.

    position: of the first difference; None: one text is a prefix of the other. unproved: the first token that is not
    proved to be the target's own; None: all are.
    """

    prompt: int
    position: int | None
    unproved: int | None

    @property
    def is_proved(self) -> bool:
        """Whether the text is the target's own, and differs by rounding alone."""
        return self.unproved is None


@dataclass(frozen=True)
class LosslessReport:
    """checked texts = identical + proved + unexplained; divergences: of the texts that differ."""

    checked: int = 0
    identical: int = 0
    proved: int = 0
    unexplained: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    def __add__(self, other: "LosslessReport") -> "LosslessReport":
        """The sums of both."""
        return LosslessReport(
            self.checked + other.checked,
            self.identical + other.identical,
            self.proved + other.proved,
            self.unexplained + other.unexplained,
            self.divergences + other.divergences,
        )


def compare_texts(
    baseline: Sequence[Sequence[int]],
    speculative: Sequence[Sequence[int]],
    prove: Callable[[], Unproved],
    *,
    numbers: Sequence[int],
    seen: set[tuple[int, ...]] | None = None,
) -> LosslessReport:
    """Compare the new tokens of a batch, row by row, with the baseline's.

    Args: prove: returns `first_unproved` of all rows; called if a text differs. numbers: of the prompts. seen: numbers
        with texts that were compared before: a prompt's same text is skipped. This batch's are added.
    """
    assert len(baseline) == len(speculative)
    seen, rows = set() if seen is None else seen, list[int]()
    for row, (number, text) in enumerate(zip(numbers, speculative, strict=True)):
        if (number, *text) not in seen:
            seen.add((number, *text))
            rows.append(row)
    differ = [row for row in rows if list(baseline[row]) != list(speculative[row])]
    unproved = prove() if differ else []
    divergences = []
    for row in differ:
        pairs = enumerate(zip(speculative[row], baseline[row], strict=False))
        at = next((position for position, (ours, theirs) in pairs if ours != theirs), None)
        divergences.append(Divergence(numbers[row], at, unproved[row]))
    num_proved = sum(divergence.is_proved for divergence in divergences)
    return LosslessReport(
        checked=len(rows),
        identical=len(rows) - len(differ),
        proved=num_proved,
        unexplained=len(differ) - num_proved,
        divergences=divergences,
    )
