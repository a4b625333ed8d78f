"""A position is rotated alike in training, in decoding and by what reads the exported folder, whatever the target's
rotary settings, also beyond the target's original context; or one line says that it is not supported."""

import json
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.heads.nn import layers
from headstart.heads.nn.decoder_layer import LayerDriver
from headstart.heads.nn.layers import llama_config
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ORIGINAL, CONTEXT, THETA = 64, 256, 500.0
OLD: dict[str, Any] = {"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **OLD},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": THETA},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **OLD},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": THETA},
    "partial yarn": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5, **OLD},
}
ROPES["partial longrope"] = {**ROPES["longrope"], "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ROPES["partial longrope"]["partial_rotary_factor"] = 0.5
WIDE = [name for name in ROPES if not name.startswith("partial")]
FAMILIES = ["eagle", "eagle3", "block"]


@pytest.fixture
def head_of(tiny_target):
    """head_of(family, rope): a head of a target with these rotary settings, which its own layers need not read."""

    def make(family: str, rope: dict[str, Any], **own: Any) -> Any:
        target = tiny_target("llama", max_position_embeddings=CONTEXT)
        target.config.rope_parameters = rope
        return build_head(HEADS[family].config_class(type=family, **own), target, seed=1).eval()

    return make


def exported(head: Any, folder: Any, num: int) -> Tensor:
    """cos of the positions of a text of `num` tokens, by transformers' code and the saved config.json."""
    save_head(head, folder)
    config = json.loads((folder / "config.json").read_text())
    embedding = LlamaRotaryEmbedding(LlamaConfig(**{key: config[key] for key in layers.SERVED}))
    return embedding(torch.zeros(1), torch.arange(num)[None])[0][0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_a_heads_own_layers_rotate_alike_wherever_they_run(rope, family, head_of, tmp_path):
    head = head_of(family, ROPES[rope])
    like = torch.zeros(1)
    for num in (40, 200):
        trained = head.rotary(torch.arange(num)[None], like=like, num_positions=num)[0][0, 0]
        decoded = head.rotary.tables(CONTEXT, like=like).cos[:num]
        assert torch.equal(trained, decoded)
        torch.testing.assert_close(exported(head, tmp_path / str(num), num), trained, rtol=0, atol=1e-6)
    assert len(trained) == 200 and not torch.equal(trained[40], trained[199])


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "partial", "partial yarn", "partial longrope"])
def test_a_rotation_that_would_differ_is_refused_in_one_line(rope, head_of):
    """Named for a head's own layers, by hand or by a published head's config."""
    with pytest.raises(BadInput, match=r"^head\.architecture\.rope_parameters: (rope_type|partial_rotary_factor) "):
        head_of("eagle3", ROPES["linear"], architecture={"rope_parameters": ROPES[rope]})
    whole = {**ROPES["yarn"], "partial_rotary_factor": 1.0}
    assert head_of("eagle3", ROPES["linear"], architecture={"rope_parameters": whole}).rotary.frequencies.shape == (4,)


@pytest.mark.parametrize("rope", WIDE)
def test_a_layer_of_the_targets_class_rotates_a_position_alike_in_texts_of_all_lengths(rope, tiny_target):
    """As MTP's; up to the context, which ends where frequencies change."""
    context = ORIGINAL if rope in ("dynamic", "longrope") else CONTEXT
    target = tiny_target("qwen3", rope_parameters=ROPES[rope], max_position_embeddings=context)
    assert target.num_positions == context
    driver, seen = LayerDriver(target), []
    layer = driver.new_layer().eval()
    layer.register_forward_pre_hook(
        lambda _, args, how: seen.append(how["position_embeddings"][0][0]), with_kwargs=True
    )
    for num in (40, 200):
        positions = torch.arange(num)[None].clamp(max=context - 1)
        driver(layer, torch.zeros(1, num, target.hidden_size), positions, None, None)
    few, many = seen
    torch.testing.assert_close(few, many[:40], rtol=0, atol=0)
    if context == CONTEXT:
        assert not torch.equal(many[ORIGINAL - 1], many[199]), "each position has a rotation of its own"


def test_the_settings_of_the_target_are_the_ones_that_are_read(tiny_target):
    target = tiny_target("qwen3", rope_parameters=ROPES["yarn"], max_position_embeddings=CONTEXT)
    own: Any = llama_config(target.config).rope_parameters
    assert own["rope_type"] == "yarn" and own["original_max_position_embeddings"] == ORIGINAL
