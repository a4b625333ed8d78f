"""Texts that repeat themselves are told from those that do not; the figures without them are of the others alone."""

from dataclasses import replace

import pytest
from headstart.eval.decoding.loop import Generation, Round
from headstart.eval.figures.repetition import repeated_share, text_repetition
from headstart.eval.measurement.batches import MeasuredBatch, Side, timed_seconds
from headstart.eval.measurement.summary import observations, repetitions, without_loops
from headstart.eval.suites.prompts import PromptSource, Suite

PLAIN, LOOP = list(range(40)), [7, 8, 9] * 13 + [7]


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        (PLAIN, 0),
        ([5] * 10, 6 / 7),  # one of seven 4-grams is new
        (LOOP, 1 - 3 / 37),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], 2 / 7),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4, 8], 1 / 7),
    ],
)
def test_repetition_by_hand(text, share):
    assert repeated_share(text) == pytest.approx(share)


def test_a_text_loops_when_more_than_half_of_its_4_grams_are_repeated():
    half = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]  # 5 of 10
    assert not text_repetition(0, [half]).is_looping and text_repetition(0, [[*half, 4]]).is_looping


def side(seconds, texts, accepted):
    """One pass: the prefill, then a round of all the text."""
    first = Round(0.1, 0, [0] * len(texts), [1] * len(texts), [1] * len(texts))
    emitted = [len(text) - 1 for text in texts]
    return Side([Generation(texts, [first, Round(seconds, 3, accepted, emitted, emitted)])], [None])


def batch(number, texts, *, fast, accepted=(0, 0)):
    sources = [PromptSource(10 * number + row, "chat:1") for row in range(len(texts))]
    suite = Suite("chat", [[1, source.number] for source in sources], sources=sources)
    accepted = list(accepted[: len(texts)])
    return MeasuredBatch(number, suite, side(fast, texts, accepted), side(1.0, texts, accepted))


def test_a_batch_that_earlier_prompts_fill_is_no_observation():
    """Else an interval over three batches would pass for one over four."""
    batches = [batch(0, [PLAIN, PLAIN], fast=0.5), batch(1, [PLAIN, PLAIN], fast=1.0)]
    batches[1].suite.sources[1] = batches[0].suite.sources[0]
    assert timed_seconds(batches) == [batches[0].seconds]
    assert timed_seconds(batches[1:]) == [batches[1].seconds], "the only one"


def test_a_prompt_that_is_asked_twice_is_one_observation():
    """Else a file that repeats one prompt would pass for the traffic of many, with an interval of next to no width."""
    batches = [batch(i, [PLAIN], fast=0.5 + i) for i in range(3)]
    batches[2].suite.prompts[0] = batches[0].suite.prompts[0]
    assert [list(seen.prompts) for seen in observations(batches, 1, num_draft_tokens=3)] == [[0, 20], [10]]
    assert timed_seconds(batches) == [(2.0, 0.5 + 2.5), (1.0, 1.5)], "its times are summed"
    both = [batch(i, [PLAIN, PLAIN], fast=1.0) for i in range(2)]
    both[1].suite.prompts[:] = both[0].suite.prompts
    assert timed_seconds(both) == [(2.0, 2.0)]


def test_batches_that_share_a_chat_are_one_observation_and_others_are_not():
    """A chat of two turns straddles the first two batches, and their other chats are in no batch after them."""
    batches = [batch(i, [PLAIN, PLAIN], fast=0.5) for i in range(4)]
    (_, early), (late, _) = batches[0].suite.sources, batches[1].suite.sources
    batches[1].suite.sources[0] = replace(late, chat=early.number)
    seen = observations(batches, 1, num_draft_tokens=3)
    assert [one.prompts for one in seen] == [[0, 1, 10, 11], [20, 21], [30, 31]] and len(timed_seconds(batches)) == 3


def test_figures_without_loops_are_those_of_the_other_prompts():
    """Three prompts gain nothing, one loops and is four times as fast; a mixed batch has no time of its own."""
    batches = [batch(i, [PLAIN], fast=1.0) for i in range(3)] + [batch(3, [LOOP], fast=0.25, accepted=(3,))]
    found = without_loops(batches, repetitions(batches, 1), 1, num_draft_tokens=3)
    assert found is not None and (found.num_timed, found.speedup) == (3, 1.0)
    assert found.acceptance_length == 39.0, "39 tokens in one round of each"
    assert len(timed_seconds(batches)) == 4
    mixed = [batch(0, [PLAIN, LOOP], fast=0.5), batch(1, [PLAIN, PLAIN], fast=1.0)]
    found = without_loops(mixed, repetitions(mixed, 1), 1, num_draft_tokens=3)
    assert found is not None and (found.num_timed, found.speedup) == (1, 1.0)
    assert without_loops(batches[:3], repetitions(batches[:3], 1), 1, num_draft_tokens=3) is None
