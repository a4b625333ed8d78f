"""Figures of a part of the rounds are those of that part alone, and are held against what training knew."""

from dataclasses import replace

import pytest
import torch
from drafted import untrained
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.loop import Generation
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.drafters.registry import training_record
from headstart.eval.measurement.batches import MeasuredBatch, Side
from headstart.eval.measurement.breakdown import asked_as_trained, beyond_training, vocabulary_coverage
from headstart.eval.measurement.config import MeasureConfig
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.metrics import AcceptancePart
from headstart.eval.measurement.result import BeyondTraining, PromptEnding, RecordedTraining, VocabularyCoverage
from headstart.eval.suites.prompts import PromptSource, Suite
from headstart.heads.registry import HEADS, build_head, save_head

PROMPTS = [[1, 5, 9, 5], [1, 7, 8, 7], [1, 30, 31, 30], [1, 40, 40]]


def suite(*domains):
    return Suite("four", PROMPTS, sources=[PromptSource(i, f"a:{i}", one) for i, one in enumerate(domains)])


def measured(target, prompts, batch_size=1):
    config = MeasureConfig(setting=chain(3), max_new_tokens=12, num_repeats=1, batch_size=batch_size)
    return measure(target, NgramDrafter(), prompts, config, name="ngram")[0]


def test_each_domain_has_the_figures_of_its_prompts_alone(target):
    parts = measured(target, suite("a", "b", "a", "b")).by_domain
    assert list(parts) == ["a", "b"]
    for name, places in (("a", [0, 2]), ("b", [1, 3])):
        alone = measured(target, suite(*"abab").subset(places))
        part, low, high = parts[name], *parts[name].speedup_ci95
        for key in ("num_prompts", "num_rounds", "acceptance_length", "acceptance_rate"):
            assert getattr(part, key) == getattr(alone, key)
        assert low is not None and part.speedup is not None and high is not None
        assert 0 < low <= part.speedup <= high
    assert sum(part.num_rounds for part in parts.values()) == measured(target, suite(*"abab")).num_rounds


def test_a_single_prompt_has_no_speedup_and_rows_without_a_domain_are_told_apart(target):
    parts = measured(target, suite("a", None, None, None)).by_domain
    assert parts["a"].speedup is None and parts["a"].speedup_ci95 == (None, None)
    assert parts["(none)"].num_prompts == 3 and (parts["(none)"].speedup or 0) > 0
    assert measured(target, suite(None, None, None, None)).by_domain == {}


def test_of_batches_only_whole_ones_are_timed(target):
    apart = measured(target, suite(*"aabb"), batch_size=1).by_domain
    mixed = measured(target, suite(*"abab"), batch_size=2).by_domain
    assert [part.speedup for part in mixed.values()] == [None, None]
    assert sum(part.num_rounds for part in mixed.values()) == sum(part.num_rounds for part in apart.values())
    whole = measured(target, suite(*"aaaa"), batch_size=2)
    assert whole.by_domain["a"].speedup == pytest.approx(whole.speedup)


def test_rounds_that_begin_inside_a_trace_are_counted_apart(target):
    """Inside: behind the fourth new token, and up to the ninth."""
    start = len(PROMPTS[0])

    def in_trace(text):
        return [start + 4 <= count < start + 9 for count in range(len(text) + 1)]

    result = measured(target, replace(suite(*"abab").subset([0]), in_trace=in_trace))
    whole = measured(target, suite(*"abab").subset([0]))
    assert set(result.by_segment) == {"think", "answer"} and list(whole.by_segment) == ["answer"]
    assert 1 <= result.by_segment["think"].num_rounds <= 5
    assert sum(part.num_rounds for part in result.by_segment.values()) == whole.num_rounds


def test_coverage_counts_written_tokens(tiny_target):
    target = tiny_target("llama")
    config = HEADS["eagle3"].config_class(type="eagle3", draft_vocab_size=4)
    head = build_head(config, target, draft_token_ids=torch.tensor([1, 5, 9, 30]))

    def wrote(*texts):
        drafted = Side([Generation(list(texts), [])])
        return [MeasuredBatch(0, Suite("two", [[1]] * len(texts)), drafted, Side())]

    assert vocabulary_coverage(head, wrote([1, 5, 5], [2])) == VocabularyCoverage(4, 0.75)
    assert vocabulary_coverage(head, wrote([], [])) == VocabularyCoverage(4, None)
    assert vocabulary_coverage(untrained("medusa", target), wrote([1])) is None
    assert vocabulary_coverage(NgramDrafter(), wrote([1])) is None


def test_what_a_head_says_of_its_training_is_read_from_it(tiny_target, tmp_path):
    head = untrained("medusa", tiny_target("llama"))
    known = {"max_length": 512, "prompt_ending": {"token_ids": [7, 8], "text": "w7 w8"}}
    record = training_record(f"head:{save_head(head, tmp_path / 'run', training=known)}") or {}
    assert len(record.pop("fingerprint")) == 32 and record == known, "of its weights, and what was known"
    assert training_record(f"head:{save_head(head, tmp_path / 'old')}") is None
    assert training_record("ngram") is None


def test_prompts_are_held_against_how_those_of_training_ended():
    training = RecordedTraining({}, prompt_ending=PromptEnding([7, 8], ""))
    assert asked_as_trained(training, [[1, 7, 8], [7, 8], [8], [7, 8, 9]]) == 0.5
    assert asked_as_trained(training, []) is None
    assert asked_as_trained(RecordedTraining({}), [[1]]) is asked_as_trained(None, [[1]]) is None


def test_contexts_are_longer_than_training_rows_or_not():
    def part(num_rounds, length):
        return AcceptancePart(num_rounds, length, [])

    parts = {"512-2047": part(10, 2.0), "0-127": part(10, 4.0), "128-511": part(30, 3.0), "2048-": part(30, 1.0)}
    assert beyond_training(RecordedTraining({}, max_length=511), parts) == BeyondTraining(40, 1.25, 3.25)
    assert beyond_training(RecordedTraining({}, max_length=2047), parts) == BeyondTraining(30, 1.0, 3.0)
    del parts["2048-"]
    for training in (RecordedTraining({}, max_length=2048), RecordedTraining({}), None):
        assert beyond_training(training, parts) is None
