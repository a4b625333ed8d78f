"""A part between the final norm and the output layer, as ModernBERT's prediction head, takes part in all logits."""

from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.heads.loss.functions import DraftVocabulary
from headstart.heads.loss.restricted import RestrictedLogits
from headstart.heads.target import Target
from headstart.heads.targets import check
from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

IDS = torch.tensor([[1, 7, 8, 3, 40, 22, 5]])


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    tokens: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    layers = ["full_attention", "sliding_attention"] * 2
    config = ModernBertDecoderConfig(**sizes, **tokens, num_attention_heads=4, layer_types=layers, local_attention=8)
    model = ModernBertDecoderForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(), name="modern", fingerprint="")


def test_it_is_found_by_what_the_output_layer_reads(target):
    assert target.before_output is target.model.lm_head and target.output_layer is target.model.decoder
    output, theirs = target.forward(IDS), target.model(IDS, output_hidden_states=True)
    torch.testing.assert_close(output.post_norm, theirs.hidden_states[-1])
    torch.testing.assert_close(target.logits(output.post_norm), theirs.logits)
    assert torch.equal(target.best(output.post_norm), theirs.logits.argmax(-1))


def test_logits_of_a_draft_vocabulary_are_those_of_all_tokens(target):
    states, some = target.forward(IDS).post_norm[0], torch.tensor([3, 4, 9, 60])
    few = RestrictedLogits(target, DraftVocabulary.of(some, 61))(states)
    torch.testing.assert_close(few, target.logits(states)[:, some])


def test_a_target_without_one_has_none(tiny_target):
    assert tiny_target("llama").before_output is None


def test_without_it_the_logits_are_refused(monkeypatch):
    monkeypatch.setattr(check, "found_before_output", lambda *_: None)
    with pytest.raises(
        BadInput, match="^target modern: ModernBertDecoderForCausalLM: its logits are computed in an unkn"
    ):
        Target(make_model(), name="modern", fingerprint="")
