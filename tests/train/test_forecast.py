"""What more steps would give is forecast from the first validations of a training, with an interval that means it."""

import math

import pytest
import torch
from headstart.train.trend import PRIOR, ROUNDS, Validated, forecast


def at(step, *, limit, slope, num_rounds=ROUNDS):
    return Validated(step, math.exp(limit - slope / math.sqrt(step)), num_rounds)


def test_a_curve_of_many_validations_is_continued():
    curve = [at(step, limit=0.6, slope=4.2, num_rounds=10**9) for step in range(20, 400, 20)]
    expected, then = forecast(curve, 440), at(440, limit=0.6, slope=4.2).acceptance_length
    assert expected.low < then < expected.high and expected.acceptance_length == pytest.approx(then, abs=0.01)


@pytest.mark.parametrize("seen", [(50,), (10, 50), (25, 50, 75, 100)])
def test_its_interval_has_four_in_five_of_the_ends(seen):
    generator = torch.Generator().manual_seed(len(seen))
    mean, covariance = PRIOR.over([Validated(step, 1.0, ROUNDS) for step in (*seen, 200)])
    factor, within = torch.linalg.cholesky(covariance - 8.99), 0  # a limit that is nearly the same in all
    for _ in range(600):
        logs = mean + factor @ torch.randn(len(mean), generator=generator, dtype=torch.double)
        curve = [Validated(step, math.exp(log), ROUNDS) for step, log in zip([*seen, 200], logs.tolist(), strict=True)]
        expected = forecast(curve[:-1], 200)
        within += expected.low <= curve[-1].acceptance_length <= expected.high
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
    assert 1 <= expected.low < expected.acceptance_length < expected.high
