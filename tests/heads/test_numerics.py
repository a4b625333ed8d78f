"""Heads and losses equal the papers' formulas, written plainly in loops over rows, positions and depths."""

from functools import partial

import pytest
import torch
from formulas import check_formulas, supervised
from headstart.engines.heads import HEADS, build_head
from headstart.heads.base import DraftBatch
from headstart.heads.medusa import MedusaConfig
from headstart.heads.stored.folder import fingerprint_of_tensors
from headstart.targets.target import Target
from perturbing import perturbed

CUT = torch.tensor([2, 3, 5, 8, 13, 14, 21, 22, 30, 31, 34, 40, 41, 42, 43, 50, 51, 52, 55, 60])


def naive_medusa(head, batch, row, t):
    """W2 (h + silu(W1 h + b)) for every head (Cai et al. 2024, eq. 1)."""
    hidden = batch.output.post_norm[row, t]
    for k in range(head.num_depths):
        block, output = head.get_submodule(f"{k}.0.linear"), head.get_submodule(f"{k}.1")
        inner = block.weight @ hidden + block.bias
        yield output.weight @ (hidden + inner / (1 + (-inner).exp()))


@pytest.mark.parametrize("name", ["hard_ce", "soft_ce"])
def test_loss_logits_and_gradients_of_medusa_are_the_papers(name, target, make_batch):
    head = perturbed("medusa", target, scale=0.2, loss={name: 1.0}, num_depths=3)
    batch = make_batch(target, head, num_rows=2, length=10)
    check_formulas(head, batch, partial(naive_medusa, head, batch), is_hard=name == "hard_ce")


def test_counts_and_hits_are_of_the_supervised_chains(head_type, target, make_batch):
    head = perturbed(head_type, target, scale=0.2, num_depths=3)
    batch = make_batch(target, head)
    out = head.loss(batch)
    starts, logits = head.teacher_forced_logits(batch)
    for depth in range(3):
        chains = list(supervised(batch.loss_mask, depth))
        assert out.depth_count[depth] == len(chains)
        right = 0
        for row, t in chains:
            at = starts.positions[row].tolist().index(t)
            is_hit = int(logits[row, at, depth].argmax()) == int(batch.input_ids[row, t + 2 + depth])
            assert bool(out.hits[row, at, depth]) == is_hit
            right += is_hit
        assert int(out.hits[..., depth].sum()) == right


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_untrained_medusa_head_is_the_targets_output_layer(output, bias, family, tiny_model):
    model = tiny_model(family)
    if bias:
        layer = torch.nn.Linear(32, 61)
        layer.weight = model.get_output_embeddings().weight
        model.set_output_embeddings(layer)
    target = Target.of(model, name="tiny", fingerprint=fingerprint_of_tensors(dict(model.named_parameters())))
    head = build_head(MedusaConfig(output=output, num_residual_blocks=2), target)
    ids = torch.arange(3, 40)[None]
    states = target.forward(ids)
    starts, logits = head.teacher_forced_logits(DraftBatch(ids, torch.ones_like(ids).bool(), states))
    wanted = starts.take(target.logits(states.post_norm))
    for k in range(head.num_depths):
        assert torch.equal(logits[:, :, k], wanted)
        assert output == "shared" or (f"{k}.2.bias" in head.state_dict()) == bias


def test_an_untrained_eagle3_head_starts_from_the_targets_output(target):
    head = build_head(
        HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=len(CUT)), target, draft_token_ids=CUT
    )
    weights = dict(head.named_parameters())
    assert torch.equal(weights["lm_head.weight"], target.output_layer.weight[CUT])
    torch.testing.assert_close(weights["norm.weight"], target.final_norm_scale())
