"""A block drafter sees what its window shows, learns a text by heart, and trains on blocks that it draws."""

import math
from dataclasses import replace

import pytest
import torch
from headstart.engines.heads import build_head
from headstart.eval.decoding import generate
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.figures.metrics import acceptance
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import Suite
from headstart.heads.base import DraftBatch, DraftHead
from headstart.heads.block_network import BlockConfig, default_feature_layers
from headstart.heads.drafting.drafter import Reading
from headstart.heads.loss.chains import chain_starts, drawn_starts
from headstart.heads.nn.mask_token import default_mask_token
from perturbing import losses_on, perturb


def built(target, **options):
    """A head whose every weight is away from its start."""
    return perturb(build_head(BlockConfig(**options), target, seed=1), 0.1, seed=3).eval()


def supervised(target, head, *, num_rows, length):
    """Random texts, all supervised but their first tokens."""
    ids = torch.randint(3, target.vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(length).expand_as(ids) > 0
    return DraftBatch(ids, mask, target.forward(ids, feature_layers=head.feature_layers))


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_window_hides_what_is_older_and_nothing_else(sample_from_anchor, target):
    """In training and in decoding, of one layer: slot i, at position p, reads the features at p - W + 1 and behind."""
    how = {"num_layers": 1, "markov_rank": 0, "sample_from_anchor": sample_from_anchor}
    head, window = built(target, num_depths=3, sliding_window=6, **how), 6
    ids = torch.randint(3, 61, (1, 16), generator=torch.Generator().manual_seed(1))
    output = target.forward(ids, feature_layers=head.feature_layers)
    drafted = []
    for changed in (None, *range(16)):
        features = output.features.clone()
        if changed is not None:
            features[:, changed] = 1.0
        read = replace(output, features=features)
        state = head.begin(batch_size=1, max_length=64)
        head.commit(state, Reading(ids, ids.roll(-1, 1), read, torch.tensor([0]), torch.tensor([12])))  # x_0 .. x_11
        served = torch.stack(head.propose(state, num_draft_tokens=3).logits, 1)[0]  # [K, V]
        starts, taught = head.teacher_forced_logits(DraftBatch(ids, torch.ones_like(ids).bool(), read))
        [at] = (starts.positions[0] == 11).nonzero()[0].tolist()
        if changed is None:
            torch.testing.assert_close(taught[0, at], served, rtol=1e-4, atol=1e-4)
        drafted.append((served, taught[0, at]))
    for depth in range(3):
        position = 12 + depth + head.first_slot  # of the slot that drafts it
        wanted = [position - window < changed <= 11 for changed in range(16)]
        for kind in range(2):
            moved = [not torch.allclose(one[kind][depth], drafted[0][kind][depth], atol=1e-6) for one in drafted[1:]]
            assert moved == wanted


def test_a_text_learned_by_heart_is_drafted_whole(target):
    prompt = [1, 7, 8, 3]
    [text] = generate(target, None, [prompt], max_new_tokens=37, eos_token_ids=[]).token_ids
    head = build_head(BlockConfig(num_depths=4, num_layers=1, markov_rank=8, loss={"hard_ce": 1.0}), target, seed=1)
    ids = torch.tensor([prompt + text])
    batch = DraftBatch(
        ids, torch.arange(ids.shape[1])[None] >= 4, target.forward(ids, feature_layers=head.feature_layers)
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2, betas=(0.9, 0.95))
    for _ in range(80):
        optimizer.zero_grad()
        out = head.loss(batch)
        if bool(out.hits[out.starts.valid].all()):
            break
        out.loss.backward()
        optimizer.step()
    done = generate(target, head.eval(), [prompt], max_new_tokens=36, eos_token_ids=[])
    assert done.token_ids[0] == text[:36]
    assert acceptance(done.rounds, num_draft_tokens=4).length == 5, "K + 1: one forward per five tokens"


def test_blocks_are_drawn_from_the_supervised_without_replacement():
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.9
    mask[2, 5:] = False
    every = chain_starts(mask, 4)
    torch.manual_seed(5)
    drawn = drawn_starts(every, most=8)
    torch.manual_seed(5)
    again = drawn_starts(every, most=8)
    assert torch.equal(drawn.positions, again.positions) and torch.equal(drawn.valid, again.valid)
    places = [dict(zip(p.tolist(), v, strict=True)) for p, v in zip(every.positions, every.valid, strict=True)]
    for row, (positions, valid) in enumerate(zip(drawn.positions, drawn.valid, strict=True)):
        kept = positions[valid[:, 0]].tolist()
        assert len(kept) == min(8, int(every.valid[row, :, 0].sum())) and kept == sorted(set(kept))
        for at, depths in zip(positions.tolist(), valid, strict=True):
            assert torch.equal(depths, places[row][at])


def test_a_smaller_k_is_taught_as_it_is_decoded(tiny_target):
    """The teacher-forced length that a report holds against the decoded one: of a block of that width."""
    target = tiny_target("llama", vocab_size=9)
    head, lengths = built(target, num_depths=4, num_layers=1, markov_rank=8), []
    [text] = generate(target, None, [[1, 5, 3]], max_new_tokens=40, eos_token_ids=[]).token_ids
    for token in sorted(set(text[8:])):
        target.model.generation_config.eos_token_id = token
        config = MeasureConfig(max_new_tokens=40, num_repeats=1, setting=chain(2))
        entry, _ = measure(target, head, Suite("one", [[1, 5, 3]]), config, name="tiny")
        assert entry.teacher_forced_acceptance_length == entry.acceptance_length, token
        lengths.append(entry.acceptance_length or 0)  # a first token that ends the text
    assert max(lengths) > 1.1, lengths


@pytest.mark.parametrize("size", [2, 100], ids=["chunks", "whole"])
def test_the_loss_of_drawn_blocks_is_that_of_these_blocks(size, target, make_batch, monkeypatch):
    """Loss and gradients, against plain loops over the blocks; drawn blocks leave gaps."""
    monkeypatch.setattr(DraftHead, "positions_per_chunk", lambda *_: size)
    head = built(target, num_depths=3, num_layers=1, markov_rank=8, blocks_per_row=4, depth_decay=2.0)
    batch = make_batch(target, head)
    torch.manual_seed(1)
    batch.starts = starts = head.training_starts(batch.loss_mask)
    assert starts.has_gaps
    head.loss(batch).loss.backward()
    got = {name: parameter.grad for name, parameter in head.named_parameters()}
    head.zero_grad()
    losses, counts = [torch.zeros(())] * 3, starts.valid.sum((0, 1))
    for depth, hidden in enumerate(head.unroll(batch, starts)):
        for b, s in starts.valid[..., depth].nonzero().tolist():
            post_norm = batch.output.post_norm[b, starts.positions[b, s] + 1 + depth]
            teacher = target.logits(post_norm).log_softmax(-1)
            draft = head.draft_logits(hidden[b, s], depth).log_softmax(-1)
            losses[depth] = losses[depth] + (teacher.exp() * (teacher - draft)).sum() / counts[depth]
    loss = sum(math.exp(-k / 2) * part for k, part in enumerate(losses))
    torch.testing.assert_close(head.loss(batch).loss, loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_mask_token_is_unused_and_its_embedding_is_not_degenerate(tiny_target):
    target = tiny_target("llama", eos_token_id=2)
    assert default_mask_token(target) == 0, "padding, where no tokenizer says what is unused"
    with torch.no_grad():
        target.input_embedding.weight[0] = 0
    assert default_mask_token(target) == 2, "a row of zeros tells slots nothing"


def test_an_unused_row_comes_before_padding(saved_target, tmp_path):
    from headstart.targets.target import Target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(saved_target)
    model.resize_token_embeddings(64, mean_resizing=True)
    with torch.no_grad():
        weight = model.get_input_embeddings().state_dict()["weight"]
        weight[61], weight[62] = 0, weight[5]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(saved_target).save_pretrained(tmp_path)
    assert default_mask_token(Target.load(tmp_path)) == 62


def test_confidence_learns_how_often_drafts_are_accepted(target, make_batch):
    """Of a head whose drafts stay as they are, it comes to tell sure drafts from others."""
    head = built(target, num_depths=2, num_layers=1, markov_rank=8, confidence=True)
    batch, estimate = make_batch(target, head, num_rows=1), head.confidence_head
    assert estimate is not None
    losses = losses_on(head, batch, lr=3e-2, num_steps=30, parameters=estimate.parameters())
    assert losses[-1] < losses[0] - 0.1


def test_features_are_spread_as_published():
    assert default_feature_layers(36) == [2, 10, 18, 26, 34], "DFlash's layer outputs 1, 9, 17, 25, 33"
    assert default_feature_layers(5) == [1, 2, 4] and default_feature_layers(1) == [0]


def test_it_trains_in_bf16(target, make_batch):
    """Autocast narrows the context before it narrows the slots, which are embeddings: both are rotated alike."""
    head = built(target, markov_rank=4)
    batch = make_batch(target, head)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(batch).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())
    assert loss.item() == pytest.approx(head.loss(batch).loss.item(), rel=0.05)


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_is_that_of_the_speculators_library(kind, sample_from_anchor, tiny_target):
    """Its DFlash with our weights; where `pip install speculators` was done."""
    theirs = pytest.importorskip("speculators.models.dflash")
    from transformers import Qwen3Config

    target = tiny_target(kind)
    head = built(target, num_depths=3, num_layers=2, markov_rank=0, sample_from_anchor=sample_from_anchor)
    batch = supervised(target, head, num_rows=1, length=23)
    served = head.serving_config()
    config = theirs.DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**{k: v for k, v in served.items() if k in vars(Qwen3Config())}),
        draft_vocab_size=target.vocab_size,
        aux_hidden_state_layer_ids=list(head.feature_layers),
        **{key: served[key] for key in ("block_size", "mask_token_id", "sample_from_anchor")},
    )
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = theirs.DFlashDraftModel(config).eval()
    table, output = target.input_embedding.weight, target.output_layer.weight
    weights = {**head.state_dict(), "embed_tokens.weight": table, "lm_head.weight": output}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and all(name.startswith("verifier") for name in missing)
    documents = torch.zeros(1, 23, dtype=torch.long)
    width, features = served["block_size"], batch.output.features.flatten(2)
    _, logits, _, _, places = model._backbone_forward(
        features, batch.input_ids, documents + 1, batch.output.post_norm, documents, max_anchors=23 - width
    )
    blocks = dict(zip(places[::width].tolist(), logits[0].detach().split(width), strict=True))  # by anchor
    starts, ours = head.teacher_forced_logits(batch)
    num_checked = 0
    for s, t in enumerate(starts.positions[0].tolist()):
        valid = starts.valid[0, s]
        if t + 1 in blocks and bool(valid.any()):
            found = blocks[t + 1][head.first_slot :]
            torch.testing.assert_close(ours[0, s][valid], found[valid], rtol=0, atol=1e-4)
            num_checked += int(valid.sum())
    assert num_checked > 30
