"""Which model of a server is asked, and what the server says of itself. Against stand-ins."""

import pytest
from headstart.base.errors import BadInput
from headstart.engines.servers.address import Address, ServerFacts
from serving_stand_in import StandIn, listening

TARGET = "/models/qwen"
LORAS = [{"id": "base", "root": "R"}, {"id": "base-too", "root": "R"}, {"id": "lora", "root": "L", "parent": "base"}]


def served(cards, **how):
    with listening(StandIn(cards=cards)) as url:
        return Address.of(url, where="--server").serving(**how).model


@pytest.mark.parametrize(
    ("cards", "target", "model"),
    [
        ([{"id": "llama"}, {"id": TARGET}], TARGET, TARGET),
        ([{"id": "llama"}, {"id": "Qwen"}], TARGET, "Qwen"),
        ([{"id": "llama"}, {"id": "openai/qwen"}], TARGET, "openai/qwen"),
        ([{"id": "llama", "root": "/m/llama"}, {"id": "mine", "root": TARGET}], TARGET, "mine"),
        ([{"id": "a/qwen"}, {"id": "b/qwen"}, {"id": TARGET}], TARGET, TARGET),
        (LORAS, TARGET, "base"),  # vLLM: two names of one model, and an adapter of it
        ([{"id": "gpt"}], TARGET, "gpt"),  # the only one
    ],
)
def test_of_several_models_the_target_is_asked(cards, target, model):
    assert served(cards, target=target) == model


@pytest.mark.parametrize(
    ("cards", "how", "problem"),
    [
        ([{"id": "llama"}, {"id": "phi"}], {"target": TARGET}, "models, llama, phi: .* the target's name, qwen"),
        ([{"id": "a/qwen"}, {"id": "b/qwen"}], {"target": TARGET}, "several models, a/qwen, b/qwen"),
        ([{"id": f"m{i}"} for i in range(9)], {}, r"m3, m4, \.\.\.: let it serve one alone"),
        (LORAS, {"model": "other"}, "serves base, base-too, lora, not other"),
    ],
)
def test_several_models_none_of_which_is_the_target_are_one_line(cards, how, problem):
    with pytest.raises(BadInput, match=problem) as told:
        served(cards, **how)
    assert "\n" not in str(told.value)


def test_a_server_says_its_version_and_the_longest_text_that_it_takes():
    cards = [{"id": "base", "max_model_len": 512}, {"id": "lora", "parent": "base", "max_model_len": None}]
    with listening(StandIn(cards=cards, version="0.32.0")) as url:
        for model in ("base", "lora"):
            assert Address.of(url, where="--server").serving(model).facts() == ServerFacts("0.32.0", 512)
    with listening(StandIn()) as url:
        assert Address.of(url, where="--server").serving().facts() == ServerFacts(None, None)
