"""The files of a prepared data set: splits, card (card.json), and a page for readers and the hub (README.md)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from ..configs.errors import BadInput
from ..configs.files import replacing

SPLITS = ("train", "validation")
SIZE_CATEGORIES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}


@dataclass
class RowCounts:
    """How many rows were read, kept and dropped."""

    read: int
    kept: int
    dropped: dict[str, int]  # by reason


@dataclass
class SplitCounts:
    """Contents of a split's file."""

    rows: int = 0
    turns: int = 0
    characters: int = 0
    answer_characters: int = 0
    bytes: int = 0
    sha256: str = ""


COUNTED = [field.name for field in fields(SplitCounts) if field.name != "sha256"]


@dataclass
class Card(RowCounts):
    """The contents of a prepared data set's card.json."""

    sources: dict[str, RowCounts]
    examples: dict[str, list[str]]  # the origins of some dropped rows, by reason
    splits: dict[str, SplitCounts]
    files: dict[str, str]  # the local files that were read, with the first digits of their sha256
    config: dict[str, Any]


class SplitFile:
    """Writes a split's .jsonl file line by line, and counts its contents."""

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._sha256 = sha256()
        self.counts = SplitCounts()

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self._sha256.update(line)
        self.counts.rows += 1
        self.counts.bytes += len(line)

    def count(self, *, turns: int, characters: int, answer_characters: int) -> None:
        """Of a row that is written, in a line of its own or joined to others."""
        self.counts.turns += turns
        self.counts.characters += characters
        self.counts.answer_characters += answer_characters

    def close(self) -> SplitCounts:
        self._file.close()
        self.counts.sha256 = self._sha256.hexdigest()
        return self.counts


def read_card(output: Path) -> Card | None:
    """The card of a prepared data set; None if there is none. Raises BadInput if it is damaged."""
    if not (output / "card.json").exists():
        return None
    try:
        data = json.loads((output / "card.json").read_text(encoding="utf-8"))
        sources = {name: RowCounts(**counts) for name, counts in data.pop("sources").items()}
        splits = {name: SplitCounts(**counts) for name, counts in data.pop("splits").items()}
        return Card(**data, sources=sources, splits=splits)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{output / 'card.json'}: damaged; give another output") from error


def check_unchanged(card: Card, *, config: Mapping[str, Any], files: Mapping[str, str], output: Path) -> None:
    """Raises BadInput with the first config key, or source file, that differs from when the card was written."""
    for key in sorted(card.config.keys() | config.keys()):
        if card.config.get(key) != config.get(key):
            problem = f"was prepared with {key} {card.config.get(key)}, now it is {config.get(key)}"
            raise BadInput(f"{output}: {problem}; give another output, or remove it")
    for name in sorted(card.files.keys() | files.keys()):
        before, now = card.files.get(name), files.get(name)
        if before != now:
            problem = f"{name} had sha256 {before} when this was prepared from it, now {now}"
            raise BadInput(f"{output}: {problem}; give another output, or remove it")


def write_card(folder: Path, card: Card, *, name: str) -> None:
    """Write README.md, whose front matter the hub and `datasets` read, and then card.json.

    Args: name: of the data set.
    """
    num_rows = sum(split.rows for split in card.splits.values())
    data_files = [{"split": split, "path": f"{split}.jsonl"} for split in SPLITS if card.splits[split].rows]
    front = {
        "pretty_name": name,
        "task_categories": ["text-generation"],
        "size_categories": [next((size for limit, size in SIZE_CATEGORIES.items() if num_rows < limit), "1M<n")],
        "configs": [{"config_name": "default", "data_files": data_files}],
    }
    reasons = sorted(card.dropped, key=lambda reason: -card.dropped[reason])
    sources = [*card.sources.items(), *([("all", card)] if len(card.sources) > 1 else [])]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"{card.kept:,} of {card.read:,} rows were kept.",
        _table(
            ["split", *COUNTED], [[split, *(getattr(card.splits[split], key) for key in COUNTED)] for split in SPLITS]
        ),
        "What was read, kept, and dropped by reason:",
        _table(
            ["source", "read", "kept", *reasons],
            [
                [name, rows.read, rows.kept, *(rows.dropped.get(reason, 0) for reason in reasons)]
                for name, rows in sources
            ],
        ),
        "A row's side of the split is a hash of its prompt. `card.json` has checksums and examples of dropped rows.",
        "The config:",
        f"```yaml\n{yaml.safe_dump(card.config, sort_keys=False, allow_unicode=True, width=110)}```",
    ]
    text = json.dumps(asdict(card), indent=2, ensure_ascii=False)
    for file, written in (("README.md", "\n\n".join(parts)), ("card.json", text)):
        with replacing(folder / file) as path:
            path.write_bytes(f"{written}\n".encode("utf-8", "backslashreplace"))


def _table(header: list[str], rows: Sequence[list[Any]]) -> str:
    """A Markdown table; integers with thousands separators."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
