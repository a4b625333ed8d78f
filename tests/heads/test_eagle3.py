"""EAGLE-3's options: several layers, any features, the norms of EAGLE 3.1."""

import pytest
import torch
from formulas import attention, check_formulas, mlp, rms
from headstart.engines.heads import build_head
from headstart.heads.base import chain_starts
from headstart.heads.eagle3 import Eagle3Config
from perturbing import perturb

CUT = torch.arange(2, 61, 3)
CASES = {
    "one layer": {},
    "a cut vocabulary": {"draft_vocab_size": len(CUT)},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2},
    "three layers, 3.1": {"num_layers": 3, "fc_norm": True, "norm_output": True},
    "a window": {"sliding_window": 3},
    "two layers, a window": {"num_layers": 2, "sliding_window": 2},
    "one feature": {"feature_layers": [2]},
    "as others made it": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "architecture": {"intermediate_size": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
    },
    "two layers of others": {"num_layers": 2, "norm_before_residual": True, "architecture": {"num_key_value_heads": 1}},
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def head(request, target):
    """Every weight is away from its start."""
    config = Eagle3Config(**{"num_depths": 4, **request.param})
    ids = CUT if config.draft_vocab_size else None
    return perturb(build_head(config, target, draft_token_ids=ids, seed=2), 0.2, seed=4).eval()


def naive(head, ids, features, t):
    """Draft logits of the chain at t, as deep as there are tokens: the sequence of pairs grows by the head's output."""
    llama, eps = head.llama, head.llama.rms_norm_eps
    layers = [head.midlayer] if head.config.num_layers == 1 else list(head.layers)
    parts = [features[: t + 1, i] for i in range(features.shape[1])]
    if head.config.fc_norm:
        parts = [rms(part, norm, eps) for part, norm in zip(parts, head.fc_norm, strict=True)]
    every = torch.cat(parts, -1)  # [t + 1, L * D]
    if head.config.norm_before_fc:
        every = rms(every, head.input_norm, eps)
    hidden = every @ head.fc.weight.T  # [t + 1, D]
    while len(hidden) < min(len(ids), t + 1 + head.num_depths):
        embedded = head.target.input_embedding.weight[ids[1 : len(hidden) + 1]]
        for i, layer in enumerate(layers):
            if i == 0:
                out = hidden
                normed = rms(out, layer.hidden_norm, eps)
                x = torch.cat([rms(embedded, layer.input_layernorm, eps), normed], -1)
                out = normed if head.config.norm_before_residual else out
            else:
                x = rms(out, layer.input_layernorm, eps)
            out = out + attention(layer.self_attn, x, llama, head.config.sliding_window)
            out = mlp(layer, out, llama)
        last = rms(out[-1], head.norm, eps)
        yield last @ head.lm_head.weight.T
        hidden = torch.cat([hidden, (last if head.config.norm_output else out[-1])[None]])


def test_logits_and_gradients_are_the_formulas(head, target, make_batch):
    head.train()
    batch = make_batch(target, head, num_rows=2, length=10)
    check_formulas(head, batch, lambda row, t: naive(head, batch.input_ids[row], batch.output.features[row], t))


def test_it_looks_deeper_than_it_was_trained_and_leaves_its_config(target, head, make_batch):
    """As deep as it drafts, with the same logits where it was trained; the config given to it is untouched."""
    before, batch = head.config.as_dict(), make_batch(target, head)
    starts, logits = head.teacher_forced_logits(batch)
    deeper_starts, deeper = head.teacher_forced_logits(batch, num_depths=6)
    assert (starts.num_depths, deeper_starts.num_depths) == (4, 6)
    torch.testing.assert_close(deeper[:, :, :4], logits)
    out = head.loss(batch, num_depths=6)
    assert out.depth_loss.shape == (6,) and out.hits.shape == deeper.shape[:3]
    assert torch.equal(out.starts.valid, chain_starts(batch.loss_mask, 6).valid)
    assert head.config.as_dict() == before
    config = Eagle3Config()
    assert build_head(config, target).config.feature_layers == list(config.resolved(target).feature_layers or ())
    assert config.feature_layers is None
