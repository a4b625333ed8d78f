"""Where vLLM is, as `make test-vllm` has it, and the file that takes down what both engines counted.

Modules of this folder and of tests/targets are imported by name.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results import written_down

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets" / "kinds")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="an interpreter that can import vllm")
    parser.addoption("--smollm2-head", help="a trained head of SmolLM2-135M-Instruct; else one is trained, a little")
    parser.addoption("--vllm-log", help="a JSON file for what both engines counted")


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--vllm-python", default=None)
    if not found:
        pytest.skip("needs an environment with vLLM: make test-vllm")
    return str(found)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Of each head, once its test has passed; written down at the end where --vllm-log names a file."""
    with written_down(request.config.getoption("--vllm-log", default=None)) as found:
        yield found
