"""Step times: measured cells have the shapes asked for, and are read linearly in between."""

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.benchmarks.synthetic import SyntheticDrafter
from headstart.eval.decoding.draft_setting import DraftSetting, chains
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement import step_times
from headstart.eval.measurement.step_times import (
    NUM_ROUNDS,
    StepTable,
    StepTime,
    TimedCell,
    interpolate,
    measure_step_times,
    repeated_text,
)
from headstart.eval.proof.config import MeasureConfig
from headstart.heads.drafting.trees import DynamicTree

TREE = DraftSetting("dynamic:2", 1, DynamicTree(num_nodes=2, depth=1, top_k=2))


def planted(setting, batch, context, length, num_tokens):
    """A round whose parts are linear in all three."""
    verify = 1 + 2 * batch + 0.5 * context + 3 * length
    return StepTime(setting, batch, context, num_tokens, length, 0.25 * length, verify, 0.125, 0.5 * length)


def test_points_are_read_between_and_beyond_what_was_measured():
    points = [(1, 2.0), (4, 5.0), (8, 13.0)]
    assert [interpolate(points, n) for n in (1, 2, 4, 6, 10)] == [2.0, 3.0, 5.0, 9.0, 17.0]
    assert interpolate([(1, 2.0)], 5) == 2.0


def test_a_table_of_linear_times_is_read_exactly_everywhere():
    known = [(None, 0), ("K 1", 1), ("K 8", 8)]
    table = StepTable(tuple(planted(name, b, c, k, k + 1) for name, k in known for b in (1, 4, 16) for c in (10, 40)))
    for length, batch, context in ((1, 1, 10), (3, 7, 33), (8, 20, 5), (5, 16, 100)):
        read = table.at(DraftSetting(f"K {length}", length), batch_size=batch, context=context)
        wanted = planted("", batch, context, length, 0)
        assert (read.round_ms, read.reading_ms) == pytest.approx((wanted.round_ms, wanted.reading_ms))
    assert table.at(None, batch_size=2, context=20).round_ms == pytest.approx(1 + 4 + 10 + 0.125)


def test_a_tree_that_was_not_timed_is_refused():
    with pytest.raises(BadInput, match="dynamic:2: no step time"):
        StepTable((planted("K 1", 1, 10, 1, 2),)).at(TREE, batch_size=1, context=10)


@pytest.mark.fast_only(drafter=["ngram"])
@pytest.mark.parametrize("drafter", ["eagle3", "ngram"])
def test_every_cell_is_timed(target, drafter, monkeypatch):
    monkeypatch.setattr(step_times, "NUM_PASSES", 2)
    head = NgramDrafter()
    if drafter != "ngram":
        head = untrained(drafter, target)
    settings = [*chains(head, (1, 3)), *([TREE] if drafter != "ngram" else [])]
    where = {"batch_sizes": (1, 3), "contexts": (4, 9), "text": [1, 5, 9, 11]}
    times = measure_step_times(target, head, settings, MeasureConfig(), **where)
    assert {(one.setting, one.batch_size, one.context) for one in times} == {
        (name, size, context)
        for name in (None, *(one.name for one in settings))
        for size in (1, 3)
        for context in (4, 9)
    }
    assert all(one.verify_ms > 0 and one.round_ms >= one.verify_ms for one in times)
    assert all(one.draft_ms > 0 for one in times if one.setting)
    assert {one.num_tokens for one in times if one.setting == "K 3"} == {4}


def test_passes_run_the_same_rounds_behind_prompts_read_once(target, monkeypatch):
    """And so many of them whatever is accepted: here everything, the target drafts for itself."""
    drafter = SyntheticDrafter(target, [[1, 5, 9, 11]], [1.0], max_new_tokens=60)
    rounds, prefills = [], []
    run_round, prefill = step_times.run_round, step_times.prefill

    def counted(*arguments):
        rounds.append(run_round(*arguments))
        return rounds[-1]

    monkeypatch.setattr(step_times, "run_round", counted)
    monkeypatch.setattr(step_times, "prefill", lambda *arguments: prefills.append(1) or prefill(*arguments))
    settings, text = [DraftSetting("K 3", 3)], [1, 5, 9, 11]
    cell = TimedCell(target, drafter, settings, MeasureConfig(), batch_size=1, context=4, text=text)
    cell.run()
    cell.run()
    assert len(prefills) == 2, "the baseline's and the drafter's engine"
    accepted = [one.num_accepted for one, *_ in rounds if one.num_drafted]
    assert accepted == [[3]] * 2 * (NUM_ROUNDS + 1)
    cell.run(reads_again=True)
    assert len(prefills) == 4
    assert (len(cell.plain), len(cell.drafted[DraftSetting("K 3", 3)])) == (6, 3)


def test_a_context_without_room_for_the_timed_rounds_is_refused(target):
    with pytest.raises(BadInput, match=r"context 250: with \d+ tokens for timed rounds it exceeds the target's 256"):
        measure_step_times(target, NgramDrafter(), [], MeasureConfig(), batch_sizes=(1,), contexts=(250,), text=[1])


def test_prompts_are_cut_from_a_text_round_and_round():
    assert repeated_text([1, 2, 3], 2, 5) == [3, 1, 2, 3, 1]
