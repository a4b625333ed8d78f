"""What more steps would give is forecast from the first validations of a training, with an interval that means it."""

import math

import pytest
import torch
from headstart.train.trend import SLOPE, SLOPE_DEVIATION, SPREAD, SPREAD_ROUNDS, Validated, forecast


def at(step, *, limit, slope, num_rounds=SPREAD_ROUNDS, off=0.0):
    return Validated(step, 1 + math.exp(limit - slope / math.sqrt(step) + off), num_rounds)


def test_a_curve_without_deviations_is_continued():
    curve = [at(step, limit=0.6, slope=4.2, num_rounds=10**12) for step in (25, 50)]
    expected, then = forecast(curve, 400), at(400, limit=0.6, slope=4.2).acceptance_length
    assert expected.acceptance_length == pytest.approx(then, abs=1e-3)
    assert expected.low == pytest.approx(then, abs=1e-2) and expected.high == pytest.approx(then, abs=1e-2)


@pytest.mark.parametrize("seen", [(50,), (25, 50), (25, 50, 75, 100)])
def test_its_interval_has_four_in_five_of_the_ends(seen):
    generator = torch.Generator().manual_seed(len(seen))
    within = 0
    for _ in range(600):
        slope, *off = (torch.randn(2 + len(seen), generator=generator) * SPREAD).tolist()
        slope = SLOPE + slope / SPREAD * SLOPE_DEVIATION
        curve = [at(step, limit=0.5, slope=slope, off=part) for step, part in zip(seen, off, strict=False)]
        expected = forecast(curve, 200)
        within += expected.low <= at(200, limit=0.5, slope=slope, off=off[-1]).acceptance_length <= expected.high
    assert abs(within / 600 - 0.8) < 0.05


def test_more_validations_narrow_it_and_fewer_rounds_widen_it():
    def width(seen, num_rounds):
        part = forecast([at(step, limit=0.5, slope=3.0, num_rounds=num_rounds) for step in seen], 200)
        return part.high - part.low

    assert width((25, 50, 100), 2000) < width((25, 50), 2000) < width((25,), 2000)
    assert width((25, 50), 2000) < width((25, 50), 200)


def test_more_answers_add_to_it():
    curve = [at(50, limit=0.5, slope=3.0)]
    once, twice = forecast(curve, 200), forecast(curve, 200, answers=2)
    assert twice.acceptance_length > once.acceptance_length and twice.low > once.low


def test_a_head_that_accepts_nothing_has_a_forecast():
    expected = forecast([Validated(10, 1.0, 100)], 100)
    assert 1 < expected.low < expected.acceptance_length < expected.high < 1.1
