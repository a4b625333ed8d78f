"""Sizes and settings that the tiny kinds have not: each decodes and trains as its model computes, or a line says why
it cannot."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from variations import REFUSED, VARIATIONS
from walk import walked

STEPS = ["load", "heads", "states", "plain", "chains", "trees", "batches", "batched trees"]
STEPS += ["train eagle3", "train block"]
MAY_BE_REFUSED = {"trees", "batched trees"}  # for recurrent layers and chunks
TOLD = [  # by faults that were there: what a layer counts itself, masks by kind of layer, layers that text skips
    *("llama4_temperature", "lfm3_window", "mllama"),
]


def check(name: str) -> None:
    found = walked(VARIATIONS[name], STEPS)
    step, line = REFUSED.get(name, ("", ""))
    assert found.keys() <= {step} if step else found.keys() <= MAY_BE_REFUSED, found
    assert all(said.startswith("refused: ") and line in said for said in found.values()), found
    assert not step or found, "it is refused"


@pytest.mark.parametrize("name", [*TOLD, *REFUSED])
def test_what_was_wrong_without_a_word_is_right_or_refused(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIATIONS if name not in {*TOLD, *REFUSED}])
def test_other_sizes_decode_and_train_as_the_model_computes(name):
    if VARIATIONS[name].model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    check(name)


def test_there_are_thirty_of_them():
    assert len(VARIATIONS) >= 30
