"""Checking the types of values in JSON that others wrote. A serving image may lack pydantic, which only `read_json`
needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from .errors import BadInput

T = TypeVar("T")
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}


@dataclass(frozen=True)
class TypedKeys:
    """A JSON object whose values are checked when they are read. where: of it, the prefix of keys in errors, such as
    `config.json: eagle_config.`"""

    values: Mapping[str, Any]
    where: str = ""

    def read(self, key: str, kind: type[T]) -> T | None:
        """A value; None if the key is missing or null. Raises BadInput if it is not of that type."""
        value = self.values.get(key)
        if value is not None:
            check_type(value, kind, name=self.where + key)
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """`read` of a key that must be there. Raises BadInput if it is missing or null too."""
        value = self.read(key, kind)
        if value is None:
            raise BadInput(f"{self.where}{key}: missing")
        return value

    def count(self, key: str) -> int | None:
        """`read` of a whole number from 1 on."""
        value = self.read(key, int)
        if value is not None and value < 1:
            raise BadInput(f"{self.where}{key}: expected at least 1, found {value}")
        return value

    def without(self, key: str) -> "TypedKeys":
        """The same object with one key less."""
        return TypedKeys({name: value for name, value in self.values.items() if name != key}, self.where)

    def inner(self, key: str) -> "TypedKeys":
        """The object under a key; an empty one if the key is missing or null."""
        return TypedKeys(self.read(key, dict) or {}, f"{self.where}{key}.")

    def inner_or_self(self, key: str) -> "TypedKeys":
        """The object under a key; this one if the key is missing or null."""
        return self if self.values.get(key) is None else self.inner(key)


def check_type(value: Any, kind: Any, *, name: str) -> None:
    """Raises BadInput, which opens with the name, if a JSON value is not of a type; kind: as in `fits`."""
    if not fits(value, kind):
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise BadInput(f"{name}: expected {kind_in_words(kind)}, found {shown}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a type: a plain one, a list or dict of such, Literal or a union. A whole number is a
    float too; true and false are no numbers. Values of all other types are accepted."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, args[1]) for item in value.values())
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind or kind not in (*NAMES, NoneType)


def kind_in_words(kind: Any) -> str:
    """A type of `fits` in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(kind_in_words(arg) for arg in args if arg is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is list:
        return f"a list, each item {kind_in_words(args[0])}"
    return NAMES[origin or kind]


def read_json(cls: type[T], document: dict[str, Any], *, where: str) -> T:
    """A dataclass, those nested in it too, from JSON. Raises BadInput naming a key that is missing or of the wrong
    type."""
    from pydantic import ValidationError

    try:
        return checks_of(cls).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, (where, *first["loc"])))
        raise BadInput(f"{key}: {'is missing' if first['type'] == 'missing' else first['msg']}") from error


@cache
def checks_of(cls: type) -> Any:
    """pydantic's TypeAdapter of a dataclass, made once: that takes far longer than a check."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)
