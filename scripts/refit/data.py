"""Splits new traffic and old rows into held-out conversations and training rows, and mixes the training rows."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ...configs.errors import BadInput
from ...data_pipelines.traffic import Served
from ...eval.measurement.metrics import LEAST_TIMED

MOST_HELD_OUT = 64  # conversations
LEAST_HELD_OUT = LEAST_TIMED  # conversations that a confidence interval needs
LEAST_CONVERSATIONS = 3 * LEAST_HELD_OUT  # as a third is held out
MOST_VALIDATION = 16  # rows of each side for the validations of training, and for the choice behind it

NEW, OLD = "new", "old"  # prefixes of keys

Keyed = dict[str, Served]  # rows by key, in the order in which they are read


@dataclass(frozen=True)
class Parts:
    """The rows of one side: of the new traffic, or the old rows."""

    held_out: Keyed  # never trained on, nor is any row with the same first question
    rest: Keyed


def split(new: Sequence[Served], old: Sequence[Served], *, seed: int) -> tuple[Parts, Parts]:
    """Splits new traffic and old rows by conversation: rows with the same first question stay together.

    Raises: BadInput if there are fewer than LEAST_CONVERSATIONS; there may be no old rows at all.
    """
    for name, rows in (("--traffic", new), ("--replay", old)):
        count = len({row.question for row in rows})
        if count < LEAST_CONVERSATIONS and (rows or name == "--traffic"):
            raise BadInput(
                f"{name}: {count} different conversations, at least {LEAST_CONVERSATIONS} are needed: a third is held "
                "out to measure on"
            )
    chosen = [held_out_questions(rows, seed=seed) for rows in (new, old)]
    kept_back = set[str]().union(*chosen)
    new_part, old_part = (
        parts_of(name, rows, questions, kept_back, seed=seed)
        for name, rows, questions in zip((NEW, OLD), (new, old), chosen, strict=True)
    )
    return new_part, old_part


def held_out_questions(rows: Iterable[Served], *, seed: int) -> set[str]:
    """A random third of the first questions, at most MOST_HELD_OUT."""
    questions = sorted({row.question for row in rows})
    random.Random(seed).shuffle(questions)
    return set(questions[: min(len(questions) // 3, MOST_HELD_OUT)])


def parts_of(name: str, rows: Sequence[Served], held_out: set[str], kept_back: set[str], *, seed: int) -> Parts:
    """Both parts of one side, shuffled.

    Args:
        name: NEW or OLD, for the keys.
        held_out: this side's held-out questions.
        kept_back: the held-out questions of both sides.
    """
    keyed = [(f"{name}:{i}", row) for i, row in enumerate(rows)]
    random.Random(seed).shuffle(keyed)
    rest = {key: row for key, row in keyed if row.question not in kept_back}
    return Parts({key: row for key, row in keyed if row.question in held_out}, rest)


def by_turns(*parts: Keyed) -> Keyed:
    """Round-robin over the parts, so that a run with time for only some rows reads rows of all parts."""
    turns = zip_longest(*(part.items() for part in parts))
    return dict(item for turn in turns for item in turn if item is not None)


def validation_of(rows: Mapping[str, Served]) -> Keyed:
    """The rows for validation: a fifth of the rows, at most MOST_VALIDATION."""
    return dict(list(rows.items())[: min(len(rows) // 5, MOST_VALIDATION)])


def mixed(new: Sequence[Served], old: Sequence[Served], *, replay_share: float, seed: int) -> list[Served]:
    """The training rows, shuffled: all new rows, and as many old ones as make up `replay_share` of the result.

    Old rows repeat if there are too few.
    """
    share = replay_share if old else 0.0
    count = round(len(new) * share / (1 - share))
    rows = [*new, *(old[i % len(old)] for i in range(count))]
    random.Random(seed).shuffle(rows)
    return rows
