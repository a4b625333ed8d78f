"""Figures by domain are those of the domain's own prompts, and the page shows them."""

import pytest
from headstart.eval.drafters.lookup import NgramDrafter
from headstart.eval.measurement.measure import MeasureConfig, measure
from headstart.eval.suites.prompts import PromptSource, Suite

PROMPTS = [[1, 5, 9, 5], [1, 7, 8, 7], [1, 30, 31, 30], [1, 40, 40]]


def suite(*domains):
    return Suite("four", PROMPTS, sources=[PromptSource(i, f"a:{i}", one) for i, one in enumerate(domains)])


def measured(target, prompts, **how):
    config = MeasureConfig(**{"num_draft_tokens": 3, "max_new_tokens": 24, "num_repeats": 1, **how})
    return measure(target, NgramDrafter(), prompts, config, name="ngram")[0]


def test_each_domain_has_the_figures_of_its_prompts_alone(target):
    parts = measured(target, suite("a", "b", "a", "b"))["by_domain"]
    assert list(parts) == ["a", "b"]
    for name, places in (("a", [0, 2]), ("b", [1, 3])):
        alone = measured(target, suite(*"abab").subset(places))
        kept = ("num_prompts", "num_rounds", "acceptance_length", "acceptance_rate")
        assert {key: parts[name][key] for key in kept} == {key: alone[key] for key in kept}
        low, high = parts[name]["speedup_ci95"]
        assert 0 < low <= parts[name]["speedup"] <= high
    assert sum(one["num_rounds"] for one in parts.values()) == measured(target, suite(*"abab"))["num_rounds"]


def test_a_single_prompt_has_no_speedup_and_rows_without_a_domain_are_told_apart(target):
    parts = measured(target, suite("a", None, None, None))["by_domain"]
    assert parts["a"]["speedup"] is None and parts["a"]["speedup_ci95"] == [None, None]
    assert parts["(none)"]["num_prompts"] == 3 and parts["(none)"]["speedup"] > 0
    assert measured(target, suite(None, None, None, None))["by_domain"] == {}


def test_of_batches_only_whole_ones_are_timed(target):
    apart = measured(target, suite(*"aabb"), batch_size=1)["by_domain"]
    mixed = measured(target, suite(*"abab"), batch_size=2)["by_domain"]
    assert [one["speedup"] for one in mixed.values()] == [None, None]
    assert sum(one["num_rounds"] for one in mixed.values()) == sum(one["num_rounds"] for one in apart.values())
    whole = measured(target, suite(*"aaaa"), batch_size=2)
    assert whole["by_domain"]["a"]["speedup"] == pytest.approx(whole["speedup"])
