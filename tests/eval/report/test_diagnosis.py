"""Causes that show against what a head says of its own training, and that stay unsaid without it."""

from dataclasses import replace

import pytest
from headstart.eval.figures.environment import TargetInfo
from headstart.eval.figures.metrics import AcceptancePart
from headstart.eval.figures.recorded_training import RecordedTraining, RecordedValidation
from headstart.eval.measurement.result import LikeTraining, RenderedChats, Result
from headstart.eval.report.causes.acceptance_causes import wrong_template
from headstart.eval.report.causes.diagnosis import diagnose
from headstart.eval.report.causes.findings import Case, accepted_share, at_depth, below_validation, merged
from results import TRAINED, made_result

OTHER = RenderedChats(template_hash="bb")  # than that of training
GOOD, BAD = [0.9, 0.8, 0.8], [0.6, 0.5, 0.4]


def part(rates, rounds=1000):
    return at_depth(AcceptancePart(rounds, None, list(rates)), len(rates))


def validation(rates, decoded):
    return RecordedValidation(**vars(part(rates)), decoded=part(decoded, 300))


def entry(rates=BAD, *, trained=(), **changes) -> Result:
    """A greedy chain's result, in the form of training."""
    figures = {"like_training": LikeTraining(None, 1.0), "by_context": {"0-127": part(rates)}, **vars(part(rates))}
    record = replace(RecordedTraining.from_json(TRAINED), **{"validation": validation(GOOD, GOOD), **dict(trained)})
    lengths = {"num_drafted": len(rates), "num_draft_tokens": len(rates)}
    return made_result(**{"trained": record, **lengths, **figures, **changes})


def findings(result, *peers, **target):
    """What is found, on a float32 target."""
    where = TargetInfo(name="t", fingerprint="0f", **{"dtype": "float32", **target})
    return diagnose(Case(result, [result, *peers], where))


def named(result, **target):
    return [finding.cause.split(":")[0] for finding in findings(result, **target)]


@pytest.mark.parametrize(
    ("planted", "cause", "figures"),
    [
        ({"like_training": LikeTraining(None, 0.1)}, "Template", ["10%", "'<|assistant|>'", "2.02 tokens", "3.20"]),
        ({"rendering": OTHER}, "Template", ["(bb)", "(aa)"]),
        (
            {"rendering": RenderedChats(None, {"enable_thinking": False}, "aa")},
            "Template",
            ["thinking is off here, and was on for the training answers"],
        ),
        ({"temperature": 1.0}, "Sampling", ["temperature 1", "3.20"]),
        ({}, "Domain", ["2.02 tokens per forward here, 3.20"]),
        (
            {"by_context": {"257-511": part(BAD)}},
            "Contexts beyond the training length",
            ["at most 256", "2.02 tokens per forward here, 3.20"],
        ),
    ],
)
def test_what_differs_from_training_is_named_alone(planted, cause, figures):
    one = entry(**planted)
    assert named(one) == [cause]
    [finding] = findings(one)
    assert all(figure in finding.figures for figure in figures), finding.figures
    harmless = entry(GOOD, **{**planted, "by_context": {"0-127": part(GOOD)}})
    assert named(harmless) == [], "it costs nothing: no finding"


def test_another_precision_is_named_with_what_else_it_may_be():
    assert named(entry(), dtype="bfloat16") == ["Domain", "Target"]
    assert named(entry(GOOD), dtype="bfloat16") == []
    [_, finding] = findings(entry(), quantization="gptq")
    assert finding.figures.startswith("quantization gptq, in training none")


def test_long_contexts_do_not_pass_for_another_domain():
    mixed = entry([0.7, 0.6, 0.6], by_context={"0-127": part(GOOD), "257-511": part(BAD)})
    other = entry(GOOD, suite="short")
    assert [finding.cause for finding in findings(mixed, other)] == ["Contexts beyond the training length"]


def test_without_a_validation_only_what_is_certain_is_named():
    unknown = {"validation": None}
    assert named(entry(trained=unknown)) == ["Low acceptance, cause not in these figures"]
    assert named(entry(trained=unknown, rendering=OTHER)) == ["Template"]
    assert named(entry(GOOD, trained=unknown, rendering=OTHER)) == []
    assert wrong_template(Case(replace(entry(rendering=OTHER), trained=None))) is None


@pytest.mark.parametrize("other", [{"suite": "code"}, {"batch_size": 4}])
def test_chance_and_unlike_numbers_of_drafts_are_no_cause(other):
    few = entry(BAD, by_context={"0-127": part(BAD, 5)}, num_rounds=5, **other)
    assert "Domain" not in named(few)
    longer = Case(entry([*GOOD, 0.1, 0.1, 0.1], **other))
    assert below_validation(longer) is None, "compared with the validation over the three drafts that both have"
    assert accepted_share(longer) == pytest.approx(((part(GOOD).acceptance_length or 0) - 1) / 3)


def test_of_what_validation_taught_and_decoded_the_lower_counts():
    assert named(entry([0.65, 0.5, 0.4], trained={"validation": validation(GOOD, BAD)})) == [
        "Low acceptance, cause not in these figures"
    ]


def test_parts_of_a_result_add_up():
    both = merged([part([0.8, 0.5], 100), part([0.4, 0.5], 300)])
    assert both is not None and both.acceptance_length == pytest.approx(1.75)
    assert (both.num_rounds, both.acceptance_rate) == (400, [0.5, 0.5])
    assert merged([]) is None


def test_rows_that_stop_are_not_held_against_whole_drafts():
    """Few tokens per forward are what they stop for."""
    assert named(entry(like_training=LikeTraining(None, 0.1))) == ["Template"]
    assert named(entry(like_training=LikeTraining(None, 0.1), verify_cost=0.1)) == []
