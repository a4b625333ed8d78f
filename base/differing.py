"""What differs between the settings with which something was made and those of now, in words."""

import os
from collections.abc import Mapping
from typing import Any


def first_difference(before: Any, now: Any, *, at: str = "", is_part: bool = False) -> str | None:
    """The first setting that differs, by its dotted key, such as `sampling.seed 0, now 1`; None if they are equal.

    Args: is_part: `before` may have more settings than `now`.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in now if is_part else [*now, *before]:
            place = f"{at}.{key}" if at else key
            if found := first_difference(before.get(key), now.get(key), at=place, is_part=is_part):
                return found
        return None
    if is_same(before, now):
        return None
    shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in map(str, (before, now))]
    return f"{at} {shown[0]}, now {shown[1]}"


def is_same(value: Any, other: Any) -> bool:
    """Whether two settings are equal, or two ways to write one path or the paths of a list."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    if value == other or not (isinstance(value, str) and isinstance(other, str) and value and other):
        return value == other
    try:
        first, second = (os.path.realpath(os.path.expanduser(text)) for text in (value, other))
    except ValueError:  # no path has such characters
        return False
    return first == second
