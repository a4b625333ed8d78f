"""What a server counts is read from any text that Prometheus writes."""

import pytest
from headstart.engines.servers.counters import Counters, samples, started_in

NUMBERS = 'a_total{x="1"} 2.0\nb 1e3 1700000000\nprocess_start_time_seconds 1.7e+09\n'


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "+", "none", "1.5.2"])
def test_a_value_that_is_no_number_is_left_out(value):
    found = samples(f'# HELP c of what\nc {value}\nd{{le="+Inf"}} {value}\n{NUMBERS}')
    assert found == [("a", {"x": "1"}, 2.0), ("b", {}, 1000.0), ("process_start_time_seconds", {}, 1.7e9)]
    assert started_in(found) == 1.7e9


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [(1.0, 1.0, Counters(3, 12, 6)), (None, None, Counters(3, 12, 6)), (1.0, 2.0, None)],
)
def test_counts_of_two_processes_have_no_difference(before, after, difference):
    """As behind a load balancer, which may give each read to another one."""
    assert Counters(5, 20, 10, started=after) - Counters(2, 8, 4, started=before) == difference
