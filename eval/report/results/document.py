"""report.json as an object, read and written, and the raw rounds beside it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....base.errors import BadInput
from ....base.files import write_json, write_text
from ....base.jsonl import loads
from ....base.typed import read_json
from ....targets.target import Target
from ...figures.environment import Environment, TargetInfo
from ...measurement.result import Result

SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Report:
    """What docs/reference/report_schema.md describes."""

    environment: Environment
    target: TargetInfo
    results: list[Result]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "environment": asdict(self.environment),
            "target": asdict(self.target),
            "results": [result.to_json() for result in self.results],
        }


def build_report(target: Target, results: Iterable[Result]) -> Report:
    """Measures the copy bandwidth of this machine too, in under a second."""
    environment = Environment.of(target)
    copied = environment.copy_gigabytes_per_second
    return Report(environment, TargetInfo.of(target), [result.with_share(copied) for result in results])


def read_report(path: Path) -> Report:
    """Raises BadInput if the file is no report of this schema version."""
    try:
        document = loads(path.read_text())
        if "served" in document:
            how = "to compare heads there, name them in one command, --drafter head:A@3 --drafter head:B@3"
            raise BadInput(f"{path}: a report of a server; {how}")
        version, parts = document["schema_version"], [document[key] for key in ("environment", "target", "results")]
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: no report of headstart eval: {type(error).__name__} {error}") from error
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise BadInput(f"{path}: schema_version {version}, expected {SCHEMA_VERSION}")
    if not isinstance(parts[2], list):
        raise BadInput(f"{path}: results: expected a list, got {parts[2]!r:.60}")
    return Report(
        read_json(Environment, parts[0], where=f"{path}: environment"),
        read_json(TargetInfo, parts[1], where=f"{path}: target"),
        [Result.from_json(entry, where=f"{path}: results.{i}") for i, entry in enumerate(parts[2])],
    )


def write_report(folder: str | Path, report: Report, rounds: Iterable[dict[str, Any]]) -> Path:
    """Write report.json and rounds.jsonl; returns the path of report.json."""
    write_text(Path(folder) / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rounds))
    return write_json(Path(folder) / "report.json", report.to_json())


def short_name(name: str) -> str:
    """The last part of a local folder's path; a hub id as it is."""
    return Path(name).name if Path(name).is_absolute() else name
