"""Rows verify the drafts that pay, and the text stays the target's own, greedy and sampled."""

from dataclasses import replace

import pytest
import torch
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import build_head
from headstart.eval.decoding import replay
from headstart.eval.decoding.draft_setting import DraftSetting, chain
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.loop import decode, generate
from headstart.eval.decoding.stopping import Stop
from headstart.eval.decoding.verify import ACCEPT_RULES
from headstart.eval.figures.metrics import acceptance
from headstart.eval.measurement import step_times
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.step_times import verify_cost
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import Suite
from headstart.heads.block_network import BlockConfig
from headstart.heads.drafting.trees import Proposal, SampledChain, worth_verifying
from headstart.scripts.evaluating.eval_drafts import WantedDrafts

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1], [1, 30, 31, 32, 33, 34]]
COST = 0.1


def block(target, **options):
    """A block head with a confidence head, whose estimates differ from slot to slot."""
    config = BlockConfig(**{"num_depths": 4, "markov_rank": 8, "confidence": True, **options})
    head = build_head(config, target, seed=1)
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
            if name.startswith("confidence_head"):
                parameter.normal_(mean=float(parameter.ndim == 1), std=0.7 * (parameter.ndim > 1), generator=source)
    return head.eval()


def offered_of(text):
    """How many drafts each row verified, of all rounds in which it was active."""
    rows = (zip(one.num_offered, one.num_committed, strict=True) for one in text.rounds[1:])
    return [offered for row in rows for offered, committed in row if committed]


def test_a_draft_is_verified_as_long_as_it_raises_tokens_per_time():
    estimates = torch.rand(500, 6, generator=torch.Generator().manual_seed(1))
    for cost in (0.02, 0.1, 0.5):
        for row, count in zip(estimates.tolist(), worth_verifying(estimates, cost).tolist(), strict=True):
            tokens, reach, best = 1.0, 1.0, 0
            for k, estimate in enumerate(row):
                reach *= estimate
                if (tokens + reach) / (1 + cost * (k + 1)) < tokens / (1 + cost * k):
                    break
                tokens, best = tokens + reach, k + 1
            assert count == best
    assert worth_verifying(torch.zeros(1, 3), 0.1).tolist() == [0] and worth_verifying(torch.zeros(1, 3), 0.0) == 3


def test_the_estimate_of_a_token_is_made_before_it_is_chosen(target):
    """What lossless sampling rests on: another token changes the estimates behind it alone."""
    head = block(target)
    engine = Engine(target, head, batch_size=4, max_length=32, verify_cost=COST)
    decode(engine, PROMPTS, max_new_tokens=6, stop=Stop.of(target, eos_token_ids=[]))
    tokens = torch.randint(3, 60, (4, 4), generator=torch.Generator().manual_seed(2))
    before = head.confidence(engine.state, tokens)
    after = head.confidence(engine.state, torch.cat([tokens[:, :1], tokens[:, 1:] + 1], 1))
    assert before is not None and after is not None
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.isclose(before[:, 2:], after[:, 2:]).any()


@pytest.fixture
def unsure(target_as_drafter):
    """The target drafting for itself, every third token wrong, with estimates of its own that differ by round."""

    class Unsure(target_as_drafter):
        estimates = True

        def propose(self, state, *, num_draft_tokens):
            tokens = super().propose(state, num_draft_tokens=num_draft_tokens).tokens
            at = state["position"][:, None] + torch.arange(num_draft_tokens)
            return Proposal(torch.where(at % 3 == 0, 0, tokens), confidence=(at * 7 % 11 + 1) / 11)

    return Unsure


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_rows_stop_apart_and_keep_their_greedy_texts(kind, tiny_target, unsure):
    target, how = tiny_target(kind), {"max_new_tokens": 30, "eos_token_ids": []}
    wanted = generate(target, None, PROMPTS, **how)
    found = generate(target, unsure(target), PROMPTS, verify_cost=COST, **how)
    assert found.token_ids == wanted.token_ids
    assert len(set(offered_of(found))) >= 4, "rows verify one, two ... drafts"
    assert any(len(set(one.num_offered)) > 2 for one in found.rounds[1:]), "in one round too"
    accepted = [pair for one in found.rounds[1:] for pair in zip(one.num_accepted, one.num_offered, strict=True)]
    assert all(a <= b for a, b in accepted) and {a for a, b in accepted if a == b} >= {1, 2}, "all that was tried, too"


def test_what_a_row_verifies_is_its_own_affair(target, unsure):
    together = generate(target, unsure(target), PROMPTS, max_new_tokens=30, eos_token_ids=[], verify_cost=COST)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(target, unsure(target), [prompt], max_new_tokens=30, eos_token_ids=[], verify_cost=COST)
        mine = [(one.num_offered[row], one.num_accepted[row]) for one in together.rounds[1:] if one.num_committed[row]]
        assert [(one.num_offered[0], one.num_accepted[0]) for one in alone.rounds[1:]] == mine
    ended = [(one, row) for one in together.rounds[1:] for row in range(4) if not one.num_committed[row]]
    assert ended and all(one.num_offered[row] == 0 for one, row in ended)


@pytest.mark.parametrize("cost", [None, COST])
def test_rows_that_have_ended_verify_nothing(cost, target, unsure):
    """One with its first token, which the prefill chose."""
    first = generate(target, None, PROMPTS, max_new_tokens=1).token_ids[0]
    found = generate(target, unsure(target), PROMPTS, max_new_tokens=30, eos_token_ids=first, verify_cost=cost)
    assert found.token_ids[0] == first and len(found.rounds) > 2
    for one in found.rounds[1:]:
        assert all(offered == 0 for offered, num in zip(one.num_offered, one.num_committed, strict=True) if not num)
    assert found.rounds[1].num_offered[0] == 0 and any(found.rounds[1].num_offered)


@pytest.mark.parametrize("options", [{}, {"markov_rank": 0}, {"sample_from_anchor": False}], ids=str)
def test_a_confidence_head_stops_rows(options, target):
    found = generate(target, block(target, **options), PROMPTS, max_new_tokens=30, eos_token_ids=[], verify_cost=COST)
    assert len(set(offered_of(found))) >= 4
    assert found.token_ids == generate(target, None, PROMPTS, max_new_tokens=30, eos_token_ids=[]).token_ids


def test_every_head_estimates_by_its_own_probabilities(head_type, target):
    head = untrained(head_type, target)
    found = generate(target, head, PROMPTS, max_new_tokens=20, eos_token_ids=[], verify_cost=0.02)
    assert found.token_ids == generate(target, None, PROMPTS, max_new_tokens=20, eos_token_ids=[]).token_ids
    for one in found.rounds[1:]:
        worth = worth_verifying(torch.tensor(one.estimates), 0.02).tolist()
        rows = zip(one.num_offered, worth, one.num_committed, strict=True)
        assert all(offered == (wanted if committed else 0) for offered, wanted, committed in rows)
    engine = Engine(target, head, batch_size=1, max_length=32, verify_cost=COST)
    decode(engine, [[1, 5, 9]], max_new_tokens=3, stop=Stop.of(target, eos_token_ids=[]))
    proposal = head.propose(engine.state, num_draft_tokens=2)
    best = torch.stack([logits.softmax(-1).amax(-1) for logits in proposal.logits], 1)
    torch.testing.assert_close(proposal.estimates(), best)


GUESSES = pytest.param(None, id="best guesses", marks=pytest.mark.slow)


@pytest.mark.parametrize("tree", [GUESSES, pytest.param(SampledChain(3), id="draws")])
def test_stopping_leaves_the_targets_distribution(tree, tiny_target, chi_square):
    target = tiny_target("llama", vocab_size=6, eos_token_id=None)
    head = block(target, num_layers=1)
    assert chi_square(target, head, tree=tree, verify_cost=COST) < 1.5
    counts = generate(target, head, [[1, 4, 3]] * 64, max_new_tokens=8, temperature=1.0, tree=tree, verify_cost=COST)
    assert len(set(offered_of(counts))) >= 3


def test_an_estimate_that_saw_the_drawn_token_is_caught(tiny_target, chi_square, monkeypatch):
    target = tiny_target("llama", vocab_size=6, eos_token_id=None)
    head = block(target, num_layers=1)
    monkeypatch.setattr(head, "confidence", lambda state, tokens: torch.where(tokens < 3, 0.99, 0.01))
    assert chi_square(target, head, tree=SampledChain(3), verify_cost=COST) > 2.5


def test_recorded_steps_have_a_few_widths_and_decode_the_same(target, unsure, monkeypatch):
    monkeypatch.setattr(replay, "compiled", lambda step, arguments: step)
    how = {"num_draft_tokens": 5, "verify_cost": COST}
    wanted = generate(target, unsure(target), PROMPTS, max_new_tokens=30, eos_token_ids=[], **how)
    engine = Engine(target, unsure(target), batch_size=4, max_length=40, steps="compile", **how)
    found = decode(engine, PROMPTS, max_new_tokens=30, stop=Stop.of(target, eos_token_ids=[]))
    assert found.token_ids == wanted.token_ids
    assert [one.num_offered for one in found.rounds] == [one.num_offered for one in wanted.rounds]
    widths = {key[2:] for key in engine.replay.recorded if isinstance(key, tuple) and key[0] == "verify"}
    assert widths == {(0,), (1,), (3,), ()}, "reading 1, 2 and 4 tokens, and all"


def test_what_is_not_verified_is_not_counted_as_reached(target, unsure):
    found = generate(target, unsure(target), PROMPTS, max_new_tokens=30, eos_token_ids=[], verify_cost=COST)
    counted = acceptance(found.rounds, num_draft_tokens=5)
    assert counted.num_offered == sum(offered_of(found))
    reached = [
        sum(
            one.num_offered[row] > k and one.num_accepted[row] >= k and one.num_committed[row] > k
            for one in found.rounds[1:]
            for row in range(4)
        )
        for k in range(5)
    ]
    assert counted.tried == reached and sum(reached) < counted.num_offered


def test_a_report_says_how_many_drafts_were_verified_and_how_true_the_estimates_were(target):
    head, suite = block(target), Suite("one", PROMPTS)
    results = {}
    for cost in (None, COST):
        setting = replace(chain(4), verify_cost=cost)
        config = MeasureConfig(setting=setting, max_new_tokens=16, num_repeats=1, batch_size=2)
        results[cost], _ = measure(target, head, suite, config, name="block")
    every, some = results[None], results[COST]
    assert every.calibration is None and every.verify_cost is None and some.verify_cost == COST
    assert some.lossless.identical == 4 and some.teacher_forced_acceptance_length is None
    told = some.calibration
    assert 0 < told.verified < 4 and sum(told.num_drafts) <= told.verified * some.num_rounds
    for tenth, (count, mean) in enumerate(zip(told.num_drafts, told.estimated, strict=True)):
        assert (mean is None) == (count == 0)
        assert mean is None or tenth / 10 - 1e-4 <= mean <= (tenth + 1) / 10 + 1e-4


def test_the_cost_of_a_token_is_of_the_setting_and_the_sampling_that_are_evaluated(target, monkeypatch):
    """Above temperature 0 a verified token also costs its distribution."""
    engines = []
    build = step_times.build_engine
    monkeypatch.setattr(
        step_times, "build_engine", lambda *args, **how: engines.append((args[2], args[3])) or build(*args, **how)
    )
    setting, config = DraftSetting("sampled-chain", 3, SampledChain(3)), MeasureConfig(temperature=0.7)
    verify_cost(target, block(target), setting, [1, 5, 9, 11], config, context=4)
    assert {(one, how.sampling) for one, how in engines} == {(None, config.sampling), (setting, config.sampling)}


@pytest.mark.parametrize("tree", [None, SampledChain(3)], ids=["best guesses", "draws"])
def test_drafts_of_which_none_pays_are_not_verified(target, tree):
    text = generate(target, block(target), PROMPTS, tree=tree, verify_cost=1e6, temperature=1.0, max_new_tokens=4)
    assert set(offered_of(text)) == {0} and all(len(row) == 4 for row in text.token_ids)


@pytest.mark.parametrize("accept", ACCEPT_RULES)
@pytest.mark.parametrize("tree", [None, SampledChain(4)], ids=["best guesses", "draws"])
def test_the_output_layer_is_read_once_per_verification(target, tree, accept, monkeypatch):
    head = block(target)
    how = {"tree": tree, "accept": accept, "verify_cost": COST, "max_new_tokens": 8, "temperature": 1.0}
    verified, num_read = [], []
    verify, logits = Engine._verify, target.logits

    def counted(*tensors):
        before = len(num_read)
        done = verify(*tensors)
        verified.append(len(num_read) - before)
        return done

    monkeypatch.setattr(Engine, "_verify", counted)
    monkeypatch.setattr(target, "logits", lambda states: num_read.append(1) or logits(states))
    generate(target, head, PROMPTS, **how)
    assert verified and set(verified) == {1}


def test_a_cost_below_nothing_is_refused(target):
    with pytest.raises(BadInput, match=r"^verify_cost -0.1: expected 0 or more$"):
        generate(target, block(target), [1], verify_cost=-0.1)
    with pytest.raises(BadInput, match=r"^--verify-cost cheap: expected measured, or a number above 0$"):
        WantedDrafts.of([], ["ngram"], ["chain"], 8, temperature=0, verify_cost="cheap")
    with pytest.raises(BadInput, match=r"^--verify-cost 0.1: none of ngram estimates what is accepted$"):
        WantedDrafts.of([], ["ngram"], ["chain"], 8, temperature=0, verify_cost="0.1").load(target)
