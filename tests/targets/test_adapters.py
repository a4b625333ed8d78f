"""Adapters on a head of any family: they alone train, and what is saved is an ordinary head that drafts the same."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.engines.heads import (
    HEADS,
    build_head,
    load_head,
    save_head,
    start_head,
    start_vocabulary,
)
from headstart.targets.adapters import adapted_layers, add_adapters, merged_state


def fresh(head_type, target, **changes):
    return build_head(HEADS[head_type].config_class(type=head_type, **changes), target, seed=1)


def adapt(head):
    """With adapters of rank 3, which add nothing yet."""
    torch.manual_seed(2)
    add_adapters(head, rank=3, alpha=6.0, outputs=head.vocabulary_matrices(), key="train.lora_rank")
    return head


def trained(head):
    """With adapters that look trained."""
    with torch.no_grad():
        for layer in adapted_layers(adapt(head)).values():
            layer.lora_B["default"].weight.normal_(std=0.1)
    return head


def test_adapters_start_as_nothing_and_train_alone(head_type, target, make_batch):
    head = fresh(head_type, target).eval()
    batch = make_batch(target, head)
    before, names = head.teacher_forced_logits(batch)[1], set(head.state_dict())
    assert torch.equal(adapt(head).eval().teacher_forced_logits(batch)[1], before)
    assert set(merged_state(head)) == names
    head = trained(fresh(head_type, target)).train()
    kept = {name: p.clone() for name, p in head.named_parameters() if ".lora_" not in name}
    parameters = [p for p in head.parameters() if p.requires_grad]
    assert len(parameters) == 2 * len(adapted_layers(head)) > 0
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        head.loss(batch).loss.backward()
        for name, parameter in head.named_parameters():
            has_gradient = parameter.grad is not None and parameter.grad.abs().sum() > 0
            assert has_gradient == (".lora_" in name), name
        optimizer.step()
    assert all(torch.equal(p, kept[name]) for name, p in head.named_parameters() if name in kept)


def test_what_is_saved_is_an_ordinary_head(head_type, target, make_batch, tmp_path):
    plain = save_head(fresh(head_type, target), tmp_path / "plain")
    head = trained(start_head(fresh(head_type, target).config, target, plain)).eval()
    batch = make_batch(target, head)
    adapted = head.teacher_forced_logits(batch)[1]
    loaded = load_head(save_head(head, tmp_path / "merged"), target)
    assert not adapted_layers(loaded)
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {"config.json", "model.safetensors"}
    torch.testing.assert_close(loaded.teacher_forced_logits(batch)[1], adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(load_head(plain, target).teacher_forced_logits(batch)[1], adapted, atol=1e-3)


def test_output_layers_are_left_as_they_are(target):
    assert set(adapted_layers(adapt(fresh("medusa", target, num_depths=2)))) == {"0.0.linear", "1.0.linear"}
    size = target.hidden_size  # of most layers' outputs, and as many tokens
    config = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=size)
    adapted = adapted_layers(adapt(build_head(config, target, draft_token_ids=torch.arange(size))))
    assert "lm_head" not in adapted and {"fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"} <= adapted.keys()


def test_adapters_are_added_once_and_by_peft_alone(target, monkeypatch):
    head = adapt(fresh("eagle3", target))
    with pytest.raises(BadInput, match="^train.lora_rank 3: this Eagle3Head has adapters already"):
        adapt(head)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BadInput, match=r"^train.lora_rank 3: needs the package peft \(pip install peft\)$"):
        adapt(fresh("medusa", target))


# Going on from a head that was trained before


def test_a_head_starts_as_the_folder_left_it(head_type, target, make_batch, tmp_path):
    saved = build_head(HEADS[head_type].config_class(type=head_type), target, seed=5)
    folder = save_head(saved, tmp_path / "head", dtype=torch.bfloat16)
    head = start_head(saved.config, target, folder, seed=1)
    assert {p.dtype for p in head.parameters()} == {torch.float32} and all(p.requires_grad for p in head.parameters())
    assert head.training
    for (name, mine), theirs in zip(head.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float()), name


CUT = [("eagle3", {}), ("medusa", {"output": "own"}), ("block", {"output": "own", "markov_rank": 4})]


@pytest.mark.parametrize("kind, own", CUT)
def test_its_draft_vocabulary_goes_with_it_and_grows(kind, own, target, make_batch, tmp_path):
    few, more = torch.tensor([1, 2, 3, 5, 8, 13, 21]), torch.tensor([1, 2, 3, 4, 5, 8, 13, 14, 21])
    config = HEADS[kind].config_class(type=kind, draft_vocab_size=len(few), **own)
    saved = build_head(config, target, draft_token_ids=few, seed=5).eval()
    folder = save_head(saved, tmp_path / "head")
    same: Any = start_head(config, target, folder)
    assert torch.equal(same.vocabulary.to_target, few)
    wider = replace(config, draft_vocab_size=len(more))
    head = start_head(wider, target, folder, draft_token_ids=more, seed=1).eval()
    batch = make_batch(target, saved)
    _, before = saved.teacher_forced_logits(batch)
    _, after = head.teacher_forced_logits(batch)
    places = torch.isin(more, few)
    assert torch.allclose(after[..., places], before, atol=1e-5)
    assert start_vocabulary(config, target, folder) == few.tolist()
    with pytest.raises(BadInput, match="does not contain the head's own"):
        start_head(wider, target, folder, draft_token_ids=more + 1)
    for other, size in ((wider, 9), (replace(config, draft_vocab_size=None), None)):
        with pytest.raises(BadInput, match=rf"head .*/head: its draft_vocab_size is 7, not {size}$"):
            start_head(other, target, folder)


def test_another_target_is_a_start_too(head_type, target, tiny_target, tmp_path):
    """Where load_head refuses: a head for a fine-tuned target starts from the one of the model it came from."""
    folder = save_head(fresh(head_type, target), tmp_path / "head")
    tuned = tiny_target("llama")
    tuned.stored_fingerprint = "another"
    start_head(fresh(head_type, tuned).config, tuned, folder)
    with pytest.raises(BadInput, match="trained on target tiny-llama"):
        load_head(folder, tuned)


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        ({"type": "medusa", "num_depths": 3}, r"head .*: tensor 2\.0\.linear\.bias: expected \(32,\), found None"),
        ({"type": "eagle3"}, r"head .*: is of type medusa, not eagle3"),
    ],
)
def test_a_head_of_another_kind_is_refused(start, problem, target, tmp_path):
    folder = save_head(fresh("medusa", target, num_depths=2), tmp_path / "head")
    with pytest.raises(BadInput, match=problem):
        start_head(HEADS[start["type"]].config_class(**start), target, folder)


def test_a_target_of_another_size_is_refused_with_the_shapes(head_type, target, tiny_target, tmp_path):
    folder = save_head(fresh(head_type, target), tmp_path / "head")
    wide = tiny_target("llama", hidden_size=64)
    with pytest.raises(BadInput, match=r"tensor .*: expected \(.*64.*\), found \(.*32.*\)$"):
        start_head(fresh(head_type, wide).config, wide, folder)
