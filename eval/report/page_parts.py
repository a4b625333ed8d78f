"""What every page has: its parts, and the template that escapes all that it is given but charts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """num_labels: columns of words, which stand left; figures stand right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1


@dataclass(frozen=True)
class Figure:
    """legend: names of a bar's parts, in order."""

    caption: str
    chart: Markup
    legend: Sequence[str] = ()


@dataclass
class Section:
    anchor: str
    title: str
    texts: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@cache
def page_template(name: str) -> Any:
    """A template of this folder. No page has a script, and none fetches anything."""
    loader = FileSystemLoader(Path(__file__).parent)
    how: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, **how).get_template(name)


def short_name(name: str) -> str:
    """Of a local folder its last part; a hub id as it is."""
    return Path(name).name if Path(name).is_absolute() else name
