"""Marks what backward computes a second time, so that whoever counts operations can tell it from a model's own."""

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0  # of the process: backward runs in threads of its own


@contextmanager
def repeated() -> Iterator[None]:
    """Around what was computed before and not kept."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_repeated() -> bool:
    return _depth > 0
