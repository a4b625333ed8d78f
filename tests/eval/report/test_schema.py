"""docs/reference/report_schema.md and the types of report.json have the same keys."""

import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from headstart.eval.figures.environment import Environment, TargetInfo
from headstart.eval.figures.recorded_training import RecordedTraining
from headstart.eval.measurement.result import Result

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "report_schema.md").read_text()
LINKED = {"environment", "training"}  # described elsewhere


def rows_of(heading: str) -> list[tuple[set[str], set[str]]]:
    """Of the first table below a line: the keys in the first column of each row, and all names in the rest of it."""
    rows = PAGE.split(heading, 1)[1].split("|---", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    cells = [row.strip("|").split("|", 1) for row in rows]
    return [(names_in(keys), names_in(rest)) for keys, rest in cells]


def names_in(text: str) -> set[str]:
    return {name.split(".")[0] for name in re.findall(r"`([a-z][a-z0-9_.]*)`", text)}


def nested_in(kind) -> list[type]:
    """The dataclasses in a field's type."""
    if is_dataclass(kind):
        return [kind] if isinstance(kind, type) else []
    return [found for part in typing.get_args(kind) for found in nested_in(part)]


def keys_of(kind: type) -> set[str]:
    """The keys of a type in JSON, and those below them; a training record is described in reference/run_folder.md."""
    if kind is RecordedTraining:
        return set()
    types = typing.get_type_hints(kind)
    below = [keys_of(nested) for name in types for nested in nested_in(types[name])]
    return {field.name for field in fields(kind)}.union(*below)


RESULT_TYPES = typing.get_type_hints(Result)
RESULT_ROWS = rows_of("Each result:")


def test_every_key_of_a_result_is_documented_and_no_other():
    documented = set().union(*(keys for keys, _ in RESULT_ROWS))
    assert documented == set(RESULT_TYPES)


@pytest.mark.parametrize("key", [key for key in RESULT_TYPES if nested_in(RESULT_TYPES[key])])
def test_every_nested_key_is_in_the_row_of_its_key_and_no_other(key):
    [rest, *_] = [rest for keys, rest in RESULT_ROWS if key in keys]
    expected = set().union(*(keys_of(kind) for kind in nested_in(RESULT_TYPES[key])))
    assert rest - LINKED - (set(RESULT_TYPES) - expected) == expected


@pytest.mark.parametrize(("key", "kind"), [("environment", Environment), ("target", TargetInfo)])
def test_every_key_of_the_environment_and_the_target_is_documented_and_no_other(key, kind):
    [rest] = [rest for keys, rest in rows_of("## report.json") if keys == {key}]
    assert rest == keys_of(kind)
