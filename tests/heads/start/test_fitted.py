"""Heads that start in closed form begin nearer to the target than fresh ones, or say that there are too few rows; of
block drafters what the Markov head says and where queries look."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from headstart.engines.heads import build_head
from headstart.heads.block_network import BlockConfig
from headstart.heads.block_start import fit_markov, look_at_context
from headstart.heads.eagle import EagleConfig
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.nn.block_layer import MarkovHead
from headstart.heads.start.closed_form import sensitivity
from headstart.heads.start.eagle3 import low_rank

BLOCK: dict[str, Any] = {"num_layers": 1, "loss": {"soft_ce": 1.0}, "feature_layers": [1, 2], "num_depths": 3}
CASES: list[tuple[Any, dict[str, Any]]] = [
    (Eagle3Config, {"feature_layers": [1, 2], "num_depths": 2}),
    (BlockConfig, {**BLOCK, "markov_rank": 8}),
    (BlockConfig, {**BLOCK, "markov_rank": 8, "output": "own", "sample_from_anchor": False}),
    (BlockConfig, {**BLOCK, "markov_rank": 0, "num_layers": 2}),
    (BlockConfig, {**BLOCK, "markov_rank": 64, "blocks_per_row": 4}),
]


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize(("config", "options"), CASES)
def test_a_fitted_head_begins_at_every_depth_below_even_guessing_and_a_fresh_one(config, options, target, batches):
    fresh, fitted = (build_head(config(start=start, **options), target) for start in ("random", "fitted"))
    fitted.begin_training(iter(batches[:-1]))
    losses = [head(batches[-1]).depth_loss / head(batches[-1]).depth_count for head in (fresh, fitted)]
    assert (losses[1] < losses[0]).all()
    assert (losses[1] <= torch.tensor(float(target.vocab_size)).log() + 0.1).all()


@pytest.mark.parametrize(("config", "options"), CASES[:2])
def test_with_too_few_rows_a_head_starts_from_random_weights_and_a_line_says_so(config, options, target, batches):
    few = replace(batches[0], loss_mask=batches[0].loss_mask & (torch.arange(40) < 10))
    fitted, fresh = (build_head(config(start=start, **options), target, seed=1) for start in ("fitted", "random"))
    line = fitted.begin_training(iter([few]))
    assert re.fullmatch(
        r"head.start: \d+ supervised tokens of the 64 that a fit takes, so .* random weights", line or ""
    )
    assert fresh.begin_training(iter([few])) is None
    assert all(torch.equal(*pair) for pair in zip(fitted.parameters(), fresh.parameters(), strict=True))


def test_a_head_with_a_trained_bias_starts_as_one_without(target, batches):
    """The fit has no constant, and logits that are scaled down are scaled whole."""
    logits = []
    for bias in (False, True):
        head = build_head(EagleConfig(bias=bias), target, seed=1)
        head.begin_training(iter(batches[:-1]))
        with torch.no_grad():
            head.scale_outputs([0.5])
        logits.append(head.teacher_forced_logits(batches[-1])[1])
    torch.testing.assert_close(*logits)


def test_a_block_head_is_fitted_alike_on_states_of_labels_alone(target, batches):
    """As they are stored, and as a server gives them: none of a prompt's end."""
    heads = [build_head(BlockConfig(start="fitted", **BLOCK), target, seed=1) for _ in range(2)]
    stored = [
        replace(one, output=replace(one.output, post_norm=one.output.post_norm * one.loss_mask[..., None]))
        for one in batches
    ]
    for head, rows in zip(heads, (batches, stored), strict=True):
        head.begin_training(iter(rows[:-1]))
    assert all(torch.equal(*pair) for pair in zip(*(head.parameters() for head in heads), strict=True))


def head_of(target, start: Any = "random", **more) -> Any:
    config = BlockConfig(feature_layers=[1, 2], num_layers=1, num_depths=3, start=start, **more)
    return build_head(config, target)


def test_a_low_rank_map_keeps_the_channels_that_weigh_most():
    torch.manual_seed(0)
    x, weight, of_outputs = torch.randn(50, 6), torch.randn(6, 8), torch.ones(8)
    of_outputs[3] = 1e3
    inputs, directions = low_rank(x, weight, 1, of_outputs=of_outputs)
    kept = x @ inputs @ directions.T
    torch.testing.assert_close(kept[:, 3], (x @ weight)[:, 3], rtol=1e-2, atol=1e-2)
    assert (kept[:, :3] - (x @ weight)[:, :3]).norm() > 1


def test_a_step_moves_channels_less_that_logits_depend_on_more(target):
    """As those of Gemma 3 that its final norm enlarges; other channels as ever."""
    gain = target.final_norm.weight
    head, before = build_head(Eagle3Config(feature_layers=[1, 2]), target), gain.detach().clone()
    try:
        with torch.no_grad():
            gain[5] *= 40
        sensitive, scales = sensitivity(target), head.matrix_scales()
    finally:
        gain.data.copy_(before)
    expected = (sensitive.median() / sensitive).clamp_max(1)
    assert expected.argmin() == 5 and expected[5] < 0.1 and (expected == 1).sum() >= len(expected) // 2
    assert set(scales) == {"fc.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"}
    assert all(torch.equal(scale[:, 0], expected) for scale in scales.values())


@pytest.mark.parametrize(("config", "options"), CASES[:2])
def test_a_step_moves_what_is_made_of_features_alike_however_large_they_are(config, options, target, batches):
    """As those of Gemma 3, a thousand times as large as those of Qwen."""
    sizes = 10 ** (2 * torch.rand(2, target.hidden_size) + 1)
    larger = [replace(b, output=replace(b.output, features=b.output.features * sizes)) for b in batches]
    scales = list[torch.Tensor]()
    for by, rows in ((torch.ones_like(sizes), batches), (sizes, larger)):
        head = build_head(config(start="random", **options), target, seed=1)
        with torch.no_grad():
            head.fc.weight /= by.flatten()
        head.measure(rows)
        scales.append(head.matrix_scales()["fc.weight"])
    torch.testing.assert_close(scales[1] * sizes.flatten(), scales[0])


def test_the_markov_head_starts_as_what_follows_each_token():
    """Of tokens whose states lie in as many dimensions as its rank: exactly, but for a constant over the vocabulary."""
    source = torch.Generator().manual_seed(0)
    rows, codes = torch.randn(50, 8, generator=source), torch.randn(20, 3, generator=source)
    of_token, tokens = codes @ torch.randn(3, 8, generator=source), torch.arange(20).repeat(2000)
    markov = MarkovHead(20, 50, rank=3)
    with torch.no_grad():
        known = fit_markov(markov, tokens, of_token[tokens], rows)
        logits = markov.markov_w2(markov.markov_w1(torch.arange(20)))
    wanted = (of_token - of_token.mean(0)) @ rows.T
    torch.testing.assert_close(logits, wanted - wanted.mean(1, keepdim=True), atol=0.05, rtol=0.01)
    torch.testing.assert_close(known(torch.arange(20)), of_token - of_token.mean(0), atol=0.05, rtol=0.01)


def test_one_query_head_of_each_group_looks_at_the_last_position_before_the_block(target):
    head = head_of(target, architecture={"head_dim": 64})
    attention, read = head.layers[0].self_attn, torch.randn(1, 103, target.hidden_size)
    read[..., 5], read[..., 6] = 1.0, torch.where(torch.arange(103) < 100, 1.0, -1.0)  # 3 slots behind the context
    of_slots, of_context = (torch.eye(target.hidden_size)[channel] for channel in (5, 6))
    with torch.no_grad():
        look_at_context(attention, of_slots, of_context, head.rotary.frequencies, num_slots=3)
    rotary = head.rotary(torch.arange(103)[None], like=read, num_positions=103)
    keys, queries = attention.keys_values(read, rotary)[0], attention.queries(read, rotary)
    group = attention.num_heads // attention.num_kv_heads
    scores = queries[:, ::group, 100:] @ keys.transpose(-1, -2) / 8
    assert (scores.argmax(-1) == 99).all()
    assert (scores.softmax(-1)[..., 99] > 0.5).all()


def test_narrow_heads_start_with_attention_as_sharp_as_wide_ones(target):
    """Norms bound scores by gain^2 sqrt(H), and gains learn slowly."""
    for size in (8, 64, 128, 256):
        attention = head_of(target, architecture={"head_dim": size}).layers[0].self_attn
        bound = float(attention.q_norm.weight[0].detach() * attention.k_norm.weight[0].detach()) * size**0.5
        assert bound == pytest.approx(max(size, 128) ** 0.5)


def test_one_factor_of_a_fresh_markov_head_is_large_enough_for_the_other_to_learn_by():
    markov = MarkovHead(300, 50, rank=64)
    assert float(markov.markov_w1.weight.detach().norm(dim=1).mean()) == pytest.approx(1.0, abs=0.1)
    assert float(markov.markov_w2(markov.markov_w1.weight).detach().abs().max()) < 0.1


def test_answers_shorter_than_a_block_can_be_fitted_to(target, batches):
    *rows, last, judged = batches
    last.loss_mask &= torch.arange(40) < 5  # two tokens
    head = head_of(target, "fitted")
    head.begin_training(iter([*rows, last, judged]))
    out = head(judged)
    assert (out.depth_loss / out.depth_count <= torch.tensor(float(target.vocab_size)).log() + 0.1).all()
