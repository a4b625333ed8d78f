"""A result and its entry in report.json are the same, both ways."""

import json
from dataclasses import MISSING, fields

import pytest
from headstart.base.errors import BadInput
from headstart.eval.figures.metrics import AcceptancePart
from headstart.eval.measurement.result import (
    DomainPart,
    LikeTraining,
    RecordedTraining,
    Result,
    VocabularyCoverage,
)
from headstart.eval.proof.lossless import Divergence, LosslessReport
from headstart.eval.proof.sampling_check import SamplingCheck
from headstart.eval.suites.prompts import FailedPrompt
from results import TRAINED, made_result

RECORD = {
    **TRAINED,
    "of_a_later_version": {"kept": [1]},
    "steps": 10,
    "validation": {
        "num_draft_tokens": 3,
        "num_rounds": 9,
        "acceptance_length": 2.5,
        "acceptance_rate": [0.9, 0.5, None],
        "decoded": {
            "num_prompts": 2,
            "num_rounds": 3,
            "acceptance_length": 2.0,
            "acceptance_rate": [0.5, 0.5, None],
            "taught": {"num_rounds": 3, "acceptance_length": 2.0, "acceptance_rate": [0.5, 0.5, None]},
        },
    },
}
PART = AcceptancePart(4, 2.5, [0.75, None])


FULL = made_result(
    draft_vocabulary=VocabularyCoverage(8, 0.5),
    failed=[FailedPrompt(3, "chat.jsonl:4", "too long")],
    acceptance_rate=[0.75, None],
    speedup=1.5,
    speedup_ci95=(1.25, 1.75),
    by_segment={"answer": PART},
    by_context={"0-127": PART},
    by_domain={"code": DomainPart(2, 4, 2.5, [0.75, None], None, (None, None))},
    lossless=LosslessReport(2, 1, 0, 1, [Divergence(0, None, None)]),
    sampling_check=SamplingCheck(40, 0.5),
    trained=RecordedTraining.from_json(RECORD),
    like_training=LikeTraining(0.5, None),
)


@pytest.mark.parametrize(
    "whole",
    [
        made_result(),
        FULL,
    ],
)
def test_round_trip(whole):
    entry = whole.to_json()
    assert Result.from_json(json.loads(json.dumps(entry))) == whole
    assert json.loads(json.dumps(entry)) == entry, "nothing in it but what JSON has"


def test_a_head_is_told_apart_by_its_whole_record():
    assert FULL.to_json()["trained"] == RECORD
    assert FULL.trained is not None and FULL.trained.validation is not None and FULL.trained.prompt_ending is not None
    assert FULL.trained.prompt_ending.token_ids == [4] and FULL.trained.max_length == 256
    assert FULL.trained.validation.decoded == AcceptancePart(3, 2.0, [0.5, 0.5, None])
    assert RecordedTraining.from_json({"max_length": 8}).validation is None


def test_keys_of_later_versions_are_left_out():
    assert Result.from_json(made_result().to_json() | {"new_key": 1}) == made_result()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speedup": "fast"}, "results.0.speedup: "),
        ({"num_rounds": 1.5}, "results.0.num_rounds: "),
        ({"timing": {"draft_ms": [1]}}, "results.0.timing.draft_ms: "),
        ({"lossless": {"divergences": [{"prompt": 1}]}}, "results.0.lossless.divergences.0.position: is missing"),
        ({"trained": {"max_length": "long"}}, "results.0.trained.max_length: "),
    ],
)
def test_what_is_wrong_is_named(changes, named):
    with pytest.raises(BadInput, match=named):
        Result.from_json(made_result().to_json() | changes, where="results.0")


def test_keys_with_a_default_may_be_missing_as_in_older_reports():
    keys = {key.name: key for key in fields(Result)}
    required = {name for name, key in keys.items() if key.default is MISSING and key.default_factory is MISSING}
    entry = made_result().to_json()
    assert Result.from_json({key: entry[key] for key in {*required, "rendering"}}) == made_result()


@pytest.mark.parametrize("key", ["suite_digest", "failed"])
def test_a_missing_key_is_named(key):
    entry = made_result().to_json()
    del entry[key]
    with pytest.raises(BadInput, match=f"report.{key}: is missing"):
        Result.from_json(entry, where="report")
    with pytest.raises(BadInput, match="report: expected an object, got"):
        Result.from_json(None, where="report")  # type: ignore[arg-type]
