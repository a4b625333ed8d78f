"""A confidence head is calibrated on held-out rows: lines by slot, stored with it, and in what engines load."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.configs.errors import BadInput
from headstart.eval.decoding import generate
from headstart.heads.base import DraftBatch
from headstart.heads.block_network import BlockConfig
from headstart.heads.calibration import ConfidenceLines, Line, count_accepted, fit_confidence
from headstart.heads.export.write import export_head
from headstart.heads.registry import build_head, load_head, save_head
from headstart.heads.target import Target
from safetensors.torch import load_file

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22]]
LINES = ConfidenceLines(Line(1.5, -0.25), [Line(1.0, 0.5), Line(0.8, -0.5), Line(1.2, 0.0)])


def drawn(lines, *, num_chains, seed=1):
    """Logits [1, S, K] of chains, and hits that follow sigmoid(scale * logit + shift) of each slot."""
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, num_chains, len(lines), generator=source)
    scales, shifts = torch.tensor(lines).T
    chance = (logits * scales + shifts).sigmoid()
    return logits, torch.rand(chance.shape, generator=source) < chance


def total_of(lines, slot):
    """The whole line of a slot, as our engine applies it."""
    common, own = lines.common, lines.by_slot[slot]
    return common.scale * own.scale, common.shift * own.scale + own.shift


def test_the_lines_of_many_drafts_are_found():
    wanted = [(0.5, 1.0), (0.7, 0.5), (1.3, -0.5)]
    logits, hits = drawn(wanted, num_chains=60000)
    found = fit_confidence(count_accepted(logits, torch.ones_like(hits), hits))
    assert found is not None
    for slot, line in enumerate(wanted):
        assert total_of(found, slot) == pytest.approx(line, abs=0.06)


def test_few_drafts_leave_a_slot_at_the_line_of_all():
    logits, hits = drawn([(0.5, 1.0)] * 3, num_chains=4000)
    valid = torch.ones_like(hits)
    valid[:, 3:, 2] = False
    found = fit_confidence(count_accepted(logits, valid, hits))
    assert found is not None
    assert vars(found.by_slot[2])["scale"] == pytest.approx(1, abs=0.15)
    assert found.by_slot[2].shift == pytest.approx(0, abs=0.5)
    assert fit_confidence(count_accepted(logits, torch.zeros_like(valid), hits)) is None


def test_only_drafts_that_are_reached_count_and_ranks_add_up():
    logits, hits = drawn([(1.0, 0.0)] * 3, num_chains=500)
    valid = torch.ones_like(hits)
    tried, taken = count_accepted(logits, valid, hits)
    assert tried.sum(1).tolist() == [500, int(hits[..., 0].sum()), int(hits[..., :2].all(-1).sum())]
    assert taken.sum(1).tolist()[2] == int(hits.all(-1).sum())
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


def test_a_saved_head_has_its_lines_and_an_export_the_one_of_all_slots(on_disk, tmp_path):
    head = block(on_disk)
    raw = estimates_of(on_disk, head).logit()
    save_head(head, tmp_path / "run" / "final", confidence=LINES)
    assert head.config.confidence_lines is None, "the head in training stays as it is"
    loaded = load_head(tmp_path / "run" / "final", on_disk)
    wanted = torch.stack([raw[:, k] * scale + shift for k in range(3) for scale, shift in [total_of(LINES, k)]], 1)
    torch.testing.assert_close(estimates_of(on_disk, loaded), wanted.sigmoid(), atol=1e-4, rtol=1e-4)
    export_head(tmp_path / "run", tmp_path / "served", to="vllm")
    served = load_file(tmp_path / "served" / "model.safetensors")
    own = head.confidence_head.proj
    torch.testing.assert_close(served["confidence_head.proj.weight"], 1.5 * own.weight.detach())
    torch.testing.assert_close(served["confidence_head.proj.bias"], 1.5 * own.bias.detach() - 0.25)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["enable_confidence_head"] and config["confidence_head_with_markov"]
    again = load_head(tmp_path / "served", on_disk)
    assert torch.equal(estimates_of(on_disk, again), estimates_of(on_disk, loaded)), "read back, slots have their lines"


def test_a_narrower_block_has_the_lines_of_its_slots(on_disk):
    lines = [[line.scale, line.shift] for line in LINES.by_slot]
    head = block(on_disk, confidence_lines=lines)
    text = generate(on_disk, head, PROMPTS, max_new_tokens=6, num_draft_tokens=2, verify_cost=1e-9)
    assert len(text.rounds[1].estimates[0]) == 2
    with pytest.raises(BadInput, match=r"^confidence_lines: expected a scale and a shift for each of 3 slots$"):
        replace(head.config, confidence_lines=lines[:2])


def test_what_is_fitted_is_what_decoding_estimates(on_disk):
    """The first round behind a prompt, and the chain of training that starts at the prompt's last token."""
    head, prompt = block(on_disk), PROMPTS[1]
    text = generate(on_disk, head, [prompt], max_new_tokens=8, eos_token_ids=[], verify_cost=1e-9)
    ids = torch.tensor([prompt + text.token_ids[0]])
    mask = torch.arange(ids.shape[1])[None] >= len(prompt)
    batch = DraftBatch(ids, mask, on_disk.forward(ids, feature_layers=head.feature_layers))
    starts = head.chain_starts(batch.loss_mask)
    logits = head.taught_confidence(batch, starts).detach()
    assert starts.positions[0, 0] == len(prompt) - 1 and logits.shape == starts.valid.shape
    estimate = text.rounds[1].estimates[0][0]
    assert float(logits[0, 0, 0].sigmoid()) == pytest.approx(estimate, abs=1e-4)
