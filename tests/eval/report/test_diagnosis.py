"""Causes that show against what a head says of its own training, and that stay unsaid without it."""

import pytest
from headstart.eval.report import diagnosis
from headstart.eval.report.diagnosis import diagnose
from headstart.eval.report.findings import accepted_share, at_depth, below_validation, merged

GOOD, BAD = [0.9, 0.8, 0.8], [0.6, 0.5, 0.4]


def part(rates, rounds=1000):
    return at_depth({"num_rounds": rounds, "acceptance_rate": list(rates)}, len(rates))


TRAINED = {
    "max_length": 256,
    "num_depths": 3,
    "template_hash": "aa",
    "prompt_ending": {"token_ids": [4], "text": "<|assistant|>"},
    "target_dtype": "float32",
    "target_quantization": None,
    "answers": [{"temperature": 0.7, "top_p": 1.0, "top_k": 0, "thinking": True}],
    "validation": {**part(GOOD), "decoded": part(GOOD, 300)},
}


def entry(rates=BAD, *, contexts=None, trained=(), **changes):
    """A greedy chain's result, in the form of training."""
    whole = part(rates)
    settings = {"drafter": "eagle3", "suite": "chat", "tree": "chain", "num_draft_tokens": len(rates), "batch_size": 1}
    settings |= {"temperature": 0.0, "accept": "exact", "num_prompts": 20, "num_committed": 1, "by_segment": {}}
    settings |= {"timing": {"draft_ms": None}, "teacher_forced_acceptance_length": None, "draft_vocabulary": None}
    settings |= {"template_hash": "aa", "asked_as_trained": 1.0, "target": {"dtype": "float32", "quantization": None}}
    return {
        **settings,
        **whole,
        "by_context": contexts or {"0-127": whole},
        "trained": {**TRAINED, **dict(trained)},
        **changes,
    }


def named(one):
    return [found.cause.split(":")[0] for found in diagnose(one, [one])]


@pytest.mark.parametrize(
    ("planted", "cause", "figures"),
    [
        ({"asked_as_trained": 0.1}, "Template", ["10%", "'<|assistant|>'", "2.02 tokens", "3.20"]),
        ({"template_hash": "bb"}, "Template", ["(bb)", "(aa)"]),
        ({"thinking": False}, "Template", ["thinking is off here, it was not so"]),
        ({"temperature": 1.0}, "Sampling", ["temperature 1", "3.20"]),
        ({}, "Domain", ["2.02 tokens per forward here, 3.20"]),
        (
            {"contexts": {"257-511": part(BAD)}},
            "Contexts beyond the training length",
            ["at most 256", "2.02 tokens per forward here, 3.20"],
        ),
    ],
)
def test_what_differs_from_training_is_named_alone(planted, cause, figures):
    one = entry(**planted)
    assert named(one) == [cause]
    [found] = diagnose(one, [one])
    assert all(figure in found.words for figure in figures), found.words
    assert named({**entry(GOOD, **planted), "by_context": {"0-127": part(GOOD)}}) == [], "it costs nothing: no finding"


def test_another_precision_is_named_with_what_else_it_may_be():
    assert named(entry(target={"dtype": "bfloat16", "quantization": None})) == ["Domain", "Target"]
    assert named(entry(GOOD, target={"dtype": "bfloat16", "quantization": None})) == []
    [_, found] = diagnose(entry(target={"dtype": "float32", "quantization": "gptq"}), [])
    assert found.words.startswith("quantization gptq, in training none")


def test_long_contexts_do_not_pass_for_another_domain():
    mixed = entry([0.7, 0.6, 0.6], contexts={"0-127": part(GOOD), "257-511": part(BAD)})
    other = {**entry(GOOD), "suite": "short"}
    assert [found.cause for found in diagnose(mixed, [mixed, other])] == ["Contexts beyond the training length"]


def test_without_a_validation_only_what_is_certain_is_named():
    unknown = {"validation": None}
    assert named(entry(trained=unknown)) == ["Low acceptance, cause not in these figures"]
    assert named(entry(trained=unknown, template_hash="bb")) == ["Template"]
    assert named(entry(GOOD, trained=unknown, template_hash="bb")) == []
    assert diagnosis.wrong_template(entry(trained={}, template_hash="bb") | {"trained": None}, []) is None


@pytest.mark.parametrize("other", [{"suite": "code"}, {"batch_size": 4}])
def test_chance_and_unlike_numbers_of_drafts_are_no_cause(other):
    few = entry(BAD, contexts={"0-127": part(BAD, 5)}, **other) | part(BAD, 5)
    assert "Domain" not in named(few)
    longer = entry([*GOOD, 0.1, 0.1, 0.1], **other)
    assert below_validation(longer) is None, "held against the validation over the three drafts that both have"
    assert accepted_share(longer) == pytest.approx((part(GOOD)["acceptance_length"] - 1) / 3)


def test_of_what_validation_taught_and_decoded_the_lower_counts():
    validation = {**part(GOOD), "decoded": part(BAD, 300)}
    assert named(entry([0.65, 0.5, 0.4], trained={"validation": validation})) == [
        "Low acceptance, cause not in these figures"
    ]


def test_parts_of_a_result_add_up():
    both = merged([part([0.8, 0.5], 100), part([0.4, 0.5], 300)])
    assert both == {"num_rounds": 400, "acceptance_length": pytest.approx(1.75), "acceptance_rate": [0.5, 0.5]}
    assert merged([]) is None
