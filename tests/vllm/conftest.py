"""Where vLLM is: `make test-vllm` gives the interpreter of its environment."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="an interpreter that can import vllm")
