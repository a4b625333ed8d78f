"""The `data:` section of a run: which rows, what of them is supervised, and how they are laid out in batches."""

from dataclasses import dataclass, field
from typing import Any

from ..configs.errors import BadInput
from .storage.samples import SEGMENTS

CHOICES = {"turns": ("all", "last"), "too_long": ("cut", "split", "drop"), "layout": ("padded", "bucketed", "packed")}


@dataclass(kw_only=True)
class DataConfig:
    """Where training rows come from and what becomes of them.

    train, validation: a source or several, see sources.py: a file, a hub name, or a mapping with `source` and more.
    num_rows: the first rows of `train`, over all its sources; None: all. max_length: tokens of a row.
    too_long: what becomes of a row with more: `cut` on the right, `split` into pieces (traces.py), or `drop`.
    turns: supervise `all` assistant turns, or the `last`. supervised: the segments that are supervised.
    segment_weights: how much a supervised token of a segment counts in the loss; not named: 1.
    think_markers: the texts that open and close a reasoning trace; None: as the tokenizer or its template says.
    layout: `padded` rows; `bucketed`, rows of like length together; `packed`, several rows in one without seeing each
    other. features: a folder that `headstart data extract` wrote from the same rows; None: the target runs in training.
    num_workers: processes that render and tokenise rows; they change nothing but the time.
    """

    train: str | list[str | dict[str, Any]]
    validation: str | list[str | dict[str, Any]] | None = None
    num_rows: int | None = None
    max_length: int = 2048
    too_long: str = "cut"
    turns: str = "all"
    supervised: list[str] = field(default_factory=lambda: ["think", "answer"])
    segment_weights: dict[str, float] = field(default_factory=dict)
    think_markers: list[str] | None = None
    layout: str = "padded"
    features: str | None = None
    num_workers: int = 1

    def __post_init__(self) -> None:
        for name in ("max_length", "num_rows", "num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} should be at least 1, got {value}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise BadInput(f"{name} {getattr(self, name)!r}: expected {' or '.join(known)}")
        for name, segments in (("supervised", self.supervised), ("segment_weights", self.segment_weights)):
            for segment in segments:
                if segment not in SEGMENTS:
                    raise BadInput(f"{name}: no segment {segment!r}; there are {', '.join(SEGMENTS)}")
        if not self.supervised:
            raise BadInput("supervised: names no segment")
        for segment, weight in self.segment_weights.items():
            if not 0 <= weight < float("inf"):
                raise BadInput(f"segment_weights.{segment} {weight}: expected 0 or more")
        if self.think_markers is not None and (len(self.think_markers) != 2 or not all(self.think_markers)):
            raise BadInput(f"think_markers {self.think_markers}: expected two texts, what opens and what closes")
