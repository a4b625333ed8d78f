"""Figures of a part of the rounds are those of that part alone, and are held against what training knew."""

from dataclasses import replace

import pytest
import torch
from drafted import untrained
from headstart.engines.heads import HEADS, build_head, save_head
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.loop import Generation
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.drafters.registry import training_record
from headstart.eval.figures.recorded_training import LearntPrompts, PromptEnding, RecordedTraining
from headstart.eval.measurement.batches import MeasuredBatch, Side
from headstart.eval.measurement.breakdown import asked_as_trained, learnt_share, vocabulary_coverage
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.result import VocabularyCoverage
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import PromptSource, Suite

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
        part = parts[name]
        for key in ("num_prompts", "num_rounds", "acceptance_length", "acceptance_rate"):
            assert getattr(part, key) == getattr(alone, key)
        assert part.speedup is not None and part.speedup_ci95 == (None, None), "two prompts say nothing of others"
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
    assert len(record.pop("fingerprint")) == 40 and record == known, "of its weights, and what was known"
    assert training_record(f"head:{save_head(head, tmp_path / 'old')}") is None
    assert training_record("ngram") is None


def test_prompts_are_held_against_how_those_of_training_ended():
    training = RecordedTraining({}, prompt_ending=PromptEnding([7, 8], ""))
    assert asked_as_trained(training, [[1, 7, 8], [7, 8], [8], [7, 8, 9]]) == 0.5
    assert asked_as_trained(training, []) is None
    assert asked_as_trained(RecordedTraining({}), [[1]]) is asked_as_trained(None, [[1]]) is None


def test_prompts_that_a_head_was_trained_on_are_counted(chat_target):
    """Case and spaces do not tell prompts apart; turns behind answers of the target are not looked at."""
    decode = chat_target.tokenizer.decode
    learnt = LearntPrompts.of([decode([1, 7, 8]).upper(), decode([1, 9])], num_rows=2)
    training = RecordedTraining({}, prompts=learnt)
    suite = Suite("some", [[1, 7, 8], [1, 30], [1, 9], [1, 31]])
    assert learnt_share(training, suite, chat_target) == 0.5
    later = replace(suite, sources=[replace(source, turn=1 + (source.number == 2)) for source in suite.sources])
    assert learnt_share(training, later, chat_target) == pytest.approx(1 / 3, abs=1e-3)
    many = RecordedTraining({}, prompts=replace(learnt, num_rows=30_000))
    assert learnt_share(many, suite, chat_target) == 0.75, "of half as many again: a third of the rows is not known"
    assert learnt_share(RecordedTraining({}), suite, chat_target) is None
    refitted = RecordedTraining({}, prompts=LearntPrompts.of([decode([1, 30])], num_rows=1), earlier_prompts=learnt)
    assert learnt_share(refitted, suite, chat_target) == 0.5, "what a head learnt before it was trained on counts too"
    assert refitted.learnt is not None and len(refitted.learnt.known()) == refitted.learnt.num_rows == 3
