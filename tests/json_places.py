"""Every place in a JSON object, so that tests can put another value there."""

import json
from collections.abc import Iterator
from typing import Any

GONE = object()  # instead of a value: the key or item is taken out


def places_in(value: Any, place: tuple[Any, ...] = (), *, in_lists: bool = False) -> Iterator[tuple[Any, ...]]:
    """The places of all keys, and of the items of lists of objects. Args: in_lists: and of the items of all lists."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*place, key)
        is_list = isinstance(inner, list) and inner and (in_lists or isinstance(inner[0], dict))
        if isinstance(inner, dict) or is_list:
            yield from places_in(inner, (*place, key), in_lists=in_lists)


def changed(config: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    copy = json.loads(json.dumps(config))
    part = copy
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    if value is GONE:
        del part[place[-1]]
    return copy
