"""Targets whose layers bias slots (ALiBi): packed rows, and faults that the check at load sees. Their text is
compared in tests/targets/kinds."""

from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding import generate
from headstart.targets.layers.documents import Documents
from headstart.targets.layers.own_masks import OwnMasks
from headstart.targets.target import Target
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # a tied table would only ever repeat its input
}
KINDS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
}
PROMPTS = [[1, 5, 9, 14, 33], [1, 7, 8, 3, 22, 40, 11, 6, 30, 31, 5, 9, 14, 2, 51, 8, 8, 3], [1, 30, 31, 32]]
HOW: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": []}


def make_model(kind: str) -> Any:
    names = AutoConfig.for_model(kind).attribute_map
    sizes = {key: value for key, value in SIZES.items() if names.get(key, key) not in KINDS[kind]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **KINDS[kind]}))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return Target.of(make_model(request.param), name=request.param, fingerprint="")


def test_the_models_own_forward_is_as_it_was(target):
    """Also behind forwards of ours: biases are replaced within them only."""
    model = make_model(target.name)
    [text] = generate(target, None, PROMPTS[1], **HOW).token_ids
    ids = torch.tensor([PROMPTS[1] + text])
    with torch.no_grad():
        torch.testing.assert_close(target.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_mask_keeps_texts_of_a_row_apart(target):
    """Texts in one row have the states that they have alone, as parallel heads need."""
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    parts = [(torch.full_like(row, i), torch.arange(row.shape[1])[None]) for i, row in enumerate(rows)]
    documents = Documents(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))
    together = target.forward(torch.cat(rows, 1), documents=documents)
    alone = torch.cat([target.forward(row).post_norm for row in rows], 1)
    torch.testing.assert_close(together.post_norm, alone, rtol=1e-4, atol=1e-4)


def test_a_falcon_without_the_bias_reads_by_the_usual_mask(monkeypatch):
    monkeypatch.setitem(KINDS, "falcon", {**KINDS["falcon"], "alibi": False})
    target = Target.of(make_model("falcon"), name="falcon", fingerprint="")
    assert not target.own_masks and target.can_decode and target.decodes_trees


# Faults that the check at load has to see


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_a_lost_bias_is_refused(kind, monkeypatch):
    monkeypatch.setattr(OwnMasks, "_at_places", lambda self, bias: torch.zeros_like(bias))
    target = Target.of(make_model(kind), name=kind, fingerprint="")
    assert not target.can_decode
    refusal = "has another state than in the model's own forward.* can be trained on, but not decoded$"
    with pytest.raises(BadInput, match=refusal):
        generate(target, None, PROMPTS[0], **HOW)


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_a_bias_by_slot_instead_of_position_leaves_chains_alone(kind, monkeypatch):
    monkeypatch.setattr(OwnMasks, "_at_places", lambda self, bias: bias)
    target = Target.of(make_model(kind), name=kind, fingerprint="")
    assert target.can_decode and not target.decodes_trees
