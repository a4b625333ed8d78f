"""Losses over the draft vocabulary alone: the target's other logits are not computed, and nothing else changes."""

import pytest
import torch
from headstart.engines.heads import build_head
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.loss.chunked import summed_loss
from headstart.heads.loss.functions import ALL_LOSSES, DraftVocabulary, LossSpec, Rows, TargetRows
from headstart.heads.loss.restricted import RestrictedLogits
from headstart.targets.target import Target

CUT = torch.tensor([0, 3, 4, 9, 17, 31, 32, 50])


def states(target, seed):
    return torch.randn(12, target.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_restricted_logits_are_the_targets(family, tiny_target):
    target = tiny_target(family)
    target.logit_cap, target.logit_scale = 2.0, 0.5
    x = states(target, 1)
    whole = target.logits(x)
    assert 1 < whole.abs().max() <= 2, "the cap is at work"
    ours = RestrictedLogits(target, DraftVocabulary.of(CUT, target.vocab_size))(x)
    torch.testing.assert_close(ours.float(), whole[:, CUT])
    torch.testing.assert_close(RestrictedLogits(target, None)(x), whole)


@torch.no_grad()
def test_in_drafting_a_row_of_logits_depends_on_no_other_row(tiny_model):
    """To the bit in bf16, where the kernels are used, as for the layers of heads."""
    model = tiny_model("llama", hidden_size=64, head_dim=16).to(torch.bfloat16)
    target = Target.of(model, name="narrow", fingerprint="")
    logits, x = RestrictedLogits(target, DraftVocabulary.of(CUT, target.vocab_size)), states(target, 1).bfloat16()
    found = logits(x)
    torch.testing.assert_close(found.float(), target.logits(x)[:, CUT], rtol=0.02, atol=0.02)
    assert all(torch.equal(found[i : i + 1], logits(x[i : i + 1])) for i in range(len(x)))


def test_a_target_on_several_devices_computes_all_logits(target, monkeypatch):
    """Its output layer may be elsewhere, where its rows cannot be copied from."""
    monkeypatch.setattr(Target, "is_spread", True)
    logits = RestrictedLogits(target, DraftVocabulary.of(CUT, target.vocab_size))
    assert logits.rows is None
    torch.testing.assert_close(logits(states(target, 1)), target.logits(states(target, 1))[:, CUT])


@pytest.mark.parametrize(
    "mix",
    [
        {"restricted_ce": 0.7},
        {"restricted_ce": 0.7, "hard_ce": 0.2},
        {"restricted_ce": 0.7, "soft_ce": 0.3},
        {"restricted_ce": 0.7, "kl": 0.2, "greedy_gce": 0.4},
    ],
)
def test_the_closed_form_is_autograds(mix, target):
    vocabulary = DraftVocabulary.of(CUT, target.vocab_size)
    spec = LossSpec(
        mix=mix,
        draft_logits=lambda hidden: hidden[:, : len(CUT)],
        predicted_state=lambda hidden: hidden,
        target_logits=target.logits,
        restricted_logits=RestrictedLogits(target, vocabulary),
        vocabulary=vocabulary,
    )
    hidden, teacher = states(target, 2).requires_grad_(), states(target, 3)
    labels = torch.arange(12)
    value = summed_loss(hidden, spec, labels=labels, teacher_hidden=teacher, size=5)
    rows = Rows(spec, hidden, labels, TargetRows(spec, teacher))
    wanted = torch.stack([weight * ALL_LOSSES[name](rows) for name, weight in mix.items()]).sum()
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(torch.autograd.grad(value, hidden), torch.autograd.grad(wanted, hidden))


def test_training_never_computes_the_other_logits(target, make_batch, monkeypatch):
    config = Eagle3Config(loss={"restricted_ce": 1.0}, draft_vocab_size=len(CUT), start="random")
    head = build_head(config, target, draft_token_ids=CUT, seed=0)
    batch = make_batch(target, head)
    whole = head.positions_per_chunk(head.num_depths)
    monkeypatch.setattr(target, "logits", None)
    head.loss(batch).loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    monkeypatch.setattr(head.config, "loss", {"soft_ce": 1.0})
    assert whole > head.positions_per_chunk(head.num_depths), "so more positions are scored at a time"
