"""What pages begin with and terminals end with: what to do, why, where not, the commands; and a table."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Conclusion:
    """is_good: whether there is something to deploy. figure: the main one with its interval, and `unit`: what it is of;
    empty: none. reasons: sentences. cautions: sentences on where it does not hold. commands: how to do it."""

    is_good: bool
    headline: str
    figure: str = ""
    unit: str = ""
    reasons: Sequence[str] = ()
    cautions: Sequence[str] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """num_labels: columns of text, aligned left; figures are aligned right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1
