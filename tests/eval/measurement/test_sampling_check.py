"""Sampled texts are tested against the target's distribution: right ones pass, and what is slightly wrong is found."""

import math

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding import verify
from headstart.eval.decoding.draft_setting import DraftSetting
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.stopping import Stop
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.passes import pass_seed
from headstart.eval.measurement.sampling_check import check_sampling, uniform_p_value
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting import StaticTree

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]] * 8
WAYS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.5),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_p": Sampling(temperature=0.8, top_p=0.7),
}


@pytest.fixture
def drafter(target, target_as_drafter):
    """One that is often right: it drafts the target's most probable tokens."""
    return target_as_drafter(target)


def known(p_value):
    assert p_value is not None, "too few tokens"
    return p_value


def texts_of(target, drafter, sampling, *, accept="exact"):
    """A text of every prompt, drawn in one batch."""
    source = torch.Generator().manual_seed(3)
    how: dict = {"sampling": sampling, "generator": source, "accept": accept} | (
        {"num_draft_tokens": 3} if drafter else {}
    )
    engine = Engine(target, drafter, batch_size=len(PROMPTS), max_length=64, **how)
    text = decode(engine, PROMPTS, max_new_tokens=40, stop=Stop.of(target, eos_token_ids=[]))
    if drafter:
        assert sum(sum(one.num_accepted) for one in text.rounds) > 20, "a test of drafts that are accepted"
    return [[one] for one in text.token_ids]


@pytest.mark.parametrize("way", ["cold", "top_p"])
def test_an_exact_rule_passes(way, target, drafter):
    sampling = WAYS[way]
    drafted, plain = texts_of(target, drafter, sampling), texts_of(target, None, sampling)
    found = check_sampling(target, PROMPTS, drafted, plain, sampling)
    assert found.num_tokens == len(PROMPTS) * 40
    assert known(found.p_value) > 1e-3 and known(found.baseline_p_value) > 1e-3 and found.holds


@pytest.fixture
def tree_check(target):
    """tree_check(): the check of texts behind sampled trees of an untrained head."""

    def run():
        head = untrained("eagle", target)
        suite, tree = Suite(name="some", prompts=PROMPTS), StaticTree(((0,), (1,), (0, 0)), sampled=True)
        setting = DraftSetting("sampled", tree.depth, tree)
        config = MeasureConfig(max_new_tokens=40, temperature=1.0, setting=setting, batch_size=32, num_repeats=2)
        entry, _ = measure(target, head, suite, config, name="eagle")
        assert entry.sampling_check is not None and entry.sampling_check.num_tokens > 1500
        return entry.sampling_check

    return run


def test_sampled_trees_pass(tree_check):
    assert known(tree_check().p_value) > 1e-3


def test_a_rule_that_does_not_take_rejected_drafts_away_is_found(tree_check, monkeypatch):
    """Behind a rejection a token must come of what the target has beyond the draft, not of the target as it is."""
    monkeypatch.setattr(verify, "residual_behind", lambda residual, draft, token: residual)
    found = tree_check()
    assert not found.holds and known(found.baseline_p_value) > 1e-3


@pytest.mark.fast_only(wrong=["typical"])
@pytest.mark.parametrize("wrong", ["another temperature", "greedy", "typical"])
def test_texts_of_another_distribution_are_found(wrong, target, drafter):
    sampling, accept = WAYS["plain"], "typical" if wrong == "typical" else "exact"
    other = {"another temperature": Sampling(temperature=0.7), "greedy": Sampling()}.get(wrong, sampling)
    drafted, plain = texts_of(target, drafter, other, accept=accept), texts_of(target, None, sampling)
    found = check_sampling(target, PROMPTS, drafted, plain, sampling)
    assert not found.holds and known(found.baseline_p_value) > 1e-3


def test_the_test_is_kolmogorov_smirnovs():
    """Its known critical values: 5 % of samples deviate by more than 1.358 / sqrt(n), 1 % by more than 1.628."""
    n = 10_000
    even = (torch.arange(n, dtype=torch.double) + 0.5) / n
    assert uniform_p_value(even) == 1.0
    for chance, factor in ((0.05, 1.358), (0.01, 1.628)):
        assert uniform_p_value((even + factor / math.sqrt(n)).clamp(max=1)) == pytest.approx(chance, rel=0.05)
    assert uniform_p_value(even[:19]) is None
    draws = torch.rand(300, 200, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    below = sum(known(uniform_p_value(one)) < 0.1 for one in draws) / 300
    assert below == pytest.approx(0.1, abs=0.05), "p-values are themselves uniform"


def test_every_batch_and_repeat_draws_other_numbers():
    seeds = {pass_seed(seed, batch, repeat) for seed in range(3) for batch in range(20) for repeat in range(5)}
    assert len(seeds) == 300 and max(seeds) < 2**32, "the CPU generator reads 32 bits of its seed"
