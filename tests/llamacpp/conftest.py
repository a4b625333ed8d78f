"""Where llama.cpp is, as `make test-llamacpp` has it, and the file that takes down what both engines counted."""

from collections.abc import Iterator
from typing import Any

import pytest
from headstart.engines.servers.llama_server import PACKAGE
from results import written_down


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--llama-server", default=PACKAGE, help="a binary to serve with instead of that package")
    parser.addoption("--llama-cpp", help="a checkout, for its converter")
    parser.addoption("--llama-log", help="a JSON file for what both engines counted")


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Of each head, once its test has passed; written down at the end where --llama-log names a file."""
    with written_down(request.config.getoption("--llama-log", default=None)) as found:
        yield found
