"""The `data:` section of a run: which rows to read, which tokens to supervise, and how to form batches."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import BadInput
from ...base.files import LocalPath
from ...targets.chat.rows import check_variables
from .samples import SEGMENTS

TURNS = ("all", "last")  # assistant turns of a conversation


@dataclass(kw_only=True)
class DataConfig:
    """Which rows to train on, which of their tokens are supervised, and how batches are formed."""

    train: str | list[str | dict[str, Any]]  # a source or several, see sources.py: a file, a hub name, or a mapping
    # a source or several, or a folder of `headstart data extract`; None: none
    validation: str | list[str | dict[str, Any]] | None = None
    num_rows: int | None = None  # the first rows of `train`, over all its sources; None: all
    max_length: int = 2048  # tokens of a row
    too_long: str = "cut"  # longer rows: `cut` on the right, `split` into pieces (traces.py), or `drop`
    turns: str = "all"  # supervise `all` assistant turns, or the `last`
    supervised: list[str] = field(default_factory=lambda: ["think", "answer"])  # segments
    segment_weights: dict[str, float] = field(default_factory=dict)  # loss weight of supervised tokens; default: 1
    think_markers: list[str] | None = None  # opening and closing text of a trace; None: from the tokenizer or template
    layout: str = "padded"  # of batches: `padded`, or `bucketed` (rows of similar length)
    features: LocalPath | None = None  # a folder of `headstart data extract` on the same rows; None: the target runs
    # variables for the chat template of rows that do not record them, e.g. {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1  # processes that render and tokenise rows; the samples do not depend on it

    def __post_init__(self) -> None:
        check_at_least_one(max_length=self.max_length, num_rows=self.num_rows, num_workers=self.num_workers)
        check_choice("too_long", self.too_long, ("cut", "split", "drop"))
        check_choice("turns", self.turns, TURNS)
        check_choice("layout", self.layout, ("padded", "bucketed"))
        for name, segments in (("supervised", self.supervised), ("segment_weights", self.segment_weights)):
            for segment in segments:
                if segment not in SEGMENTS:
                    raise BadInput(f"{name}: no segment {segment!r}; known are {', '.join(SEGMENTS)}")
        if not self.supervised:
            raise BadInput("supervised: names no segment")
        for segment, weight in self.segment_weights.items():
            if not 0 <= weight < float("inf"):
                raise BadInput(f"segment_weights.{segment} {weight}: expected 0 or more")
        self.chat_template_kwargs = check_variables(self.chat_template_kwargs, "chat_template_kwargs")
        if self.think_markers is not None and (len(self.think_markers) != 2 or not all(self.think_markers)):
            raise BadInput(f"think_markers {self.think_markers}: expected two texts, the opening and the closing one")


def check_at_least_one(**values: int | None) -> None:
    """Raises BadInput on a value below 1, naming its key; None is fine."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise BadInput(f"{name} {value}: expected at least 1")


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    """Raises BadInput on a value that is not among those known."""
    if value not in known:
        raise BadInput(f"{name} {value!r}: expected {' or '.join(known)}")
