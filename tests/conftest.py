"""What pytest asks of all tests: which are slow, and the fixtures that several folders share (shared_fixtures.py)."""

import gc
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import perturbing.py by name


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests to others (pytest-xdist) needs no fixtures, whose imports take seconds."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(import_module("shared_fixtures"))


def pytest_collection_finish() -> None:
    """A full collection over all that imports made takes a tenth of a second, as long as what some tests time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """By `fast_only`, cases that are not named are slow; by `slow_only`, those that are named, and the others soak."""
    for item in items:
        for mark in item.iter_markers("fast_only"):
            if not is_named(item, mark):
                item.add_marker(pytest.mark.slow)
        for mark in item.iter_markers("slow_only"):
            item.add_marker(pytest.mark.slow if is_named(item, mark) else pytest.mark.soak)


def is_named(case: pytest.Function, mark: pytest.Mark) -> bool:
    """Whether the mark lists the case's value of each parameter that it speaks of."""
    return all(case.callspec.params[name] in values for name, values in mark.kwargs.items())
