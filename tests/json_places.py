"""Every place in a JSON object, so that tests can put another value there."""

import json
from collections.abc import Iterator
from typing import Any


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all keys, and of the items of lists of objects."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*place, key)
        if isinstance(inner, dict) or (isinstance(inner, list) and inner and isinstance(inner[0], dict)):
            yield from places_in(inner, (*place, key))


def changed(config: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    copy = json.loads(json.dumps(config))
    part = copy
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return copy
