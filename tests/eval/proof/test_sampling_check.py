"""Sampled texts are proved token by token where drafts are best guesses, and tested where drafts are drawn: right ones
pass, and what is slightly wrong is found."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from drafted import untrained
from headstart.engines.heads import HEADS
from headstart.eval.decoding import generate, verify
from headstart.eval.decoding.draft_setting import DraftSetting, chain
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode
from headstart.eval.decoding.sampling import Sampling, choose_tokens, noise_keys, target_probs
from headstart.eval.decoding.stopping import Stop
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.hybrid import HybridDrafter
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.passes import pass_seed
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.own_sampling import NoiseOfText
from headstart.eval.proof.sampling_check import SMALLEST_P, check_sampling, share_seen, uniform_p_value
from headstart.eval.suites.prompts import Suite
from headstart.heads.drafting.trees import DynamicTree, SampledChain
from perturbing import perturb

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
    for drafts in (drafter, None):
        found = check_sampling(target, PROMPTS, texts_of(target, drafts, sampling), sampling)
        assert found.num_tokens == len(PROMPTS) * 40 and known(found.p_value) > 1e-3 and found.holds


@pytest.fixture
def drawn_check(target):
    """drawn_check(): the check of texts behind sampled chains of an untrained head."""

    def run():
        head = untrained("eagle", target)
        suite, tree = Suite(name="some", prompts=PROMPTS), SampledChain(2)
        setting = DraftSetting("sampled-chain", tree.depth, tree)
        config = MeasureConfig(max_new_tokens=40, temperature=1.0, setting=setting, batch_size=32, num_repeats=2)
        entry, _ = measure(target, head, suite, config, name="eagle")
        assert entry.sampling_check is not None and entry.sampling_check.num_tokens > 1500
        return entry.sampling_check

    return run


def test_sampled_chains_pass(drawn_check):
    assert known(drawn_check().p_value) > 1e-3


def test_a_rule_that_does_not_take_rejected_drafts_away_is_found(drawn_check, monkeypatch):
    """Behind a rejection a token must come of what the target has beyond the draft, not of the target as it is."""
    monkeypatch.setattr(verify, "residual_behind", lambda target, draft, token: target)
    assert not drawn_check().holds


@pytest.mark.fast_only(wrong=["greedy"])
@pytest.mark.parametrize("wrong", ["another temperature", "greedy"])
def test_texts_of_another_distribution_are_found(wrong, target, drafter):
    sampling = WAYS["plain"]
    other = {"another temperature": Sampling(temperature=0.7), "greedy": Sampling()}[wrong]
    assert not check_sampling(target, PROMPTS, texts_of(target, drafter, other), sampling).holds
    assert check_sampling(target, PROMPTS, texts_of(target, None, sampling), sampling).holds


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


# Texts behind best guesses


def written_by(target, drafter, how, *, seed=3, prompts=PROMPTS, **settings):
    source = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {"num_draft_tokens": 3} if drafter and "tree" not in settings else {}
    given |= {
        "max_new_tokens": 24 if prompts is not PROMPTS else 40,
        "eos_token_ids": [],
        "generator": source,
        **vars(how),
        **settings,
    }
    return generate(target, drafter, prompts, **given)


@pytest.fixture(scope="module")
def plain_of(target):
    """plain_of(way): the baseline's texts of a target, which differ from row to row, and by the seed."""

    @cache
    def write(way):
        texts = written_by(target, None, WAYS[way]).token_ids
        assert len({tuple(text) for text in texts}) == len(PROMPTS), "each row draws its own noise"
        assert written_by(target, None, WAYS[way], seed=4).token_ids != texts
        return texts

    return write


@pytest.fixture
def pair_of(target, tiny_target, target_as_drafter):
    """pair_of(name): a target, and a drafter for it."""

    def make(name):
        if name == "itself":
            return target, target_as_drafter(target)
        if name == "a recurrent target by itself":
            recurrent = tiny_target("qwen3_5")
            return recurrent, DraftModelDrafter(recurrent)
        if name == "medusa-2":
            adapted = tiny_target("llama")
            return adapted, perturb(untrained("medusa", adapted, target_lora_rank=4), 0.1, seed=3)
        head = perturb(untrained("medusa" if name == "hybrid" else name, target), 0.1, seed=3)
        return target, HybridDrafter(head) if name == "hybrid" else head

    return make


TREE = DynamicTree(num_nodes=4, depth=2, top_k=2)
CASES = [("itself", None, way) for way in WAYS] + [("eagle", TREE, "top_p")]
OTHERS = "hybrid", "medusa-2", "a recurrent target by itself", *sorted(HEADS)
CASES += [(name, None, list(WAYS)[i % len(WAYS)]) for i, name in enumerate(OTHERS)]


@pytest.mark.parametrize(("name", "tree", "way"), CASES)
def test_a_sampled_text_is_the_baselines_token_by_token(name, tree, way, pair_of, target, plain_of):
    own, drafter = pair_of(name)
    plain = plain_of(way) if own is target else written_by(own, None, WAYS[way]).token_ids
    drafted = written_by(own, drafter, WAYS[way], tree=tree)
    assert drafted.token_ids == plain and any(sum(one.num_accepted) for one in drafted.rounds)


def test_a_guess_is_accepted_as_often_as_the_target_draws_it(target, drafter):
    """As in rejection sampling: with the probability that the target gives the draft."""
    how, rounds, expected, variance = WAYS["cold"], 0, 0.0, 0.0
    run = written_by(target, drafter, how, num_draft_tokens=1)
    emitted = [1] * len(PROMPTS)
    for one in run.rounds[1:-1]:
        for row, (prompt, text) in enumerate(zip(PROMPTS, run.token_ids, strict=True)):
            logits = target.logits(target.forward(torch.tensor([[*prompt, *text[: emitted[row]]]])).post_norm[:, -1])
            chance = target_probs(logits, how).max().item()
            rounds, expected, variance = rounds + 1, expected + chance, variance + chance * (1 - chance)
            emitted[row] += one.num_emitted[row]
        if rounds > 400:
            break
    seen = sum(sum(one.num_accepted) for one in run.rounds[1 : 1 + rounds // len(PROMPTS)])
    assert abs(seen - expected) < 4 * variance**0.5


def some(drafted, share):
    """[B] rows drawn at random."""
    return torch.rand(len(drafted.tokens), generator=drafted.generator) < share


def wrong_drafts(drafted):
    """Accepts two in a hundred of the first drafts that the target rejects."""
    found = verify.exact(drafted)
    wrong = some(drafted, 0.02) & (found.num_accepted < drafted.tokens.shape[1])
    return verify.AcceptedPath(found.num_accepted + wrong.long(), found.path, found.bonus)


def random_tokens(drafted):
    """Emits one given token in two rounds of a hundred."""
    found = verify.exact(drafted)
    return verify.AcceptedPath(found.num_accepted, found.path, torch.where(some(drafted, 0.02), 7, found.bonus))


def too_eager(drafted):
    """Accepts drafts 1.2 times as often as the target draws them."""
    chance = drafted.target_probs()[:, :-1].gather(-1, drafted.tokens[..., None]).squeeze(-1)  # [B, K]
    own, kept = drafted.chosen(), torch.rand(chance.shape, generator=drafted.generator)
    more = kept < (0.2 * chance / (1 - chance).clamp_min(1e-6))
    chosen = torch.cat([torch.where(more, drafted.tokens, own[:, :-1]), own[:, -1:]], 1)
    num = verify.accept_chain(chosen, drafted.tokens)
    return verify.AcceptedPath(num, drafted.parents + 1, chosen.gather(1, num[:, None]).squeeze(1))


def measured(target, drafter, rule, *, temperature, seed=0, prompts=PROMPTS[:16], **settings):
    accept = verify.AcceptRule("planted", rule)
    given = {"max_new_tokens": 60, "batch_size": 16, "num_repeats": 1, **settings}
    config = MeasureConfig(temperature=temperature, accept=accept, seed=seed, setting=chain(3), **given)
    return measure(target, drafter, Suite(name="some", prompts=prompts), config, name="toy")[0]


@pytest.mark.fast_only(rule=[wrong_drafts], temperature=[1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rule", [wrong_drafts, random_tokens, too_eager])
def test_each_wrong_rule_is_found_with_16_prompts(rule, temperature, tiny_target, target_as_drafter):
    target = tiny_target("llama", eos_token_id=None)
    entry = measured(target, target_as_drafter(target), rule, temperature=temperature)
    assert entry.lossless.unexplained > 0 and entry.sampling_check is None and entry.lossless.checked == 16


@pytest.mark.parametrize("way", WAYS)
def test_a_choice_is_proved_where_rounding_may_have_made_it_and_no_further(way):
    source = torch.Generator().manual_seed(0)
    logits, keys = 2 * torch.randn(2000, 61, generator=source), noise_keys(torch.tensor(5), torch.arange(2000)[None])[0]
    noise = NoiseOfText(WAYS[way], keys)
    own = choose_tokens(logits[:, None], WAYS[way], keys=keys[:, None])[:, 0]
    rounded = logits + 0.05 * (torch.rand(logits.shape, generator=source) - 0.5)
    others = choose_tokens(rounded[:, None], WAYS[way], keys=keys[:, None])[:, 0]
    assert (others != own).sum() > 5 and noise.may_choose(logits, others, torch.full((2000,), 0.05)).all()
    assert not noise.may_choose(logits, others, torch.zeros(2000))[others != own].any()
    assert noise.may_choose(logits, (own + 1) % 61, torch.full((2000,), 0.05)).float().mean() < 0.05


@pytest.mark.slow
def test_the_baseline_against_itself_never_alarms(tiny_target, target_as_drafter):
    """In 200 repeats, each of which draws by a seed of its own."""
    target, prompts = tiny_target("llama", eos_token_id=None), PROMPTS[:4]
    short = {"prompts": prompts, "max_new_tokens": 24, "batch_size": 4, "num_repeats": 200}
    entry = measured(target, target_as_drafter(target), verify.exact, temperature=1.0, **short)
    assert (entry.lossless.checked, entry.lossless.unexplained) == (800, 0)
    for seed in range(200):
        texts = [[text] for text in written_by(target, None, WAYS["plain"], seed=seed, prompts=prompts).token_ids]
        assert check_sampling(target, prompts, texts, WAYS["plain"]).holds, seed


def test_the_test_sees_what_it_says_it_sees():
    """A shift of `would_see` is found in 95 of 100 samples."""
    found, size = 0, 2000
    share = known(share_seen(size))
    assert share == pytest.approx(0.068, abs=0.001)
    source = torch.Generator().manual_seed(0)
    for _ in range(100):
        values = torch.rand(size, generator=source, dtype=torch.double)
        at = (values - 0.5).abs() < share / 2  # the tokens that a rule gets wrong
        values[at] = 0.5 + (values[at] - 0.5).abs() + share / 2
        found += known(uniform_p_value(values)) < SMALLEST_P
    assert found >= 90


def test_every_batch_and_repeat_draws_other_numbers():
    seeds = {pass_seed(seed, batch, repeat) for seed in range(3) for batch in range(20) for repeat in range(5)}
    assert len(seeds) == 300 and max(seeds) < 2**32, "the CPU generator reads 32 bits of its seed"
