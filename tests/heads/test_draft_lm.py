"""The draft language model: its loss is that of a plain loop, what is saved is a Hugging Face model."""

import json
import shutil
from typing import Any

import pytest
import torch
from formulas import check_formulas
from headstart.base.errors import BadInput
from headstart.engines.heads import build_head, load_head, save_head
from headstart.eval.decoding import generate
from headstart.eval.drafters.registry import build_drafter
from headstart.heads import draft_lm
from headstart.heads.draft_lm import DraftLMConfig
from headstart.targets.target import Target
from perturbing import perturb
from transformers import AutoModelForCausalLM

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
IDS = torch.tensor([[1, 5, 9, 33, 20, 7, 7, 51, 4, 4, 60]])


def build(config, target) -> Any:
    return build_head(config, target)


@pytest.fixture
def small(tiny_model, tmp_path):
    """small(family, ...): the folder of a small model."""

    def make(family="llama", **changes):
        folder = tmp_path / f"small-{len(list(tmp_path.iterdir()))}"
        tiny_model(family, num_hidden_layers=1, **changes).save_pretrained(folder)
        return str(folder)

    return make


def logits_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


# Training


def test_the_loss_is_a_plain_loop_over_the_models_logits(target, make_batch):
    head = perturb(build(DraftLMConfig(loss={"soft_ce": 1.0}, num_depths=3), target), 0.1, seed=4)
    batch = make_batch(target, head)
    ours = head.reader.model(input_ids=batch.input_ids).logits  # [B, T, V]
    check_formulas(head, batch, lambda row, t: ours[row, t + 1 : t + 4])


def test_a_fresh_model_starts_from_the_targets_embedding(family, tiny_target):
    target = tiny_target(family)
    head = build(DraftLMConfig(num_layers=1), target)
    assert type(head.reader.model) is type(target.model) and head.reader.num_layers == 1
    assert torch.equal(head.reader.input_embedding.weight, target.input_embedding.weight)
    assert torch.equal(head.reader.output_layer.weight, target.output_layer.weight)
    smaller = build(DraftLMConfig(hidden_size=16), target)
    assert smaller.reader.hidden_size == 16 and smaller.reader.vocab_size == target.vocab_size
    assert (
        generate(target, smaller, PROMPTS, max_new_tokens=6).token_ids
        == generate(target, None, PROMPTS, max_new_tokens=6).token_ids
    )


def test_a_trained_model_is_taken_as_it_is(target, small):
    folder = small("qwen2")
    head = build(DraftLMConfig(path=folder), target)
    torch.testing.assert_close(head.reader.model(IDS).logits, logits_of(folder))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in head.parameters())


def test_padding_of_the_vocabulary_is_the_targets(tiny_target, small):
    """As in a family whose bigger models pad more: saved with the target's size, which serving engines ask for."""
    target = tiny_target("llama", vocab_size=400)
    for size in (398, 402):
        folder = small(vocab_size=size)
        head = build(DraftLMConfig(path=folder), target)
        assert head.serving_config()["vocab_size"] == head.reader.vocab_size == 400
        torch.testing.assert_close(head.reader.model(IDS).logits[..., :398], logits_of(folder)[..., :398])


# What is saved


def test_a_saved_head_is_a_hugging_face_model(family, tiny_target, small, tmp_path):
    """Also where the output layer is the embedding, and without the folder that it was trained from."""
    target, source = tiny_target(family), small(family) if family == "qwen3" else None
    head = perturb(build(DraftLMConfig(path=source), target), 0.1, seed=4).eval()
    folder = save_head(head, tmp_path / "head")
    if source is not None:
        shutil.rmtree(source)
    found: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = found
    assert not any(info.values()), info
    torch.testing.assert_close(model(IDS).logits, head.reader.model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert "headstart" in json.loads((folder / "config.json").read_text())
    loaded: Any = load_head(folder, target)
    assert torch.equal(loaded.reader.model(IDS).logits, head.reader.model(IDS).logits)


def test_rotary_frequencies_stay_exact_in_bf16(target):
    head = build(DraftLMConfig(), target)
    before = head.reader.base.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.reader.dtype == torch.bfloat16
    assert torch.equal(head.reader.base.rotary_emb.inv_freq, before)


# Drafting


def test_as_a_head_and_as_a_draft_model_it_drafts_the_same(saved_target, small, tmp_path):
    target = Target.load(saved_target)
    head = perturb(build(DraftLMConfig(path=small("qwen3")), target), 0.1, seed=4)
    folder = save_head(head, tmp_path / "head")
    for file in saved_target.glob("*token*"):
        shutil.copy(file, folder)
    rounds, drafts = [], []
    for spec in (f"head:{folder}", f"draft-model:{folder}"):
        drafter: Any = build_drafter(spec, target)[1]
        proposed: list[list[list[int]]] = []
        propose = drafter.propose

        def watched(state, *, num_draft_tokens, propose=propose, proposed=proposed):
            proposal = propose(state, num_draft_tokens=num_draft_tokens)
            proposed.append(proposal.tokens.tolist())
            return proposal

        drafter.propose = watched
        done = generate(target, drafter, PROMPTS, max_new_tokens=24, num_draft_tokens=4)
        rounds.append([one.num_accepted for one in done.rounds])
        drafts.append(proposed)
    assert rounds[0] == rounds[1] and drafts[0] == drafts[1] and len(drafts[0]) > 3


# Refusals


def test_another_vocabulary_is_refused_before_weights_are_loaded(target, small, monkeypatch):
    folder = small(vocab_size=30)
    monkeypatch.setattr(draft_lm.Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(BadInput) as caught:
        build(DraftLMConfig(path=folder), target)
    assert f"head.path {folder}: its vocabulary has 30 tokens, those of tiny-llama 61" in str(caught.value)


def test_another_tokenizer_is_refused(saved_target, tmp_path):
    folder = shutil.copytree(saved_target, tmp_path / "stranger")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"w{60 - i}": i for i in range(61)}
    tokenizer["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BadInput) as caught:
        build(DraftLMConfig(path=str(folder)), Target.load(saved_target))
    assert "is another: 'w" in str(caught.value)
