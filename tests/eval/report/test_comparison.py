"""Evaluations side by side, and settings prompt by prompt: a winner only where intervals are apart, and a warning
wherever more than heads differs."""

import json

import pytest
from headstart.base.errors import BadInput
from headstart.eval.figures.bandwidth import Bandwidth
from headstart.eval.figures.environment import Environment, TargetInfo
from headstart.eval.measurement.result import Observation, RenderedChats, Result, StepMedians, Timing
from headstart.eval.proof.lossless import LosslessReport
from headstart.eval.report.comparison import NamedReport, headline, read_evaluation, standings, unlike
from headstart.eval.report.page import where_table
from headstart.eval.report.recommendation import recommend
from headstart.eval.report.results.document import Report
from headstart.eval.report.results.pairs import beside_fastest, not_told_apart, pair_of
from results import made_result


def entry(speedup=1.5, low=1.4, high=1.6, **changes) -> Result:
    """A result with what the comparison and its page read."""
    figures = {
        "num_rounds": 1000, "acceptance_length": 2.72, "acceptance_rate": [0.8, 0.7, 0.65], "tokens_per_second": 150.0,
        "baseline_tokens_per_second": 100.0, "speedup": speedup, "speedup_ci95": (low, high),
        "timing": Timing(1.0, 12.0, 0.5, 10.0, 2.0),
        "baseline_bandwidth": Bandwidth(7.0, 0.7), "lossless": LosslessReport(20, 20),
    }  # fmt: skip
    return made_result(**{**figures, **changes})


def evaluation(name, *results, device="a machine", dtype="float32"):
    environment = Environment(headstart="0.1.0", torch="2.13", device=device, copy_gigabytes_per_second=9.5)
    return NamedReport(
        name, Report(environment, TargetInfo(name="org/model", fingerprint="0f", dtype=dtype), [*results])
    )


def test_who_is_ahead_is_said_and_only_intervals_apart_prove_it():
    slow, fast = evaluation("a", entry()), evaluation("b", entry(2.0, 1.8, 2.2), entry(1.2, 1.1, 1.3, tree="dynamic"))
    [found] = standings([slow, fast])
    assert found.winner == "b" and found.words.endswith("the intervals do not overlap")
    assert headline([found]) == "b is the fastest on all that several evaluations measured"
    near = standings([slow, evaluation("b", entry(1.6, 1.5, 1.7))])
    assert near[0].winner is None and near[0].words.endswith("the intervals overlap")
    assert headline(near) == "Not shown to differ: on no traffic is one proved to be ahead"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"suite_digest": "other"}, "are over different prompts"),
        ({"step_medians": StepMedians(1.0, 1.0, 10.0, 9.0)}, "are of a figure that cannot be true"),
    ],
)
def test_other_prompts_and_impossible_figures_name_no_winner(change, why):
    [found] = standings([evaluation("a", entry()), evaluation("b", entry(2.0, 1.8, 2.2, **change))])
    assert found.winner is None and found.words.endswith(why)


def test_a_winner_on_one_suite_is_none_overall():
    first = evaluation("a", entry(2.0, 1.9, 2.1), entry(suite="code"))
    second = evaluation("b", entry(), entry(2.0, 1.9, 2.1, suite="code"))
    line = headline(standings([first, second]))
    assert line.startswith("No single winner: a on chat") and "b on code" in line


def test_what_is_not_lossless_or_not_measured_does_not_win():
    broken = entry(9.0, 8.0, 10.0, lossless=LosslessReport(20, 19, 0, 1))
    [found] = standings([evaluation("a", broken), evaluation("b", entry(0.9, 0.8, 0.99))])
    assert found.winner is None and "only b" in found.words and "not shown to be faster than no drafts" in found.words
    assert headline([found]) == "Nothing here was measured in more than one evaluation"


@pytest.mark.parametrize(
    ("other", "warning"),
    [
        (evaluation("b", entry(), device="another"), "device: a a machine; b another"),
        (evaluation("b", entry(), dtype="bfloat16"), "target dtype: a float32; b bfloat16"),
        (evaluation("b", entry(suite="code")), "suite chat: not measured in b"),
        (evaluation("b", entry(num_prompts=99)), "num prompts on chat: a 20; b 99"),
        (evaluation("b", entry(rendering=RenderedChats(template_hash="ff"))), "template hash on chat: a aa; b ff"),
        (evaluation("b", entry(baseline_tokens_per_second=60.0)), "in tokens per second: a 100.0; b 60.0"),
        (evaluation("b", entry(num_prompts=3)), "were timed in b"),
    ],
)
def test_what_differs_besides_the_heads_is_said(other, warning):
    assert any(warning in line for line in unlike([evaluation("a", entry()), other]))
    assert unlike([evaluation("a", entry()), evaluation("b", entry(2.0, 1.8, 2.2))]) == []


def test_reports_are_read_and_others_refused(tmp_path):
    one = evaluation("a", entry())
    (tmp_path / "report.json").write_text(json.dumps(one.report.to_json()))
    read = read_evaluation(tmp_path, "a")
    assert read == one and read.summary()["results"][0]["speedup_ci95"] == [1.4, 1.6]
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(BadInput, match="no report of headstart eval"):
        read_evaluation(tmp_path, "a")
    (tmp_path / "report.json").write_text('{"schema_version": 3, "served": []}')
    with pytest.raises(BadInput, match="report.json: a report of a server; to compare heads there, name them"):
        read_evaluation(tmp_path, "a")


BASE = [1.0, 4.0, 2.0, 0.5, 1.5, 3.0]  # seconds of the prompts without drafts
NBSP = "\xa0"


def seen(seconds, *, rounds=10, committed=25, base=BASE) -> list[Observation]:
    return [
        Observation([i], rounds, committed, *each) for i, each in enumerate(zip(base, seconds, strict=True))
    ]  # rounds and committed tokens are the same for each prompt


def result(drafter, observations, **changes) -> Result:
    below = sum(one.seconds for one in observations)
    speedup = sum(one.baseline_seconds for one in observations) / below if below else None
    ends = (speedup - 0.05, speedup + 0.05) if speedup else (None, None)
    figures = {"observations": observations, "num_timed": len(observations), "speedup": speedup, "speedup_ci95": ends}
    return made_result(**{"drafter": drafter, "num_prompts": 6, **figures, **changes})


HEAD = result("head", seen([base / 2 for base in BASE]))
LIKE = result("like", seen([base / (2.02 - 0.1 * (i % 2)) for i, base in enumerate(BASE)], committed=30))
SLOW = result("slow", seen([base / 1.5 for base in BASE], rounds=20))


def test_speed_and_length_are_over_the_fastest_ones():
    [like, slow] = beside_fastest([SLOW, HEAD, LIKE])[::-1]
    assert (slow.setting.drafter, slow.other.drafter, like.setting.drafter) == ("slow", "head", "like")
    assert slow.speed == pytest.approx(0.75) and slow.speed_ci95 == (pytest.approx(0.75),) * 2
    assert (slow.length, like.length) == (pytest.approx(0.5), pytest.approx(1.2))


def test_settings_that_are_not_told_apart_are_named_where_one_is_recommended():
    assert not_told_apart(HEAD, [SLOW, HEAD, LIKE]) == [LIKE]
    [caution] = [each for each in recommend([SLOW, HEAD, LIKE]).cautions if "same prompts" in each]
    assert caution.replace(NBSP, " ").endswith("on the same prompts: like, 3 drafts.")


@pytest.mark.parametrize("change", [{"suite_digest": "1f"}, {"temperature": 0.7}, {"batch_size": 2}, {"suite": "code"}])
def test_other_traffic_is_not_paired(change):
    other = result("other", seen(BASE), **change)
    assert beside_fastest([HEAD, other]) == [] and not_told_apart(HEAD, [other]) == []


def test_only_prompts_that_both_have_are_paired():
    part = result("part", [*seen(BASE)[:2], Observation([9], 1, 1, 1.0, 100.0)])
    pair = pair_of(part, HEAD)
    assert pair is not None and pair.speed == pytest.approx(0.5)
    assert pair_of(result("one", seen(BASE)[:1]), HEAD) is None
    assert beside_fastest([HEAD, result("of an older report", [], speedup=1.0, speedup_ci95=(0.9, 1.1))]) == []


def test_the_best_of_many_has_to_hold_for_one_of_many():
    """Six prompts: above 1 by its own interval, [1.11, 1.46], and as the best of two, not as the best of forty."""
    drawn = seen([base / gain for base, gain in zip(BASE, [1.3, 1.2, 1.35, 1.15, 1.2, 1.4], strict=True)])
    one, twice = result("one", drawn, speedup_ci95=(1.05, 1.35)), seen([2 * base for base in BASE])
    assert recommend([one]).is_good
    many = recommend([one, *(result(f"slow{i}", twice) for i in range(39))])
    assert not many.is_good and "best of 40 results" in many.reasons[0]
    table = where_table([one, *(result(f"slow{i}", twice, suite="code") for i in range(39))])
    assert table is not None and [row[1] for row in table.rows] == ["no drafts"] * 2, "as the headline says"
    few = recommend([one, result("slow", twice)])
    assert few.is_good and any("best of 2 results: with that allowed for" in each for each in few.cautions)
