"""Which schedule pays: what is simulated is vLLM's rule, our engine's, and what texts accept, at known step times."""

import json
from itertools import accumulate
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from headstart.eval.decoding import generate
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.metrics import calibration_errors
from headstart.eval.measurement.step_times import StepTime
from headstart.eval.plan.machine_profile import load_profile
from headstart.eval.plan.scheduling import (
    RoundTimes,
    WatchedText,
    drafts_of_rows,
    drafts_within_budget,
    fixed_length,
    never_slower,
    run_schedule,
    schedule_loads,
    watch_texts,
)
from headstart.heads.drafting import Proposal

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1, 30, 31, 32, 33, 34]]
# recorded from vLLM 0.32's own AdaptiveVerificationManager: estimates of this round and of the last, the cost table of
# a round by drafts verified, and the drafts of each row that it then verified
OF_VLLM = json.loads((Path(__file__).parent / "vllm_schedule.json").read_text())


class Times:
    """Rounds as measured: a step's fixed part, drafting, and time for each verified token."""

    def __init__(self, fixed, token, draft):
        self.fixed, self.token, self.draft = fixed, token, draft

    def at(self, setting, *, batch_size, context):
        drafted = setting.num_drafted if setting else 0
        verify = self.fixed + self.token * batch_size * (1 + drafted)
        draft = self.draft if setting else 0.0
        return StepTime(None, batch_size, context, 1 + drafted, drafted, draft, verify, 0.0)


def drawn_texts(*, num_texts=20, length=60, num_drafts=5, seed=1):
    """Texts whose drafts are accepted as often as they are estimated; some stretches are easy, some hard."""
    source = np.random.default_rng(seed)
    texts = []
    for _ in range(num_texts):
        ease = np.repeat(source.beta(0.7, 0.7, length // 6), 6)[:, None]
        estimates = np.clip(ease + source.normal(0, 0.1, (length, num_drafts)), 0.02, 0.98)
        taken = source.uniform(size=estimates.shape) < estimates
        texts.append(WatchedText(estimates, taken.cumprod(1).sum(1)))
    return texts


@pytest.mark.parametrize("case", range(len(OF_VLLM)))
def test_the_budget_and_who_gets_it_are_vllms(case):
    told = OF_VLLM[case]
    found = drafts_within_budget(*(np.array(told[key]) for key in ("estimates", "last", "milliseconds")))
    assert found.tolist() == told["drafts"]


def test_a_single_row_verifies_the_same_drafts_in_our_engine_and_in_vllm():
    source = np.random.default_rng(2)
    for estimates in source.uniform(0.05, 0.99, (300, 1, 6)):
        for cost in (0.02, 0.1, 0.4):
            theirs = drafts_within_budget(estimates, estimates, 1 + cost * np.arange(7))
            assert theirs.tolist() == drafts_of_rows(estimates, cost).tolist()


def test_rows_get_what_is_likeliest_to_be_accepted_of_all_of_them():
    estimates = np.array([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [0.1, 0.9, 0.9]])
    reach = [list(accumulate(row, mul)) for row in estimates.tolist()]
    times = 10 + 2.0 * np.arange(10)
    drafts = drafts_within_budget(estimates, estimates, times)
    left_out = max(row[num] for row, num in zip(reach, drafts, strict=True) if num < 3)
    assert all(row[num - 1] >= left_out for row, num in zip(reach, drafts, strict=True) if num)
    late = drafts_within_budget(estimates, np.ones((3, 3)), times)
    assert drafts.sum() < late.sum() == 9, "a budget is by the estimates of the round before"


@pytest.mark.slow
def test_what_is_accepted_at_each_position_gives_the_rounds_of_decoding(target, target_as_drafter):
    class Unsure(target_as_drafter):
        estimates = True

        def propose(self, state, *, num_draft_tokens):
            tokens = super().propose(state, num_draft_tokens=num_draft_tokens).tokens
            at = state["position"][:, None] + torch.arange(num_draft_tokens)
            return Proposal(torch.where(at % 4 == 0, 0, tokens), confidence=(at * 7 % 11 + 1) / 11)

    drafter, how = Unsure(target), {"max_new_tokens": 20, "eos_token_ids": []}
    config = MeasureConfig(max_new_tokens=20, batch_size=2)
    watched = watch_texts(target, drafter, PROMPTS, config, num_draft_tokens=4)
    ends = target.eos_token_ids
    assert [len(text.accepted) for text in watched] == [
        len(row) - 1 for row in generate(target, None, PROMPTS, max_new_tokens=20, eos_token_ids=ends).token_ids
    ]
    assert {int(num) for text in watched for num in text.accepted} >= {0, 1, 2, 3}
    for k in (1, 3, 4):
        texts = [generate(target, drafter, [prompt], num_draft_tokens=k, **how) for prompt in PROMPTS]
        rounds = sum(len(text.rounds) - 1 for text in texts)
        assert fixed_length(watched, k) == pytest.approx(3 * 19 / rounds)


def test_a_schedule_that_verifies_all_is_the_fixed_chain():
    texts = drawn_texts()
    free = RoundTimes.of(Times(fixed=20, token=0.0, draft=2), [1, 3, 5], batch_size=4, context=50)
    for engine in ("vllm", "headstart"):
        speed, verified = run_schedule(texts, free, engine)
        assert verified == 5
        assert speed == pytest.approx(4 * 1000 / 22 * fixed_length(texts, 5), rel=0.02), "rows begin within the texts"


def test_round_times_are_those_of_the_chains_and_linear_between():
    times = RoundTimes.of(Times(fixed=20, token=0.5, draft=3), [2, 4], batch_size=2, context=50)
    assert times.fixed == {0: 21.0, 2: 26.0, 4: 28.0}
    assert times.scheduled.tolist() == pytest.approx([24 + 0.5 * n for n in range(9)])
    assert times.verify_cost == pytest.approx(2 * 0.5 / 24)


def test_a_schedule_is_advised_only_where_it_is_faster():
    loads = schedule_loads(drawn_texts(), Times(12, 0.6, 2), [1, 2, 3, 4, 5], batch_sizes=(1, 8, 32), context=50)
    assert [(load.engine, load.batch_size) for load in loads] == [
        (engine, size) for size in (1, 8, 32) for engine in ("vllm", "headstart")
    ]
    assert json.loads(json.dumps([load.to_json() for load in loads]))[0]["pays"] == loads[0].pays
    for load in loads:
        assert load.pays == (load.scheduled_tokens_per_second >= 1.01 * load.fixed_tokens_per_second)
    own = [load for load in loads if load.engine == "vllm"]
    assert never_slower(loads, "vllm") == (min(load.gain for load in own) >= 1)
    few = schedule_loads(drawn_texts()[:3], Times(12, 0.6, 2), [1, 2, 3, 4, 5], batch_sizes=(1, 8, 32), context=50)
    assert not any(load.pays for load in few), "three texts prove nothing"
    unsure = [WatchedText(np.full_like(text.estimates, 0.5), text.accepted) for text in drawn_texts()]
    told = schedule_loads(unsure, Times(12, 0.6, 2), [1, 2, 3, 4, 5], batch_sizes=(1, 8, 32), context=50)
    assert not any(load.pays for load in told), "estimates that say nothing are worth nothing"
    assert not never_slower(told, "vllm")
    assert schedule_loads([], Times(12, 0.6, 2), [1], batch_sizes=(1,), context=50) == []


# 14 texts of SmolLM2-135M-Instruct on GSM8K questions, as a DSpark head of 200 steps drafts there (K 5), its confidence
# calibrated on other questions; greedy
RECORDED = json.loads((Path(__file__).parent / "watched_smollm2.json").read_text())


def test_a_real_heads_schedule_loses_nothing_where_all_drafts_pay_and_wins_a_tenth_under_load():
    """At the step times of an H100's profile: against K 5 for all, and against the best K of each load."""
    texts = [WatchedText(np.array(one["estimates"]), np.array(one["accepted"])) for one in RECORDED]
    profile = load_profile("h100-llama-3.1-8b-vllm")
    times = Times(profile.fixed_ms + profile.overhead_ms, profile.token_ms, draft=0.1 * profile.fixed_ms)
    loads = schedule_loads(texts, times, [1, 2, 3, 4, 5], batch_sizes=(1, 8, 32), context=150, engines=("vllm",))
    alone, some, many = (load.gain_over_longest for load in loads)
    assert alone == pytest.approx(1, abs=0.002) and some >= 1.01 and many >= 1.1
    assert all(load.gain >= 0.998 for load in loads) and [load.pays for load in loads][0] is False


def test_a_real_heads_estimates_are_off_by_little_more_than_chance():
    pairs = [
        (estimate, k < accepted)
        for text in RECORDED
        for estimates, accepted in zip(text["estimates"], text["accepted"], strict=True)
        for k, estimate in enumerate(estimates[: accepted + 1])
    ]
    error, by_chance = calibration_errors(pairs)
    assert by_chance < error <= 0.03
