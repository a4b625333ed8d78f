"""A confidence head is calibrated on held-out rows: by a line, which is stored in what engines load."""

import json
from typing import Any

import pytest
import torch
from headstart.engines.export import export_head
from headstart.engines.heads import build_head, load_head, save_head
from headstart.eval.decoding import generate
from headstart.heads.base import DraftBatch, chain_starts
from headstart.heads.block_network import BlockConfig
from headstart.heads.loss.calibration import ConfidenceLine, count_accepted, fit_confidence
from headstart.targets.target import Target
from safetensors.torch import load_file

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22]]
LINE = ConfidenceLine(1.5, -0.25)


def drawn(line, *, num_chains):
    """Logits [1, S, 3] of chains, and hits that follow sigmoid(scale * logit + shift)."""
    source = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, num_chains, 3, generator=source)
    chance = (logits * line.scale + line.shift).sigmoid()
    return logits, torch.rand(chance.shape, generator=source) < chance


@pytest.mark.parametrize("line", [ConfidenceLine(0.5, 1.0), ConfidenceLine(1.3, -0.5)])
def test_the_line_of_many_drafts_is_found(line):
    logits, hits = drawn(line, num_chains=60000)
    found = fit_confidence(count_accepted(logits, torch.ones_like(hits), hits))
    assert found is not None
    assert (found.scale, found.shift) == pytest.approx((line.scale, line.shift), abs=0.05)


def test_no_drafts_have_no_line_and_drafts_that_are_all_accepted_a_finite_one():
    logits, hits = drawn(LINE, num_chains=400)
    every = torch.ones_like(hits)
    assert fit_confidence(count_accepted(logits, ~every, hits)) is None
    found = fit_confidence(count_accepted(logits, every, every))
    assert found is not None and found.shift > 2 and abs(found.scale) < 100


def test_only_drafts_that_are_reached_count_and_ranks_add_up():
    logits, hits = drawn(ConfidenceLine(1.0, 0.0), num_chains=500)
    valid = torch.ones_like(hits)
    tried, taken = count_accepted(logits, valid, hits)
    both, three = int(hits[..., :2].all(-1).sum()), int(hits.all(-1).sum())
    first = int(hits[..., 0].sum())
    assert (int(tried.sum()), int(taken.sum())) == (500 + first + both, first + both + three)
    parts = [count_accepted(*(one[:, some] for one in (logits, valid, hits))) for some in (slice(200), slice(200, 500))]
    assert torch.equal(parts[0] + parts[1], torch.stack([tried, taken]))


@pytest.fixture
def on_disk(saved_target):
    return Target.load(saved_target)


def block(target, **options) -> Any:
    config = BlockConfig(**{"num_depths": 3, "markov_rank": 8, "confidence": True, **options})
    head: Any = build_head(config, target, seed=1)
    with torch.no_grad():
        head.confidence_head.proj.weight.normal_(std=0.7, generator=torch.Generator().manual_seed(3))
    return head.eval()


def estimates_of(target, head):
    text = generate(target, head, PROMPTS, max_new_tokens=8, eos_token_ids=[], verify_cost=1e-9)
    return torch.tensor(text.rounds[1].estimates)  # [B, K]


def test_a_saved_head_has_its_line_and_so_has_its_export(on_disk, tmp_path):
    head = block(on_disk)
    raw = estimates_of(on_disk, head).logit()
    save_head(head, tmp_path / "run" / "final", confidence=LINE)
    assert torch.equal(estimates_of(on_disk, head).logit(), raw), "the head in training stays as it is"
    loaded = load_head(tmp_path / "run" / "final", on_disk)
    wanted = (raw * LINE.scale + LINE.shift).sigmoid()
    torch.testing.assert_close(estimates_of(on_disk, loaded), wanted, atol=1e-4, rtol=1e-4)
    export_head(tmp_path / "run", tmp_path / "served", to="vllm")
    served = load_file(tmp_path / "served" / "model.safetensors")
    own = head.confidence_head.proj
    torch.testing.assert_close(served["confidence_head.proj.weight"], 1.5 * own.weight.detach())
    torch.testing.assert_close(served["confidence_head.proj.bias"], 1.5 * own.bias.detach() - 0.25)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["enable_confidence_head"] and config["confidence_head_with_markov"]


def test_what_is_fitted_is_what_decoding_estimates(on_disk):
    """The first round behind a prompt, and the chain of training that starts at the prompt's last token."""
    head, prompt = block(on_disk), PROMPTS[1]
    text = generate(on_disk, head, [prompt], max_new_tokens=8, eos_token_ids=[], verify_cost=1e-9)
    ids = torch.tensor([prompt + text.token_ids[0]])
    mask = torch.arange(ids.shape[1])[None] >= len(prompt)
    batch = DraftBatch(ids, mask, on_disk.forward(ids, feature_layers=head.feature_layers))
    starts = chain_starts(batch.loss_mask, head.num_depths)
    logits = head.taught_confidence(batch, starts).detach()
    assert starts.positions[0, 0] == len(prompt) - 1 and logits.shape == starts.valid.shape
    estimate = text.rounds[1].estimates[0][0]
    assert float(logits[0, 0, 0].sigmoid()) == pytest.approx(estimate, abs=1e-4)
