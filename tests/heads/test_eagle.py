"""EAGLE-1 and HASS are the papers': the forward, the losses and gradients restated in plain loops; noise."""

import pytest
import torch
from formulas import check_gradients, llama_layer, supervised
from headstart.configs.loader import build, read_config, shipped
from headstart.heads.base import chain_starts
from headstart.heads.eagle import EagleConfig
from perturbing import perturbed

# The papers, in loops


def naive_eagle(head, batch, row, t, num_depths):
    """The estimated features of the chain at t: (token, feature) pairs 0..t are true, then come the head's own."""
    ids, features = batch.input_ids[row], batch.output.post_norm[row, : t + 1]  # [n, D]
    for _ in range(num_depths):
        embedded = head.target.input_embedding.weight[ids[1 : len(features) + 1]]
        hidden = torch.cat([embedded, features], -1) @ head.fc.weight.T + head.fc.bias
        for i, layer in enumerate(head.layers):
            hidden = llama_layer(layer, hidden, head.llama, is_normed=i > 0)
        yield hidden[-1]
        if len(features) + 1 < len(ids):
            features = torch.cat([features, hidden[-1:].detach()])


def smooth_l1(a, b):
    """Mean over channels of d^2 / 2 where |d| < 1, else |d| - 1/2."""
    d = (a - b).abs()
    return torch.where(d < 1, d * d / 2, d - 0.5).mean()


def naive_loss(head, batch, *, feature_weight, token_weight):
    """sum_k mean over chains of v * smooth-L1(feature, true one) + w * soft cross-entropy (EAGLE, section 3.2.2)."""
    with torch.no_grad():
        said = head.target.model(input_ids=batch.input_ids, use_cache=False).logits.softmax(-1)
    chains = supervised(batch.loss_mask, 0)
    every = {(row, t): list(naive_eagle(head, batch, row, t, head.num_depths)) for row, t in chains}
    loss = torch.zeros(())
    for depth in range(head.num_depths):
        terms = []
        for row, t in supervised(batch.loss_mask, depth):
            feature, at = every[row, t][depth], t + 1 + depth
            log_q = (head.target.output_layer.weight @ feature).log_softmax(-1)
            one = feature_weight * smooth_l1(feature, batch.output.post_norm[row, at])
            terms.append(one - token_weight * (said[row, at] * log_q).sum())
        loss = loss + head.config.depth_decay**depth * torch.stack(terms).mean()
    return loss


CASES = {
    "EAGLE-1": {"num_depths": 1},
    "HASS": {"num_depths": 3, "depth_decay": 1.0},
    "two layers": {"num_depths": 3, "num_layers": 2, "bias": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("loss", ["features and tokens", "tokens"])
def test_features_loss_and_gradients_are_the_papers(changes, loss, target, make_batch):
    if loss == "tokens":
        head = perturbed("eagle", target, loss={"soft_ce": 1.0}, **changes)
        batch = make_batch(target, head, num_rows=2, length=10)
        wanted = naive_loss(head, batch, feature_weight=0.0, token_weight=1.0)
    else:  # the default, EAGLE's
        head = perturbed("eagle", target, **changes)
        batch = make_batch(target, head, num_rows=2, length=10)
        wanted = naive_loss(head, batch, feature_weight=1.0, token_weight=0.1)
    ours = head.loss(batch).loss
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    check_gradients(head, ours, wanted)


# Noise


def test_noise_is_on_the_targets_features_in_training_only(target, make_batch, monkeypatch):
    quiet, noisy = perturbed("eagle", target, num_depths=3), perturbed("eagle", target, num_depths=3, noise=0.2)
    batch = make_batch(target, quiet)
    starts = chain_starts(batch.loss_mask, 3)
    torch.manual_seed(1)
    losses = [noisy.loss(batch).loss.item() for _ in range(2)]
    torch.manual_seed(1)
    assert noisy.loss(batch).loss.item() == losses[0] != losses[1], "drawn anew, from torch's own generator"
    assert torch.equal(noisy.eval().teacher_forced_logits(batch)[1], quiet.teacher_forced_logits(batch)[1])
    assert noisy.loss(batch).loss.item() == quiet.loss(batch).loss.item()

    monkeypatch.setattr("torch.rand_like", lambda x: torch.full_like(x, 0.75))  # a quarter of the width up
    got = list(noisy.train().unroll(batch, starts))
    batch.output.post_norm = batch.output.post_norm + 0.05
    for ours, wanted in zip(got, quiet.unroll(batch, starts), strict=True):
        torch.testing.assert_close(ours, wanted)


# The config


def test_shipped_configs_are_the_papers():
    configs = {}
    for path in shipped("heads/*.yaml"):
        if path.stem in ("eagle", "hass"):
            configs[path.stem] = build(EagleConfig, read_config(path)["head"], where="head")
    eagle, hass = configs["eagle"], configs["hass"]
    assert (eagle.type, eagle.num_depths, eagle.noise, eagle.num_layers) == ("eagle", 1, 0.2, 1)
    assert (hass.type, hass.num_depths, hass.noise, hass.depth_decay) == ("eagle", 3, 0.2, 1.0)
