"""Settings that decoded the same prompts are compared prompt by prompt, and only these."""

import pytest
from headstart.eval.measurement.result import Observation, Result
from headstart.eval.report.pairs import beside_fastest, not_told_apart, pair_of, pair_words
from headstart.eval.report.recommendation import recommend
from results import made_result

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
    assert "0.75 [0.75, 0.75] of its speed, 0.50 [0.50, 0.50] of its tokens per forward" in pair_words(slow)


def test_settings_that_are_not_told_apart_are_named_where_one_is_recommended():
    assert not_told_apart(HEAD, [SLOW, HEAD, LIKE]) == [LIKE]
    [caution] = [each for each in recommend([SLOW, HEAD, LIKE]).cautions if "same prompts" in each]
    assert caution.replace(NBSP, " ").endswith("on the same prompts: like · chain · K 3.")


@pytest.mark.parametrize("change", [{"suite_digest": "1f"}, {"temperature": 0.7}, {"batch_size": 2}, {"suite": "code"},
                                    {"engine": "llama-server"}])  # fmt: skip
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
    assert recommend([one]).is_deployable
    many = recommend([one, *(result(f"slow{i}", twice) for i in range(39))])
    assert not many.is_deployable and "best of 40 results" in many.reasons[0]
    few = recommend([one, result("slow", twice)])
    assert few.is_deployable and any("best of 2 results: with that allowed for" in each for each in few.cautions)
