"""A measurement is lossless, agrees with training's view of the head, and its report can be computed again."""

import json
from dataclasses import replace
from statistics import median

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.heads import HEADS, build_head
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.loop import Generation, Round, generate
from headstart.eval.figures.metrics import acceptance, ratio_and_interval
from headstart.eval.measurement.batches import MeasuredBatch, Side
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.result import Observation
from headstart.eval.measurement.summary import unmeasured
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.proof.lossless import LosslessReport
from headstart.eval.report.console import results_table
from headstart.eval.report.results.document import build_report, write_report
from headstart.eval.suites.prompts import Suite
from headstart.targets.caches.ring_cache import DraftWindow

PROMPTS = [[1, 5, 9], [1, 7, 8, 3, 22, 40, 11, 6], [1, 30, 31, 32, 33, 34]]


@pytest.fixture
def head(head_type, target):
    return untrained(head_type, target)


def measured(target, drafter, prompts=PROMPTS, **changes):
    config = replace(MeasureConfig(max_new_tokens=24, num_repeats=1), **changes)
    return measure(target, drafter, Suite("three", prompts), config, name="tiny")


def text(target, prompt, num_new=40):
    return generate(target, None, prompt, max_new_tokens=num_new, eos_token_ids=[]).token_ids[0]


@pytest.mark.parametrize("head_type", ["eagle3", "medusa"])
def test_a_result_entry_is_whole_and_lossless(head, target):
    entry, _ = measured(target, head)
    assert entry.lossless == LosslessReport(checked=3, identical=3) and entry.sampling_check is None
    assert (entry.num_prompts, entry.num_tokens, entry.batch_size) == (3, 72, 1)
    assert len(entry.acceptance_rate) == entry.num_draft_tokens
    assert entry.acceptance_length == round(entry.num_committed / entry.num_rounds, 4) >= 1
    assert entry.tokens_per_second > 0 and entry.baseline_tokens_per_second > 0
    assert entry.speedup > 0 and entry.speedup_ci95 == (None, None), "three prompts"
    assert entry.speedup == pytest.approx(entry.tokens_per_second / entry.baseline_tokens_per_second, rel=0.01)
    assert entry.baseline_bandwidth.gigabytes_per_second > 0


@pytest.mark.fast_only(head_type=["eagle3"])
def test_the_figures_follow_from_the_observations(head, target):
    """Speedup, acceptance length, both intervals and the median, from what the report has of each prompt or batch."""
    entry, _ = measured(target, head, [*PROMPTS, [1, 40, 41]])
    seen = entry.observations
    assert [one.prompts for one in seen] == [[0], [1], [2], [3]]
    assert sum(one.num_committed for one in seen) == entry.num_committed
    assert sum(one.num_rounds for one in seen) == entry.num_rounds
    ratio, ends = ratio_and_interval([one.baseline_seconds for one in seen], [one.seconds for one in seen])
    assert [entry.speedup, *entry.speedup_ci95] == pytest.approx([ratio, *ends], abs=1e-4)
    assert entry.spread[1] == pytest.approx(median(one.baseline_seconds / one.seconds for one in seen), abs=1e-4)
    length, ends = ratio_and_interval([one.num_committed for one in seen], [one.num_rounds for one in seen])
    assert [entry.acceptance_length, *entry.acceptance_length_ci95] == pytest.approx([length, *ends], abs=1e-4)
    batched, _ = measured(target, head, batch_size=2, max_new_tokens=8)
    assert [one.prompts for one in batched.observations] == [[0, 1], [2]]


def test_percentiles_are_those_of_single_prompts():
    """Speedups 1, 2, 3, 4 and 10: the tenth percentile lies four tenths of the way from the first to the second."""
    suite, config = Suite("three", PROMPTS), MeasureConfig()
    empty = unmeasured(suite, config, chain(3), drafter="tiny")

    def percentiles(*timed):
        seen = [Observation([i], 1, 1, *pair) for i, pair in enumerate(timed)]
        return [value and round(value, 4) for value in replace(empty, observations=seen).spread]

    assert percentiles((4.0, 1.0), (1.0, 1.0), (6.0, 2.0), (20.0, 2.0), (2.0, 1.0)) == [1.4, 3.0, 7.6]
    assert percentiles((3.0, 2.0)) == [1.5] * 3 and percentiles() == [None] * 3


def test_rows_that_have_ended_are_not_charged():
    """Two rows of 6 and 3 tokens behind the first: without drafts 5 and 2 steps are theirs alone, with drafts 3 and 1.

    At 10 ms a step and 15 ms a round (5 + 2) * 10 / 2 against (3 + 1) * 15 / 2 ms; the whole batch takes 50 and 45."""
    prefill = Round(0.1, 0, [0, 0], [1, 1], [1, 1])
    steps = [Round(0.010, 0, [0, 0], row, row) for row in ([1, 1], [1, 1], [1, 0], [1, 0], [1, 0])]
    rounds = [Round(0.015, 2, [0, 0], row, row) for row in ([2, 2], [2, 0], [1, 0])]
    texts = [[1] * 6, [1] * 3]
    plain, drafted = Side([Generation(texts, [prefill, *steps])]), Side([Generation(texts, [prefill, *rounds])])
    batch = MeasuredBatch(0, Suite("two", PROMPTS[:2]), drafted, plain)
    assert batch.seconds == pytest.approx((0.035, 0.030))


def test_training_and_decoding_agree_exactly_on_texts_that_end(head_type, tiny_target):
    """Texts closed by an end token are the same text for both; each prompt's answer is tried with several ends."""
    target = tiny_target("llama")
    head = untrained(head_type, target)
    whole = text(target, PROMPTS[0])
    for token in dict.fromkeys(whole[1::20]):
        target.model.generation_config.eos_token_id = token
        entry, _ = measured(target, head, [PROMPTS[0]], max_new_tokens=60)
        assert entry.teacher_forced_acceptance_length == entry.acceptance_length, token


@pytest.mark.slow
@pytest.mark.parametrize(("head_type", "num_depths"), [("eagle", 1), ("mtp", 1), ("eagle3", 2), ("draft_lm", 1)])
def test_they_agree_where_a_head_drafts_deeper_than_it_was_trained(head_type, num_depths, tiny_target):
    """Of nine tokens an untrained head guesses many."""
    target = tiny_target("llama", vocab_size=9)
    head = build_head(HEADS[head_type].config_class(type=head_type, num_depths=num_depths), target).eval()
    lengths = []
    for prompt in ([1, 5, 3], [1, 8, 7]):
        for token in sorted(set(text(target, prompt, 60)[8:])):
            target.model.generation_config.eos_token_id = token
            entry, _ = measured(target, head, [prompt], max_new_tokens=60, setting=chain(5))
            assert entry.teacher_forced_acceptance_length == entry.acceptance_length, (prompt, token)
            lengths.append(entry.acceptance_length or 0)  # a first token that ends the text
    assert head.num_depths == num_depths and max(lengths) > 1.2, lengths


def test_a_perfect_drafter_is_measured_at_its_most(target, target_as_drafter):
    entry, _ = measured(target, target_as_drafter(target), max_new_tokens=26, setting=chain(4), batch_size=3)
    assert entry.acceptance_length == 5 and entry.acceptance_rate == [1, 1, 1, 1]
    assert entry.teacher_forced_acceptance_length is None, "no head, nothing to unroll"


def test_a_window_that_training_did_not_have_is_held_against_no_training(target):
    head = untrained("eagle3", target)
    head.draft_window = DraftWindow(4)
    entry, _ = measured(target, head, max_new_tokens=26)
    assert entry.acceptance_length and entry.teacher_forced_acceptance_length is None


@pytest.mark.parametrize("head_type", ["eagle3", "medusa"])  # how each samples: the contract of heads
def test_sampled_texts_are_compared_with_the_baselines_of_their_repeat(head, target):
    entry, rounds = measured(target, head, PROMPTS[:1], temperature=1.0, num_repeats=2)
    assert entry.lossless == LosslessReport(checked=2, identical=2) and entry.num_tokens == 2 * 24
    assert len(rounds) == 1 * 2 * 2
    again, _ = measured(target, head, PROMPTS[:1], temperature=1.0, num_repeats=2)
    assert again.acceptance_rate == entry.acceptance_rate, "the same seed samples the same texts"


@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("head_type", ["eagle3", "medusa"])  # nothing is drafted
def test_answers_that_end_at_once_do_not_break_a_measurement(which, head_type, tiny_target):
    """Their end token comes with the prefill, so that there is nothing to time."""
    target = tiny_target("llama")
    head = untrained(head_type, target)
    prompts = PROMPTS if which == "one" else PROMPTS[:1]
    first = text(target, PROMPTS[0])[0]
    target.model.generation_config.eos_token_id = first
    entry, rounds = measured(target, head, prompts)
    assert entry.lossless.identical == len(prompts)
    if which == "one":
        assert entry.speedup > 0
    else:
        assert entry.speedup is None and entry.speedup_ci95 == (None, None)
        assert entry.spread[1] is None and entry.baseline_bandwidth.gigabytes_per_second is None
        assert entry.acceptance_length is None and entry.tokens_per_second is None
    assert results_table([entry])
    json.dumps(entry.to_json(), allow_nan=False)


# What is left on disk


@pytest.mark.parametrize("head_type", ["eagle3"])
def test_the_rounds_give_the_figures_again(head, target, tmp_path):
    entry, rounds = measured(target, head, batch_size=2, num_repeats=2)
    path = write_report(tmp_path / "deep" / "eval", build_report(target, [entry]), rounds)
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.json", "rounds.jsonl"]
    report = json.loads(path.read_text())
    assert set(report) == {"schema_version", "environment", "target", "results"}
    entry = entry.with_share(report["environment"]["copy_gigabytes_per_second"])
    assert report["results"] == [entry.to_json()]
    assert report["target"]["fingerprint"] == target.fingerprint
    rows = [json.loads(line) for line in (path.parent / "rounds.jsonl").read_text().splitlines()]
    assert {(row["batch"], row["side"], row["repeat"]) for row in rows} == {
        (b, s, r) for b in range(2) for s in ("speculative", "baseline") for r in range(2)
    }
    for repeat in range(2):
        mine = [row for row in rows if row["side"] == "speculative" and row["repeat"] == repeat]
        counted = acceptance(
            (Round(**one) for row in mine for one in row["rounds"]), num_draft_tokens=entry.num_draft_tokens
        )
        assert counted.length is not None and round(counted.length, 4) == entry.acceptance_length
        assert [None if r is None else round(r, 4) for r in counted.rate] == entry.acceptance_rate
        assert sum(sum(one["num_emitted"]) for row in mine for one in row["rounds"]) == entry.num_tokens


def test_settings_below_one_are_refused():
    for name in ("batch_size", "num_repeats"):
        with pytest.raises(BadInput, match=f"^{name} 0: expected at least 1$"):
            MeasureConfig(**{name: 0})  # type: ignore[arg-type]


def test_a_chain_longer_than_an_answer_is_refused():
    assert MeasureConfig(setting=chain(64), max_new_tokens=8).setting is not None
    with pytest.raises(BadInput, match="num_draft_tokens 99999: at most 128, an answer's tokens"):
        MeasureConfig(setting=chain(99_999))
