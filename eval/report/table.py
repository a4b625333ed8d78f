"""A table of a page or a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """num_labels: columns of text, aligned left; figures are aligned right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1
