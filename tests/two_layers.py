"""Fixtures of targets of two layers that end no text: what is measured on them does not depend on how deep they are."""

from collections.abc import Callable

import pytest
from headstart.targets.target import Target
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def target(tiny_target: Callable[..., Target]) -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="session")
def tiny_target(tiny_target: Callable[..., Target]) -> Callable[..., Target]:
    return lambda family, **changes: tiny_target(family, **{"num_hidden_layers": 2, "eos_token_id": None, **changes})


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    return lambda family, **changes: tiny_model(family, **{"num_hidden_layers": 2, "eos_token_id": None, **changes})
