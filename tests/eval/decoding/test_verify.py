"""The target's distribution is transformers' own, and each accept rule walks a tree as its definition says."""

import math

import pytest
import torch
from headstart.base.errors import BadInput
from headstart.eval.decoding.sampling import Sampling, choose_tokens, random_keys, sample, target_probs
from headstart.eval.decoding.verify import accept_chain, accept_sampled, accept_tree, residual_behind
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

CHAIN = [-1, 0, 1, 2]


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def keys(*shape, seed=0):
    return random_keys(shape, torch.device("cpu"), source(seed))


def random_tree(num_nodes, vocab, generator):
    """parents [S] and tokens [S], siblings distinct; and the length of the longest path."""
    parents, tokens, depths = [], [], []
    for j in range(num_nodes):
        room = [p for p in range(-1, j) if parents.count(p) < vocab]
        parent = room[int(torch.randint(len(room), (), generator=generator))]
        taken = {tokens[i] for i in range(j) if parents[i] == parent}
        free = [token for token in range(vocab) if token not in taken]
        tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
        parents.append(parent)
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return parents, tokens, max(depths)


def random_trees(num_trees, num_nodes=9, vocab=3, seed=5):
    """parents [B, S], tokens [B, S], depth."""
    trees = [random_tree(num_nodes, vocab, generator) for generator in [source(seed)] for _ in range(num_trees)]
    return (
        torch.tensor([tree[0] for tree in trees]),
        torch.tensor([tree[1] for tree in trees]),
        max(tree[2] for tree in trees),
    )


def walked(chosen, tokens, parents):
    """The accepted nodes and the bonus token of one row, by a plain walk."""
    path, at = [], -1
    while True:
        wanted = chosen[at + 1]
        node = next((j for j, parent in enumerate(parents) if parent == at and tokens[j] == wanted), None)
        if node is None:
            return path, wanted
        path.append(node)
        at = node


def paths(result):
    """What of a result is defined: accepted nodes and bonus, row by row."""
    rows = zip(result.path.tolist(), result.num_accepted.tolist(), result.bonus.tolist(), strict=True)
    return [(path[:num], bonus) for path, num, bonus in rows]


# The target's distribution


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_k": 500},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.01},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
    ],
    ids=str,
)
def test_target_probs_are_those_of_transformers(how):
    logits = torch.randn(64, 40, generator=source()) * 3
    if "top_p" not in how:
        logits[0, 3:9] = logits[0].max()  # ties, of which top-p keeps any in transformers
    steps = LogitsProcessorList([TemperatureLogitsWarper(how["temperature"])])
    if "top_k" in how:
        steps.append(TopKLogitsWarper(how["top_k"]))
    if "top_p" in how:
        steps.append(TopPLogitsWarper(how["top_p"]))
    wanted = steps(torch.zeros(64, 1), logits.clone()).softmax(-1)  # pyright: ignore[reportArgumentType]
    found = target_probs(logits.view(8, 8, 40), Sampling(**how))
    assert torch.equal(found.view(64, 40), wanted)


def test_temperature_zero_is_the_argmax_lowest_id_first():
    logits = torch.tensor([[1.0, 4.0, 4.0, 3.0], [-1.0, -2.0, -1.5, -1.0]])
    assert target_probs(logits, Sampling()).argmax(-1).tolist() == [1, 0]
    assert choose_tokens(logits, Sampling()).tolist() == [1, 0]
    how = Sampling(top_k=1, top_p=0.5)
    assert choose_tokens(logits, how).tolist() == [1, 0]
    assert target_probs(logits, how).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_top_p_keeps_the_lowest_ids_of_those_that_tie():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -9.0])
    assert target_probs(logits, Sampling(temperature=1.0, top_p=0.5))[1:3].tolist() == [0.5, 0.5]
    assert target_probs(logits, Sampling(temperature=1.0, top_p=0.01)).tolist() == [0, 1, 0, 0, 0]


def test_half_precision_logits_are_scored_in_fp32():
    logits = torch.randn(4, 9, generator=source()).bfloat16()
    assert torch.equal(target_probs(logits, Sampling(temperature=0.7)), (logits.float() / 0.7).softmax(-1))


def test_samples_follow_their_distribution():
    logits = torch.tensor([2.0, 0.0, 1.0, -math.inf, 0.5])
    how = Sampling(temperature=0.8, top_k=3)
    tokens = choose_tokens(logits.expand(50, 1000, -1), how, keys=keys(50, 1000))
    assert tokens.shape == (50, 1000)
    expected = target_probs(logits, how) * 50_000
    counts = torch.bincount(tokens.flatten(), minlength=5)
    assert counts[expected == 0].sum() == 0
    assert ((counts - expected).abs() <= 4 * expected.sqrt()).all()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_k": 1.5}]
    + [{"top_p": 0.0}, {"top_p": 1.1}],
    ids=str,
)
def test_bad_sampling_is_refused(wrong):
    [name] = wrong
    with pytest.raises(BadInput, match=name):
        Sampling(**wrong)


# Walking trees


def test_accept_tree_is_the_plain_walk():
    parents, tokens, depth = random_trees(200)
    chosen = torch.randint(3, (200, 10), generator=source(2))
    result = accept_tree(chosen, tokens, parents, depth=depth)
    rows = zip(chosen.tolist(), tokens.tolist(), parents.tolist(), strict=True)
    wanted = [walked(*row) for row in rows]
    assert paths(result) == wanted
    assert {len(path) for path, _ in wanted} >= {0, 1, 2, 3}, "trees that test something"
    assert ((result.path >= 0) & (result.path < 9)).all(), "a valid index everywhere"


def test_accept_sampled_of_one_hot_distributions_is_the_plain_chain():
    """Temperature 0: with no mass of the draft, with any mass, and with all of it on one token."""
    drafted = torch.randint(3, (200, 4), generator=source())
    chosen = torch.randint(3, (200, 5), generator=source(2))
    probs = torch.nn.functional.one_hot(chosen, 3).float()
    wanted = paths(accept_tree(chosen, drafted, torch.tensor([CHAIN] * 200), depth=4))
    some = torch.randn(200, 4, 3, generator=source(3)).softmax(-1)
    for draft_probs in (
        torch.zeros(200, 4, 3),
        some,
        torch.nn.functional.one_hot(chosen.flip(0)[:, 1:], 3).float(),
    ):
        assert paths(accept_sampled(probs, draft_probs, drafted)) == wanted


def test_a_chain_is_a_tree():
    drafted = torch.randint(2, (300, 4), generator=source())
    chosen = torch.randint(2, (300, 5), generator=source(1))
    result = accept_tree(chosen, drafted, torch.tensor([CHAIN] * 300), depth=4)
    accepted = accept_chain(chosen, drafted)
    assert torch.equal(result.num_accepted, accepted) and set(accepted.tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(result.bonus, chosen.gather(1, accepted[:, None])[:, 0])
    assert all(path == list(range(len(path))) for path, _ in paths(result))


# Degenerate inputs


def test_degenerate_inputs_give_a_chain_within_the_targets_support():
    """One-hot and sparse distributions, and drafts that never draw what was drafted."""
    drafted, rows = torch.randint(3, (800, 4), generator=source()), torch.arange(800)
    kinds = [torch.randn(800, 5, 3, generator=source(1)).mul(scale).softmax(-1) for scale in (1, 40, 1000)]
    kinds += [target_probs(kinds[0].log(), Sampling(temperature=1.0, top_k=k)) for k in (1, 2)]
    kinds += [(kinds[0] - 1e-6).clamp_min(0), kinds[0] * (1 + 1e-6)]  # sums that rounding left beside 1
    for probs in kinds:
        for draft_probs in [*kinds, torch.zeros_like(probs)]:
            result = accept_sampled(probs, draft_probs[:, :-1], drafted, generator=source())
            inside = torch.arange(4) < result.num_accepted[:, None]  # [B, K]
            said = probs[:, :-1].gather(2, drafted[..., None])[..., 0]
            assert (said > 0)[inside].all() and (probs[rows, result.num_accepted, result.bonus] > 0).all()


def test_an_empty_residual_is_replaced():
    """Rounding may reject where exact sums accept; what is left is then the target without the token, never NaN."""
    half, token = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0]])
    assert residual_behind(half, half, token).tolist() == [[0, 1, 0]]
    sure = torch.tensor([[1.0, 0.0, 0.0]])
    assert residual_behind(sure, sure, token).tolist() == [[1, 0, 0]]
    assert residual_behind(sure, torch.ones(1, 3), token).tolist() == [[1, 0, 0]]
    assert sample(torch.tensor([[0.0, 1e-38, 0.0]]).expand(1000, -1), keys(1000)).unique().tolist() == [1]


def test_rare_tokens_of_a_large_vocabulary_are_drawn_too():
    """In sums of float32 behind a token of weight 1, all of weight 5e-8 would be lost."""
    weights = torch.full((30_000,), 5e-8)
    weights[0] = 1
    draws = torch.cat([sample(weights.expand(600, -1), keys(600, seed=i)) for i in range(10)])
    assert 1 <= (draws > 0).sum() <= 30  # 9 are expected
    assert sample(torch.zeros(2, 5), keys(2)).shape == (2,)  # of nothing: any valid token
