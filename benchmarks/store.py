"""Benchmarks of many cells: one JSON file gets each cell as it is measured, so that a stopped run can resume."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..base.errors import BadInput, first_line
from ..base.files import write_text
from ..targets.loading import release_memory

Figures = dict[str, Any]  # of a cell, as JSON has them


@dataclass(frozen=True, kw_only=True)
class BenchedCell:
    """What is measured in one go: all that its figures depend on, and a name that no other cell has."""

    name: str


C = TypeVar("C", bound=BenchedCell)


class CellStore(Generic[C]):
    """The document of a run: a header, `cells` by name, and what follows from them.

    A cell that is there, measured with the same settings, is not measured again; one that failed is.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        summarize: Callable[[Figures], Figures] = lambda _: {},
        *,
        is_new: bool = False,
    ):
        """Args:
            summarize: from the document to keys that are added to it.
            is_new: write over a file that is there.

        Raises: BadInput on a file of another run.
        """
        self.path, self.summarize = path, summarize
        self.document: Figures = {**header, "cells": {}}
        if is_new or not path.is_file():
            return
        try:
            self.document = json.loads(path.read_text(encoding="utf-8"))
            before = {key: self.document[key] for key in header}
            self.document["cells"].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise BadInput(f"{path}: not a file of this benchmark: {reason}; choose another --output") from error
        for key, value in as_json(header).items():
            if before[key] != value:
                raise BadInput(f"{path}: measured with {key} {before[key]}, now {value}; choose another --output")

    def run(self, cells: Sequence[C], measure: Callable[[C], Figures]) -> int:
        """Measure the missing cells, a line for each; returns the exit code: 1 where a cell failed, memory apart."""
        missing = [cell for cell in cells if not self.has(cell)]
        print(f"{len(missing)} of {len(cells)} cells to measure", flush=True)
        for cell in missing:
            began = time.perf_counter()
            figures = attempt(measure, cell)
            seconds = round(time.perf_counter() - began, 2)
            self.add(cell, {"seconds": seconds, **figures})
            print(f"{cell.name}: {describe(figures)} ({seconds:.1f} s)", flush=True)
        failed = [entry["failed"] for entry in self.document["cells"].values() if "failed" in entry]
        return 1 if any("out of memory" not in reason.lower() for reason in failed) else 0

    def has(self, cell: C) -> bool:
        entry = self.document["cells"].get(cell.name, {})
        return entry.get("asked") == as_json(asdict(cell)) and "failed" not in entry

    def add(self, cell: C, figures: Figures) -> None:
        """Write the document with this cell."""
        self.document["cells"][cell.name] = {"asked": asdict(cell), **figures}
        self.document |= self.summarize(self.document)
        write_text(self.path, record_lines(self.document))


def record_lines(document: Figures) -> str:
    """The document as JSON with a line for each key, and for each cell of `cells`: a diff shows what was measured."""
    cells = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in document["cells"].items())
    parts = {key: json.dumps(value) for key, value in document.items()} | {"cells": f"{{\n{cells}\n }}"}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {part}" for key, part in parts.items()) + "\n}\n"


def attempt(measure: Callable[[C], Figures], cell: C) -> Figures:
    """The cell's figures, or `failed`: what was raised. Memory is freed behind it."""
    try:
        return measure(cell)
    except Exception as error:  # out of memory, a step that cannot be captured or compiled: the other cells count
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}
    finally:
        release_memory()


def describe(figures: Figures) -> str:
    """Single figures in a line, and medians of those that have them."""
    medians = {key: value["median"] for key, value in figures.items() if isinstance(value, dict) and "median" in value}
    singles = [(key, value) for key, value in {**figures, **medians}.items() if isinstance(value, str | int | float)]
    return ", ".join(f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in singles)


def picked(record: object, keys: str) -> Figures:
    """Some attributes of a record, named in a text, by name, as a JSON file gives them back."""
    return as_json({key: getattr(record, key) for key in keys.split()})


def as_json(value: Any) -> Any:
    """The value as a JSON file gives it back."""
    return json.loads(json.dumps(value))
