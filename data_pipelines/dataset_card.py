"""The files of a prepared data set: its splits, and its card (card.json)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.differing import first_difference
from ..base.errors import BadInput
from ..base.files import replacing

SPLITS = ("train", "validation")


@dataclass
class RowCounts:
    """How many rows were read, kept and dropped."""

    read: int
    kept: int
    dropped: dict[str, int]  # by reason


@dataclass
class Card(RowCounts):
    """The contents of a prepared data set's card.json."""

    sources: dict[str, RowCounts]
    examples: dict[str, list[str]]  # the origins of some dropped rows, by reason
    splits: dict[str, dict[str, int]]  # of each, how many `rows` its file has
    files: dict[str, str]  # the local files that were read, with the first digits of their sha256
    config: dict[str, Any]


def read_card(output: Path) -> Card | None:
    """The card of a prepared data set; None if there is none. Raises BadInput if it is damaged."""
    if not (output / "card.json").exists():
        return None
    try:
        data = json.loads((output / "card.json").read_text(encoding="utf-8"))
        sources = {name: RowCounts(**counts) for name, counts in data.pop("sources").items()}
        return Card(**data, sources=sources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{output / 'card.json'}: damaged; give another output") from error


def check_unchanged(card: Card, *, config: Mapping[str, Any], files: Mapping[str, str], output: Path) -> None:
    """Raises BadInput with the first config key, or source file, that differs from when the card was written."""
    if difference := first_difference(card.config, config):
        raise BadInput(f"{output}: was prepared with {difference}; give another output, or remove it")
    if difference := first_difference(card.files, files):
        raise BadInput(f"{output}: was prepared from other rows: sha256 of {difference}; give another output")


def write_card(folder: Path, card: Card) -> None:
    with replacing(folder / "card.json") as path:
        path.write_text(json.dumps(asdict(card), indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
