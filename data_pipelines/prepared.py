"""A prepared data set on disk: its files, there complete or not at all, its card, and the page that people read."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from ..configs.errors import BadInput

SPLITS = ("train", "validation")
COUNTED = ("rows", "turns", "characters", "answer_characters", "bytes")
SIZE_CATEGORIES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}


@contextmanager
def unfinished(output: Path) -> Iterator[Path]:
    """A new folder beside `output` that takes its name at the end, or is removed where an error comes first.

    What a killed run left there is removed. `output` may be an empty folder.
    """
    folder = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        yield folder
        os.replace(folder, output)
    except OSError as error:
        raise BadInput(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SplitFile:
    """One .jsonl file that is written line by line, and what is counted of it."""

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._sha256 = sha256()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    @property
    def num_rows(self) -> int:
        return self._counts["rows"]

    def write(self, line: bytes, counts: tuple[int, int, int]) -> None:
        """counts: turns, characters, and characters of answers."""
        self._file.write(line)
        self._sha256.update(line)
        for key, count in zip(COUNTED, (1, *counts, len(line)), strict=True):
            self._counts[key] += count

    def close(self) -> dict[str, Any]:
        """Everything on the disk; the file's part of the card."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {**self._counts, "sha256": self._sha256.hexdigest()}


def read_card(output: Path) -> dict[str, Any] | None:
    """The card of a data set that is there; None where there is nothing, or an empty folder.

    BadInput: something else is there.
    """
    if not output.exists() or output.is_dir() and not any(output.iterdir()):
        return None
    try:
        card = json.loads((output / "card.json").read_text(encoding="utf-8"))
        return card if card["config"] and card["files"] is not None else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{output}: exists and is no prepared data set; give another output") from error


def check_unchanged(
    card: Mapping[str, Any], *, config: Mapping[str, Any], files: Mapping[str, int], output: Path
) -> None:
    """Raises BadInput that names what is not as it was when the card was written: a key, or a source's file."""
    was = card["config"]
    for key in sorted(was.keys() | config.keys()):
        if was.get(key) != config.get(key):
            problem = f"was prepared with {key} {was.get(key)}, now it is {config.get(key)}"
            raise BadInput(f"{output}: {problem}; give another output, or remove it")
    for name in sorted(card["files"].keys() | files.keys()):
        before, now = card["files"].get(name), files.get(name)
        if before != now:
            problem = f"{name} had {before} bytes when this was prepared from it, now {now}"
            raise BadInput(f"{output}: {problem}; give another output, or remove it")


def write_card(folder: Path, card: Mapping[str, Any], *, name: str) -> None:
    """card.json, and README.md with the same for people; the hub and `datasets` read its front matter."""
    text = json.dumps(card, indent=2, ensure_ascii=False)
    (folder / "card.json").write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))
    num_rows = sum(card["splits"][split]["rows"] for split in SPLITS)
    splits = [split for split in SPLITS if card["splits"][split]["rows"]]
    front = {
        "pretty_name": name,
        "task_categories": ["text-generation"],
        "size_categories": [next((size for limit, size in SIZE_CATEGORIES.items() if num_rows < limit), "1M<n")],
        "configs": [
            {"config_name": "default", "data_files": [{"split": split, "path": f"{split}.jsonl"} for split in splits]}
        ],
    }
    reasons = sorted(card["dropped"], key=lambda reason: -card["dropped"][reason])
    sources = [
        [name, counts["read"], counts["kept"], *(counts["dropped"].get(reason, 0) for reason in reasons)]
        for name, counts in card["sources"].items()
    ]
    if len(sources) > 1:
        sources.append(["all", card["read"], card["kept"], *(card["dropped"][reason] for reason in reasons)])
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"{card['kept']:,} of {card['read']:,} rows were kept.",
        table(["split", *COUNTED], [[split, *(card["splits"][split][key] for key in COUNTED)] for split in SPLITS]),
        "What was read, kept, and dropped by reason:",
        table(["source", "read", "kept", *reasons], sources),
        "A row's side of the split is a hash of its prompt. `card.json` has checksums and examples of dropped rows.",
        "The config:",
        f"```yaml\n{yaml.safe_dump(dict(card['config']), sort_keys=False, allow_unicode=True, width=110)}```",
    ]
    (folder / "README.md").write_bytes(("\n\n".join(parts) + "\n").encode("utf-8", "backslashreplace"))


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; numbers with thousands apart."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[f"{cell:,}" if isinstance(cell, int) else str(cell).replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
