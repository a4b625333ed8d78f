"""Targets of two layers that end no text: drafters from text, and other models, do not read between layers."""

from collections.abc import Callable

import pytest
from headstart.heads.target import Target


@pytest.fixture(scope="session")
def target(tiny_target: Callable[..., Target]) -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="session")
def tiny_target(tiny_target: Callable[..., Target]) -> Callable[..., Target]:
    return lambda family, **changes: tiny_target(family, **{"num_hidden_layers": 2, "eos_token_id": None, **changes})
