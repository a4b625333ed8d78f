"""A busy machine, uneven steps and impossible figures are noticed; what they disturb is measured again, and said."""

from dataclasses import replace

import pytest
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.decoding.loop import Generation, Round
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement import disturbance as noticing
from headstart.eval.measurement import passes
from headstart.eval.measurement.batches import MeasuredBatch, Side
from headstart.eval.measurement.disturbance import (
    IMPOSSIBLE,
    OTHERS,
    UNEVEN,
    ProcessorMeter,
    disturbance,
    is_uneven,
    passes_disturbed,
    step_medians,
)
from headstart.eval.measurement.measure import measure
from headstart.eval.measurement.passes import least_disturbed
from headstart.eval.measurement.result import Disturbance, StepMedians
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.suites.prompts import PromptSource, Suite


def generation(seconds, *, drafted, verify=None, committed=1):
    """A prefill and rounds that take so long."""
    prefill = Round(0.5, 0, [0], [1], [1])
    verify = 0.9 * seconds[-1] if verify is None else verify
    rounds = [Round(s, drafted, [committed - 1], [committed], [committed], 0.0, verify) for s in seconds]
    return Generation([[7] * (1 + committed * len(rounds))], [prefill, *rounds])


def sides(fast=None, plain=None, *, others=(None, None)):
    fast = fast or generation([0.012] * 20, drafted=3, committed=2)
    plain = plain or generation([0.010] * 40, drafted=0)
    return Side([fast], [others[0]]), Side([plain], [others[1]])


def batch(number=0, **changes):
    suite = Suite("one", [[number + 1, 2]], sources=[PromptSource(number, "a:1")])
    return MeasuredBatch(number, suite, *sides(**changes))


def test_other_processes_are_noticed_in_the_pass_they_were_in():
    assert passes_disturbed(*sides(others=(0.05, None))) == [(), ()]
    assert passes_disturbed(*sides(others=(0.02, 0.4))) == [(), (OTHERS,)]
    found = disturbance([batch(others=(0.0, 0.4)), batch(1, others=(None, None))])
    assert found == Disturbance(4, 1, 0, [OTHERS], 0.2)


def test_steps_far_from_their_median_are_noticed():
    stalled = generation([0.05, *[0.010] * 30, 0.09], drafted=0, verify=0.009)
    assert passes_disturbed(*sides(plain=stalled)) == [(), (UNEVEN,)]
    assert not is_uneven([1.0, *[0.01] * 30]), "the first step may read the prompt"
    assert not is_uneven([0.01 + 0.0002 * step for step in range(60)]), "steps slow down as the context grows"
    assert not is_uneven([0.01, 0.01, 0.3]), "a few steps have no median to speak of"


def test_a_verification_faster_than_a_step_is_noticed():
    fast = generation([0.012] * 20, drafted=3, verify=0.005)
    assert passes_disturbed(*sides(fast=fast)) == [(IMPOSSIBLE,), ()]
    assert step_medians([batch(fast=fast)]).is_impossible
    assert not step_medians([batch()]).is_impossible
    assert not StepMedians().is_impossible


def test_medians_are_not_moved_by_a_stall():
    """Rounds of 12 ms, steps of 10 ms; a stall of a second in one of them."""
    four = [batch(i) for i in range(4)]
    assert step_medians(four) == StepMedians(12.0, 10.8, 10.0, 9.0)
    stalled = generation([1.0, *[0.010] * 39], drafted=0)
    assert step_medians([batch(plain=stalled), *four[1:]]) == step_medians(four)
    assert step_medians([]) == StepMedians()


# Again


def attempts(*shares):
    """Calls that give batches whose passes saw so much of other processes."""
    left = iter(shares)
    return lambda: [*sides(others=next(left))][::-1]


def test_what_is_disturbed_is_measured_again_until_it_is_not():
    chosen, num_again = least_disturbed(attempts((0.5, 0.5), (0.0, 0.0)), most_again=2)
    assert num_again == 1 and chosen[0].others == [0.0]
    chosen, num_again = least_disturbed(attempts((0.01, 0.0)), most_again=2)
    assert num_again == 0 and chosen[1].others == [0.01]


def test_it_is_not_measured_again_for_ever_and_the_best_attempt_counts():
    chosen, num_again = least_disturbed(attempts((0.5, 0.5), (0.0, 0.4), (0.3, 0.3)), most_again=2)
    assert num_again == 2 and [side.others for side in chosen] == [[0.4], [0.0]]
    assert least_disturbed(attempts((0.5, 0.5)), most_again=0)[1] == 0


@pytest.mark.parametrize("again", [MemoryError("full"), [MemoryError("full"), *sides(others=(0.0, 0.0))[:1]]])
def test_a_whole_attempt_stays_where_one_behind_it_fails(again):
    first = [*sides(others=(0.5, 0.5))][::-1]
    left = iter([first, again])

    def once():
        attempt = next(left)
        if isinstance(attempt, Exception):
            raise attempt
        return attempt

    chosen, num_again = least_disturbed(once, most_again=1)
    assert chosen is first and num_again == 0


@pytest.mark.slow
def test_a_measurement_on_a_busy_machine_says_so(target, monkeypatch):
    """At most a fourth of eight batches is measured again; texts and acceptance are those of a quiet machine."""

    def measured():
        suite = Suite("many", [[1, 5 + i, 9] for i in range(8)])
        config = MeasureConfig(setting=chain(2), max_new_tokens=8, num_repeats=2)
        return measure(target, NgramDrafter(), suite, config, name="ngram")[0]

    monkeypatch.setattr(passes, "MOST_AGAIN", noticing.MOST_AGAIN)
    monkeypatch.setattr(noticing, "is_uneven", lambda seconds: False)
    quiet = measured()
    monkeypatch.setattr(passes.ProcessorMeter, "others", lambda self: 0.3)
    busy = measured()
    assert busy.disturbance == Disturbance(32, 32, 4, [OTHERS], 0.3)
    assert (quiet.acceptance_length, quiet.lossless) == (busy.acceptance_length, busy.lossless)
    assert replace(quiet, disturbance=busy.disturbance).to_json().keys() == busy.to_json().keys()


# The processor


def seconds_of(monkeypatch, *readings, wall=2.0):
    clock, values = iter((0.0, wall)), iter(readings)
    monkeypatch.setattr(noticing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(noticing, "processor_seconds", lambda: next(values))
    meter = ProcessorMeter()
    with meter:
        pass
    return meter.others()


def test_others_have_what_this_process_has_not(monkeypatch):
    """Two cores for two seconds: 3 of 4 in use, 2 by this process."""
    assert seconds_of(monkeypatch, (10.0, 50.0, 5.0), (13.0, 54.0, 7.0)) == 0.25


@pytest.mark.parametrize(
    ("readings", "wall"),
    [((None, None), 2.0), (((1.0, 2.0, 1.0), (2.0, 3.0, 1.0)), 0.1), (((1, 2, 1), (1, 2, 1)), 2.0)],
)
def test_where_the_share_cannot_be_known_it_is_unknown(readings, wall, monkeypatch):
    assert seconds_of(monkeypatch, *readings, wall=wall) is None


def test_the_system_is_read_where_it_tells(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    monkeypatch.setattr(noticing, "Path", lambda name: stat)
    assert noticing.processor_seconds() is None, "no Linux"
    stat.write_text("cpu  100 20 30 400 50 6 7 8 0 0\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(noticing.os, "sysconf", lambda name: 100)
    busy, whole, own = noticing.processor_seconds() or (0.0, 0.0, 0.0)
    assert (round(busy, 6), round(whole, 6)) == (1.71, 6.21) and own > 0
