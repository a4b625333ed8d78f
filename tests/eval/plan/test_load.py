"""The simulated server: batches fill and drain as the rules say, and drafts pay where they are cheap."""

from dataclasses import dataclass

import pytest
from headstart.eval.decoding.draft_setting import DraftSetting
from headstart.eval.measurement.metrics import Acceptance
from headstart.eval.measurement.step_times import StepTime
from headstart.eval.plan.engine_settings import schedule
from headstart.eval.plan.load import (
    ServedRequest,
    SimulatedServer,
    arrivals,
    load_curve,
    load_point,
    serve,
    simulated_servers,
)
from headstart.eval.plan.prediction import Accepted, Workload

ACCEPTED = Accepted(DraftSetting("K 2", 2), Acceptance(4, 12, [4, 4], [4, 4]), [[3, 3], [3, 3]])  # 7 tokens each
WORK = Workload([10, 10], 7)


@dataclass
class Times:
    """Prefill 100 ms, baseline step 10, and each drafted token and row `each` more."""

    each: float = 0.0

    def at(self, setting, *, batch_size, context):
        verify = 10 + (setting.num_drafted if setting else 0) * batch_size * self.each
        return StepTime(None, batch_size, context, 1, 0, 0.0, verify, 0.0, reading_ms=5.0, prefill_ms=100.0)


def server(times, *, drafts, size=2):
    return SimulatedServer(WORK, [7, 7], times, (lambda rows: ACCEPTED if drafts else None), size)


def test_one_request_alone():
    for drafts, first, finish in ((False, 0.1, 0.1 + 6 * 0.01), (True, 0.105, 0.105 + 2 * 0.01)):
        one = ServedRequest(0, 0.0)
        assert serve(server(Times(), drafts=drafts), [one]) == 1
        assert (one.first, one.finish) == pytest.approx((first, finish)) and one.tokens == 7


def test_a_request_that_comes_later_joins_and_delays_the_first_by_its_prompt():
    """The second arrives in the first one's third step, joins behind it, and both end in order."""
    first, second = ServedRequest(0, 0.0), ServedRequest(1, 0.125)
    rows = serve(server(Times(), drafts=False), [first, second])
    assert second.first == pytest.approx(0.13 + 0.1)
    assert first.finish == pytest.approx(0.1 + 0.1 + 6 * 0.01)
    assert second.finish == pytest.approx(0.23 + 6 * 0.01)
    assert rows == pytest.approx((3 * 1 + 3 * 2 + 3 * 1) / 9)


def test_a_full_batch_keeps_requests_waiting():
    requests = [ServedRequest(i % 2, 0.0) for i in range(3)]
    serve(server(Times(), drafts=False, size=1), requests)
    assert [one.first for one in requests] == pytest.approx([0.1, 0.26, 0.42])
    point = load_point(requests, 1.0, served="run", drafts="none", rate=1.0, share=1.0)
    assert point.tokens_per_second == pytest.approx(21 / 0.48, abs=0.01)
    assert point.ttft_ms_p50 == 260 and point.time_per_output_token_ms_p90 == 10


def test_arrivals_have_their_rate_and_are_alike_each_time():
    found = arrivals(50.0, 3, num_requests=256)
    assert len(found) == 256 and {one.prompt for one in found} == {0, 1, 2}
    assert found[-1].arrival == pytest.approx(256 / 50, rel=0.2)
    assert [one.arrival for one in arrivals(50.0, 3, num_requests=256)] == [one.arrival for one in found]


def test_cheap_drafts_pay_at_every_rate_and_dear_ones_by_schedule_only():
    for each, pays in ((0.0, True), (3.0, False)):
        times = Times(each)
        ranges = schedule([ACCEPTED], times, max_batch_size=32, context=10)
        servers = simulated_servers([ACCEPTED], WORK, times, fixed=ACCEPTED.setting, schedule=ranges, max_batch_size=32)
        curve = load_curve(servers, 2, served="simulated", num_requests=256)
        by_name = {(one.drafts, one.share_of_capacity): one for one in curve}
        assert len(by_name) == 3 * 5
        busiest = {name: by_name[name, 1.25].time_per_output_token_ms_p50 for name in ("none", "K 2", "schedule")}
        assert (busiest["K 2"] < busiest["none"]) == pays
        assert busiest["schedule"] <= busiest["none"] * 1.02
        if not pays:
            assert ranges[-1][2] == 0 and ranges[0][2] == 2
