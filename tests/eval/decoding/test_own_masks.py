"""Targets whose layers bias slots (ALiBi) or hide them by a mask of their own: their text, in every way of decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafted import own_text, untrained
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.sparse_self import SparseSelfDrafter
from headstart.heads.drafting import DynamicTree
from headstart.heads.nn.documents import Documents
from headstart.heads.target import Target
from headstart.heads.targets import own_masks
from headstart.heads.targets.own_masks import OwnMasks
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
WINDOW = 8
KINDS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4, "n_head": 4},
    "falcon": {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
}
PROMPTS = [[1, 5, 9, 14, 33], [1, 7, 8, 3, 22, 40, 11, 6, 30, 31, 5, 9, 14, 2, 51, 8, 8, 3], [1], [1, 30, 31, 32]]
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
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    return make_model(kind)


@pytest.fixture(scope="module")
def target(kind: str) -> Target:
    return Target(make_model(kind), name=kind, fingerprint="")


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    """What transformers' own decoding writes behind each prompt."""
    found = []
    for prompt in PROMPTS:
        text = own_text(model, prompt, 24, min_new_tokens=24, eos_token_id=None)
        assert len(set(text)) > 5, "a text that could not tell right from wrong"
        found.append(text)
    return found


DRAFTERS: dict[str, Callable[[Target], Any]] = {
    "none": lambda target: None,
    "itself": DraftModelDrafter,
    "sparse itself": lambda target: SparseSelfDrafter(target, 32),
    "eagle3": lambda target: untrained("eagle3", target),
}


@pytest.mark.fast_only(drafter=["eagle3"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_are_the_models_own_text_alone_and_in_a_batch(drafter, target, texts):
    how = {**HOW, "num_draft_tokens": None if drafter == "none" else 3}
    for row in (1, 2):  # the longest, and a prompt of one token
        assert generate(target, DRAFTERS[drafter](target), PROMPTS[row], **how).token_ids == [texts[row]]
    done = generate(target, DRAFTERS[drafter](target), PROMPTS, **how)
    assert done.token_ids == texts
    if drafter == "itself":  # each draft is right, so none may be lost to a wrong bias or mask
        assert all(one.num_accepted[0] == 3 for one in done.rounds[1:-1])


def test_trees_are_the_models_own_text(target, texts):
    assert target.decodes_trees
    head, tree = DRAFTERS["eagle3"](target), DynamicTree(num_nodes=7, depth=3, top_k=3)
    assert generate(target, head, PROMPTS, tree=tree, **HOW).token_ids == texts


def test_packed_texts_have_the_states_that_they_have_alone(target):
    rows = [PROMPTS[1], PROMPTS[0], PROMPTS[3]]
    documents = Documents.of([[len(row) for row in rows]], num_positions=sum(map(len, rows)) + 2)
    whole = torch.tensor([sum(rows, []) + [0, 0]])
    alone = torch.cat([target.forward(torch.tensor([row])).post_norm for row in rows], 1)
    torch.testing.assert_close(target.forward(whole, documents=documents).post_norm[:, :-2], alone)


def test_the_models_own_forward_is_as_it_was(model, target, texts):
    """Also behind forwards of ours: masks and biases are replaced within them only."""
    ids = torch.tensor([PROMPTS[1] + texts[1]])
    generate(target, None, PROMPTS[1], **HOW)
    with torch.no_grad():
        torch.testing.assert_close(target.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_local_layer_is_known_by_its_mask():
    target = Target(make_model("gpt_neo"), name="gpt_neo", fingerprint="")
    assert [target.window_of(i) for i in range(4)] == [None, WINDOW, None, WINDOW]


def test_a_falcon_without_the_bias_reads_by_the_usual_mask(monkeypatch):
    monkeypatch.setitem(KINDS, "falcon", {**KINDS["falcon"], "alibi": False})
    target = Target(make_model("falcon"), name="falcon", fingerprint="")
    assert not target.own_masks and target.can_decode and target.decodes_trees


# Faults that the check at load has to see


def refused(kind: str) -> str:
    target = Target(make_model(kind), name=kind, fingerprint="")
    assert not target.can_decode
    with pytest.raises(BadInput, match="can be trained on, but not decoded$") as caught:
        generate(target, None, PROMPTS[0], **HOW)
    return str(caught.value)


def test_a_lost_window_is_refused(monkeypatch):
    monkeypatch.setattr(own_masks, "window_in", lambda mask: None)
    assert "has another state than in the model's own forward" in refused("gpt_neo")


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_a_lost_bias_is_refused(kind, monkeypatch):
    monkeypatch.setattr(OwnMasks, "_at_places", lambda self, bias: torch.zeros_like(bias))
    assert "has another state than in the model's own forward" in refused(kind)


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_a_bias_by_slot_instead_of_position_leaves_chains_alone(kind, monkeypatch):
    monkeypatch.setattr(OwnMasks, "_at_places", lambda self, bias: bias)
    target = Target(make_model(kind), name=kind, fingerprint="")
    assert target.can_decode and not target.decodes_trees
