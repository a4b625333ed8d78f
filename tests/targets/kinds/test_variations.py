"""Sizes and settings that the tiny kinds have not: each decodes and trains as its model computes, or a line says why
it cannot."""

from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS
from headstart.heads.eagle3 import default_feature_layers
from headstart.heads.stored.fit import check_fit, head_size
from headstart.targets.loading import TargetConfig
from headstart.targets.skeleton import load_skeleton
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from variations import REFUSED, VARIATIONS
from walk import walked

DECODING = ["load", "states", "plain", "chains", "batches"]
STEPS = [*DECODING, "heads", "trees", "batched trees", "train eagle3", "train block"]
MAY_BE_REFUSED = {"trees", "batched trees"}  # for recurrent layers and chunks
# by faults that were there: what a layer counts itself, masks by kind of layer, layers that text skips
TOLD = ["llama4_temperature", "lfm3_window", "mllama"]


def check(name: str, steps: list[str]) -> None:
    found = walked(VARIATIONS[name], steps)
    step, line = REFUSED.get(name, ("", ""))
    assert found.keys() <= {step} if step else found.keys() <= MAY_BE_REFUSED, found
    assert all(said.startswith("refused: ") and line in said for said in found.values()), found
    assert not step or found, "it is refused"


@pytest.mark.parametrize("name", [*TOLD, *REFUSED])
def test_what_was_wrong_without_a_word_is_right_or_refused(name):
    check(name, DECODING)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_other_sizes_decode_and_train_as_the_model_computes(name):
    if VARIATIONS[name].model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    check(name, STEPS)


@pytest.mark.parametrize("head_type", ["eagle3", "block"])
def test_layers_that_text_does_not_pass_are_no_default_and_refused_in_a_line(head_type, tmp_path):
    """Llama 3.2 Vision's, of which layers 1 and 3 of these six read images alone."""
    config: Any = VARIATIONS["mllama"].config()
    config.text_config.cross_attention_layers = [1, 3]
    config.save_pretrained(tmp_path)
    target, make = TargetConfig(path=str(tmp_path)), HEADS[head_type].config_class
    assert default_feature_layers(6) == [1, 3, 5], "two of which it skips"
    assert head_size(make(type=head_type), load_skeleton(target)).feature_layers == (2, 4, 5)
    for layers, first in (([1, 2], 1), ([2, 3, 5], 3)):
        with pytest.raises(BadInput) as caught:
            check_fit(make(type=head_type, feature_layers=layers), target)
        said = f"feature layer {first}: a text alone does not pass this layer of {target.path}, take another"
        assert str(caught.value) == said
