"""Predictions: what the speed model makes of acceptance and step times, and what it advises."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.eval.decoding.draft_setting import DraftSetting, chains
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.figures.metrics import Acceptance, ratio_and_interval
from headstart.eval.measurement.result import Observation
from headstart.eval.measurement.step_times import StepTable, StepTime
from headstart.eval.plan.accepting import accepted_by, named_trees
from headstart.eval.plan.engine_settings import for_llamacpp, for_sglang, measured_lengths, schedule_for_vllm
from headstart.eval.plan.prediction import (
    Accepted,
    Workload,
    errors,
    predict_cells,
    recommend_cells,
    shortlist,
    steady_speedup,
    workload_times,
)
from headstart.eval.proof.config import MeasureConfig
from headstart.heads.drafting.trees import DynamicTree


@dataclass(frozen=True)
class Times(StepTable):
    """A baseline step of 10 ms; a round of 10 ms, and 1 more per drafted token and row beyond `free` of them."""

    times: tuple[StepTime, ...] = ()
    free: int = 0
    reading_ms: float = 0.0

    def at(self, setting, *, batch_size, context):
        drafted = setting.num_drafted if setting else 0
        verify, size = 10 + max(0, drafted * batch_size - self.free), round(batch_size)
        return StepTime(None, size, round(context), 1 + drafted, drafted, 0.0, verify, 0.0, self.reading_ms)


def accepted(length, per_round, *, tokens=(13, 13), tree=None, name=""):
    """A setting of which each round commits per_round tokens."""
    rounds = [round((new - 1) / per_round) for new in tokens]
    counted = Acceptance(sum(rounds), round(sum(rounds) * per_round), [1] * length, [1] * length)
    return Accepted(DraftSetting(name or f"K {length}", length, tree), counted, rounds, list(tokens))


def predicted(*settings, times=Times(), batch_sizes=(1,)):
    """Cells of two prompts."""
    return predict_cells(settings, Workload([5, 5], 13), times, batch_sizes=batch_sizes)


def measured(cells, *speedups):
    """The cells with these measured speedups."""
    return [replace(cell, measured_speedup=value) for cell, value in zip(cells, speedups, strict=True)]


@pytest.mark.parametrize(
    ("tokens", "size", "reading_ms", "expected"),
    [
        # 3 per round: on average 9 baseline steps against 3 rounds and the prompts' reading
        ((13, 7), 2, 6, 9 * 10 / (3 * (10 + 4) + 6)),
        ((13, 7), 1, 6, (12 + 6) * 10 / (4 * 12 + 6 + 2 * 12 + 6)),
        # of three prompts in twos the first comes again: two batches, of 9 and 10.5 baseline steps per row
        ((13, 7, 10), 2, 0, (9 + 10.5) * 10 / (3 * 14 + 3.5 * 14)),
    ],
)
def test_rows_that_have_ended_are_not_charged_and_batches_are_full(tokens, size, reading_ms, expected):
    work = Workload([5] * len(tokens), 13)
    plain, drafted = workload_times(accepted(2, 3, tokens=tokens), work, Times(reading_ms=reading_ms), batch_size=size)
    assert sum(plain) / sum(drafted) == pytest.approx(expected)


def test_busy_rows_give_leviathans_formula():
    one = accepted(2, 3)
    speedup = steady_speedup(one, Times(), batch_size=4, context=9)
    assert speedup == pytest.approx(3 * 10 / (10 + 8))


def test_the_fastest_is_recommended_and_off_where_nothing_pays():
    cells = predicted(accepted(1, 1.5), accepted(2, 2), accepted(6, 3), batch_sizes=(1, 2, 16))
    assert len(cells) == 3 * 3
    advice = {one.cell.batch_size: one for one in recommend_cells(cells)}
    assert advice[1].cell.setting.name == "K 6" and not advice[1].is_off
    assert advice[2].cell.setting.name == "K 2"
    assert advice[16].is_off, "16 rows: 10 ms become 26 and more"
    assert advice[16].cell.predicted_speedup == pytest.approx(1.5 * 10 / 26, abs=1e-4)


def test_what_was_measured_decides_and_of_equals_the_one_that_drafts_least():
    cells = predicted(accepted(2, 3), accepted(6, 3), times=Times(free=99))
    assert recommend_cells(cells)[0].cell.setting.name == "K 2"
    cells = predicted(accepted(1, 1.5), accepted(2, 2), accepted(6, 3))
    assert [one.cell.setting.name for one in recommend_cells(measured(cells, 1.6, 1.4, None))] == ["K 1"], (
        "though K 6 is predicted"
    )
    assert recommend_cells(measured(cells, 0.9, 0.95, None))[0].is_off


def test_the_lower_end_of_the_interval_decides_where_it_holds():
    """K 1 is slower by its point, but surer; an interval over three prompts decides nothing."""
    cells = measured(predicted(accepted(1, 1.5), accepted(2, 2)), 1.4, 1.6)
    intervals = ([1.2, 1.6], [0.9, 2.8])
    few, enough = (
        [
            replace(cell, measured_ci95=ends, measured_low=ends[0], num_timed=num)
            for cell, ends in zip(cells, intervals, strict=True)
        ]
        for num in (3, 4)
    )
    [advice] = recommend_cells(enough)
    assert advice.cell.setting.name == "K 1" and advice.is_proved and not advice.is_off
    assert (advice.to_json()["proved"], advice.to_json()["measured_ci95"]) == (True, [1.2, 1.6])
    [advice] = recommend_cells(few)
    assert advice.cell.setting.name == "K 2" and not advice.is_proved
    [advice] = recommend_cells(enough[1:])
    assert advice.is_off and advice.is_proved, "1.6 times, but not shown to be above 1"


def test_few_prompts_are_not_ranked_by_how_far_they_spread(target):
    """Widened, the end of K 3 is the highest of all by a tenth, with the lowest speedup: of `auto` on a real model."""
    cells = predicted(accepted(3, 2.7), accepted(4, 3), accepted(5, 3.1))
    seen = [(2.30, (1.894, 2.78), 1.51), (2.50, (1.895, 3.31), 1.37), (2.57, (1.936, 3.40), 1.39)]
    cells = [
        replace(cell, measured_speedup=speedup, measured_ci95=ends, measured_low=low, num_timed=5)
        for cell, (speedup, ends, low) in zip(cells, seen, strict=True)
    ]
    [advice] = recommend_cells(cells)
    assert advice.cell.setting.name == "K 5" and not advice.is_off
    told = for_llamacpp(cells, untrained("eagle3", target))
    assert told and "--spec-draft-n-max 5 " in told, "as for the other engine"
    low = [replace(cell, measured_low=0.9) for cell in cells]
    assert recommend_cells(low)[0].is_off and for_llamacpp(low, untrained("eagle3", target)) is None


def test_the_best_of_several_has_to_hold_for_one_of_several():
    """As `headstart eval` has it: of settings that gain nothing, the best of four often seems to."""
    [cell] = predicted(accepted(1, 1.5))
    gains = [1.3, 1.0, 1.35, 1.15, 1.02, 1.2]
    seen = [Observation([i], 10, 15, gain, 1.0) for i, gain in enumerate(gains)]
    speedup, ends = ratio_and_interval(gains, [1.0] * 6)
    result: Any = SimpleNamespace(speedup=speedup, speedup_ci95=ends, num_timed=6, observations=seen)
    alone, of_four = (cell.measured(result, num_choices=num) for num in (1, 4))
    assert alone.measured_low == pytest.approx(ends[0], abs=1e-4) and alone.measured_low > 1 > of_four.measured_low
    assert alone.measured_ci95 == of_four.measured_ci95 == ends
    assert [recommend_cells([one])[0].is_off for one in (alone, of_four)] == [False, True]


def test_the_shortlist_has_the_most_promising_of_each_batch_size():
    settings = [accepted(length, 2 + length / 100) for length in range(1, 8)]
    cells = predicted(*settings, batch_sizes=(1, 16))
    found = shortlist(cells)
    assert [one.setting.name for one in found if one.batch_size == 1] == ["K 1", "K 2", "K 3"]
    assert len(shortlist(predicted(*settings, times=Times(free=99)))) == 4


def test_the_schedule_has_every_batch_size_once_and_turns_drafting_off():
    found = schedule_for_vllm([accepted(1, 1.5), accepted(6, 3)], Times(), batch_sizes=(1, 20), context=9)
    assert [pair[0] for pair in found] == [1, *(pair[1] + 1 for pair in found[:-1])] and found[-1][1] == 20
    assert [length for _, _, length in found] == [6, 1, 0]
    for low, high, length in found:
        for size in (low, high):
            gains = {0: 1.0, 1: 1.5 * 10 / (10 + size), 6: 3 * 10 / (10 + 6 * size)}
            assert gains[length] >= 0.99 * max(gains.values())
    near = [accepted(1, 2.0), accepted(2, 2.005)]
    assert len(schedule_for_vllm(near, Times(free=999), batch_sizes=(1, 64), context=9)) == 1, "for one percent"
    of_eight = schedule_for_vllm([accepted(1, 1.5), accepted(6, 3)], Times(), batch_sizes=(8, 20), context=9)
    assert of_eight == [(1, 20, 0)], "of fewer than eight nothing is known, whatever two points would extrapolate to"


def test_what_was_measured_stands_in_the_schedule():
    """Though predictions would have 6, 1 and then no drafts: at 1, 8 and 16 rows chains were measured."""
    settings = [accepted(1, 1.5), accepted(6, 3)]
    cells = predicted(*settings, batch_sizes=(1, 8, 16))
    fastest = {1: "K 1", 8: "K 6"}
    checked = measured(cells, *(1.4 if cell.setting.name == fastest.get(cell.batch_size) else 0.9 for cell in cells))
    lengths = measured_lengths(checked)
    assert lengths == {1: 1, 8: 6, 16: 0}
    found = schedule_for_vllm(settings, Times(), batch_sizes=(1, 20), context=9, measured=lengths)
    lengths = {size: length for low, high, length in found for size in range(low, high + 1)}
    assert [lengths[size] for size in (1, 8, 16)] == [1, 6, 0]
    assert {lengths[size] for size in range(2, 8)} <= {1, 6} and {lengths[size] for size in range(9, 16)} <= {6, 0}
    assert measured_lengths(cells) == {}


def test_sglang_is_told_the_best_chain_or_dynamic_tree_and_llama_cpp_the_best_chain(target):
    eagle3, medusa = (untrained(name, target) for name in ("eagle3", "medusa"))
    tree = accepted(3, 4, tree=DynamicTree(num_nodes=15, depth=3, top_k=4), name="dynamic:15")
    for free, wanted in (
        (99, "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"),
        (0, "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"),
    ):
        cells = predicted(accepted(2, 2), tree, times=Times(free=free), batch_sizes=(1, 2))
        flags = for_sglang(cells, eagle3)
        assert flags == f"--speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD {wanted}"
    assert for_sglang(cells, medusa) is None and for_llamacpp(cells, medusa) is None
    llama = "-md HEAD.gguf --spec-type draft-eagle3 --spec-draft-n-max 2 --spec-draft-p-min 0"
    assert for_llamacpp(cells, eagle3) == llama, "chains alone"
    useless = predicted(accepted(2, 1))
    assert for_sglang(useless, eagle3) is None and for_llamacpp(useless, eagle3) is None


def test_what_is_verified_by_confidence_can_be_recommended_and_is_told_to_no_engine(target):
    """Nothing is predicted of it, and engines have a fixed K."""
    [cell] = predicted(accepted(2, 2))
    cell = replace(cell, measured_speedup=1.5, measured_ci95=(1.4, 1.6), measured_low=1.4, num_timed=8)
    sure = replace(cell, setting=replace(cell.setting, verify_cost=0.1), predicted_speedup=None, measured_speedup=1.8)
    sure = replace(sure, measured_ci95=(1.7, 1.9), measured_low=1.7)
    [advice] = recommend_cells([cell, sure])
    assert advice.cell.title == "K 2 by confidence" and advice.to_json()["verify_cost"] == 0.1
    assert errors((cell, sure)).num_cells == 1
    assert measured_lengths([sure]) == {} and measured_lengths([cell]) == {1: 2}
    eagle3 = untrained("eagle3", target)
    assert for_llamacpp([sure], eagle3) is None and for_sglang([sure], eagle3) is None


def test_flags_of_a_measured_setting_are_not_lost_to_one_that_is_only_predicted(target):
    """Its lower end, 1.6, is below the other's predicted 1.8; its speedup is not."""
    eagle3 = untrained("eagle3", target)
    less, more = predicted(accepted(2, 2), accepted(3, 3))
    less = replace(less, predicted_speedup=1.8)
    held = {"measured_ci95": (1.7, 2.3), "measured_low": 1.6, "num_timed": 8}
    told = for_llamacpp([less, replace(more, measured_speedup=2.0, **held)], eagle3)
    assert told and "--spec-draft-n-max 3 " in told
    by_chance = replace(more, measured_speedup=1.2, measured_ci95=(1.01, 1.4), measured_low=0.9, num_timed=8)
    assert for_llamacpp([by_chance], eagle3) is None and for_sglang([by_chance], eagle3) is None


@pytest.mark.parametrize(
    ("family", "options", "sglang", "llamacpp"),
    [
        ("block", {}, "--speculative-algorithm DSPARK", "--spec-type draft-dspark"),
        ("block", {"markov_rank": 0, "sample_from_anchor": False}, "--speculative-algorithm DFLASH", "draft-dflash"),
        ("eagle3", {}, "--speculative-algorithm EAGLE3", "--spec-type draft-eagle3"),
        ("eagle3", {"parallel": True}, None, None),
        ("draft_lm", {"parallel": True}, None, None),
    ],
)
def test_flags_are_those_of_the_way_the_head_drafts_in(family, options, sglang, llamacpp, target):
    head = untrained(family, target, **options)
    cells = predicted(accepted(2, 2))
    for told, wanted in ((for_sglang(cells, head), sglang), (for_llamacpp(cells, head), llamacpp)):
        assert told is None if wanted is None else wanted in (told or "")


def test_what_texts_accept_does_not_depend_on_the_batch_size(target):
    """Rounds and tokens of each prompt, alone and three at a time."""
    prompts = [[1, 5, 9], [1, 7, 8, 3, 22], [1, 30], [1, 44, 3], [1, 13]]
    found = []
    for size in (1, 3):
        config = MeasureConfig(max_new_tokens=20, batch_size=size)
        drafter = NgramDrafter()
        found.append(accepted_by(target, drafter, prompts, chains(drafter, (2, 4)), config))
    assert found[0] == found[1]
    assert all(len(one.rounds) == 5 and sum(one.rounds) == one.counted.num_rounds for one in found[0])


def test_named_trees_have_their_size_and_wrong_names_are_refused(target):
    head = untrained("eagle3", target)
    trees = named_trees(["dynamic:3", "dynamic:6"], target, head)
    assert [(one.name, one.num_drafted) for one in trees] == [("dynamic:3", 3), ("dynamic:6", 6)]
    for wrong in ("dynamic", "dynamic:0", "dynamic:x", "chain:4", "bush:4"):
        with pytest.raises(BadInput, match=f"--tree {wrong}: expected dynamic:NODES"):
            named_trees([wrong], target, head)
