"""transformers' own decoding is measured as it is: same drafter, K and text, the settings restored afterwards."""

import time

import pytest
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.draft_model import DraftModelDrafter
from headstart.eval.drafters.lookup import NgramDrafter, SuffixDrafter
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.lossless import LosslessReport
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.result import Bandwidth
from headstart.eval.measurement.transformers_baseline import (
    TimedAnswers,
    compare_transformers,
    decode_in_turns,
    result_of,
)
from headstart.eval.suites.prompts import Suite

SUITE = Suite("three", [[1, 5, 9, 5, 9], [1, 7, 8, 3, 7, 8], [1, 30]])
CONFIG = MeasureConfig(setting=chain(3), max_new_tokens=12, num_repeats=1)


@pytest.fixture
def drafters(target, tiny_target):
    return {
        "none (generate)": None,
        "ngram": NgramDrafter(),
        "draft-model": DraftModelDrafter(tiny_target("qwen3"), target_vocab_size=target.vocab_size),
        "itself": DraftModelDrafter(tiny_target("llama")),
    }


@pytest.mark.parametrize("name", ["none (generate)", "ngram", "draft-model", "itself"])
def test_texts_equal_and_settings_are_as_before(name, drafters, target):
    drafter = drafters[name]
    models = [target.model, *([drafter.model.model] if isinstance(drafter, DraftModelDrafter) else [])]
    before = [(model.generation_config, len(model._forward_pre_hooks)) for model in models]
    prompts = []
    entry = compare_transformers(target, drafter, SUITE, CONFIG, name=name, on_prompt=lambda: prompts.append(1))
    assert entry is not None and len(prompts) == 3
    assert [(model.generation_config, len(model._forward_pre_hooks)) for model in models] == before
    assert (entry.engine, entry.drafter, entry.batch_size) == ("transformers", name, 1)
    assert entry.lossless.identical == entry.lossless.checked == 3
    assert entry.num_draft_tokens == (0 if drafter is None else 3)
    low, high = entry.ours_over_theirs_ci95
    assert 0 < low <= entry.ours_over_theirs <= high
    assert 0 < entry.speedup_p10 <= entry.speedup_median <= entry.speedup_p90
    assert entry.baseline_bandwidth == Bandwidth(None, None)
    if drafter is None:
        assert entry.acceptance_length == 1.0
        assert entry.ours_tokens_per_second == entry.baseline_tokens_per_second


def test_they_draft_exactly_k_tokens(drafters, tiny_target):
    """The target as its own draft model: every forward of theirs commits K + 1, but for the answer's end."""
    entry = compare_transformers(
        tiny_target("llama"), drafters["itself"], Suite("one", [[1, 5, 9]]), CONFIG, name="itself"
    )
    assert entry is not None and entry.num_tokens == 12
    assert entry.num_rounds == 12 / 4


def test_an_entry_has_the_keys_of_ours(drafters, target):
    ours, _ = measure(target, drafters["ngram"], SUITE, CONFIG, name="ngram")
    theirs = compare_transformers(target, drafters["ngram"], SUITE, CONFIG, name="ngram")
    assert theirs is not None and set(ours.to_json()) <= set(theirs.to_json())


def test_a_checkpoint_s_own_sampling_is_set_aside(target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "repetition_penalty", 5.0)
    entry = compare_transformers(target, None, SUITE, CONFIG, name="none (generate)")
    assert entry is not None and entry.lossless.identical == 3


def test_what_transformers_lacks_is_left_out(target, tiny_target):
    smaller = DraftModelDrafter(tiny_target("llama", vocab_size=30), target_vocab_size=61)
    for drafter in (SuffixDrafter(), smaller):
        assert compare_transformers(target, drafter, SUITE, CONFIG, name="x") is None


def test_ways_take_turns():
    order = []

    def way(name, seconds):
        def run(prompt):
            order.append(name)
            time.sleep(seconds)
            return [*prompt, 1], 2

        return run

    ways, suite, config = [way("a", 0.0), way("b", 0.01)], Suite("two", [[5], [6]]), MeasureConfig(num_repeats=3)
    timed, done, failed = decode_in_turns(ways, suite, config, on_prompt=lambda: None)
    assert (done, failed) == ([0, 1], [])
    assert order == list("ab" + "abbaab" + "baabba")
    assert timed[0].texts == timed[1].texts == [[5, 1], [6, 1]]
    assert timed[0].num_forwards == 4
    assert all(b >= 0.03 for b in timed[1].seconds) and timed[0].seconds_for([[1], []], [0, 1])[1] == 0
    assert TimedAnswers(seconds=[2.0, 3.0], texts=[[], [5]]).seconds_for([[], [5]], [0, 1]) == [2.0, 3.0], (
        "one ended at once"
    )


def test_answers_of_other_lengths_are_not_compared_in_time():
    """Two equally fast sides with 200 ms of prefill and 10 ms a token: scaled, the longer answer would look faster."""
    texts = [[[1] * 96, [1] * 50], [[1] * 10, [1] * 49]]
    sides = [TimedAnswers([0.2 + 0.01 * len(text) for text in side], side, 100) for side in texts]
    suite, config = Suite("two", [[5], [6]]), MeasureConfig(setting=chain(0), num_repeats=1)
    found = result_of(suite, config, [sides[0], sides[1], sides[1]], LosslessReport(), engine="other", name="none")
    assert found.num_timed == 1 and found.ours_over_theirs == pytest.approx(1, abs=0.01)
    assert found.tokens_per_second == pytest.approx(50 / 0.7, abs=0.01) and found.num_tokens == 146
