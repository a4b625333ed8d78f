"""A report.json of another version, with keys missing or of another type: read right, or refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from drafted import untrained
from headstart.base.errors import BadInput
from headstart.engines.export import read_folder
from headstart.engines.heads import save_head
from headstart.eval.decoding.draft_setting import chain
from headstart.eval.drafters.registry import build_drafter, training_record
from headstart.eval.figures.recorded_training import RecordedTraining
from headstart.eval.measurement.measure import measure
from headstart.eval.proof.config import MeasureConfig
from headstart.eval.report.comparison import headline, read_evaluation, standings, unlike
from headstart.eval.report.page import render
from headstart.eval.report.results.document import Report, build_report, read_report, write_report
from headstart.eval.suites.prompts import load_suite
from headstart.scripts.compare import show
from headstart.scripts.push_command import card, lossless_report
from headstart.targets.target import Target
from json_places import GONE, changed, places_in

pytest.importorskip("hypothesis", reason="the dev extra has it")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few = settings(
    max_examples=20,
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
VALUES = [GONE, None, True, 0, -1, 2, 0.5, 10**30, float("nan"), float("inf"), "", "x", [], {}, [None], [1.0, 2.0, 3.0]]
mutations = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, len(VALUES) - 1)), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def measured(saved_target, tmp_path_factory) -> Path:
    """A head, and in `eval` what was measured of it."""
    folder = tmp_path_factory.mktemp("measured")
    target = Target.load(saved_target)
    head = save_head(untrained("medusa", target, num_depths=2), folder / "head", training={"max_length": 64})
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w1 w{5 + i} w9"}) + "\n" for i in range(4)))
    config = MeasureConfig(setting=chain(2), max_new_tokens=6, num_repeats=1)
    suite = load_suite(folder / "prompts.jsonl", target, max_new_tokens=6)
    name, drafter = build_drafter(f"head:{head}", target)
    record = training_record(f"head:{head}")
    training = RecordedTraining.from_json(record) if record else None
    entry, rounds = measure(target, drafter, suite, config, name=name, training=training)
    write_report(folder / "eval", build_report(target, [entry]), rounds)
    return folder


def read_by_all(measured: Path, document: Any, scratch: Path) -> None:
    """`compare` with what was measured, the page, `push --report`: each takes it, or says in a line what is wrong."""
    (scratch / "other").mkdir(parents=True, exist_ok=True)
    path = scratch / "other" / "report.json"
    path.write_text(json.dumps(document))
    head = read_folder(measured / "head")

    def compare() -> None:
        both = [read_evaluation(measured / "eval", "eval"), read_evaluation(path.parent, "other")]
        json.dumps([evaluation.summary() for evaluation in both])
        show([], both)
        assert headline(standings(both)) and unlike(both) is not None

    def push() -> None:
        report = lossless_report(path, head.record)
        assert "## Measured" in card(head, "me/mine", to="vllm", base_model="owner/target", report=report)

    for reader in (compare, push, lambda: render(read_report(path))):
        try:
            reader()
        except BadInput as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_the_report_itself_is_read_by_all(measured, tmp_path):
    document = json.loads((measured / "eval" / "report.json").read_text())
    shutil.copytree(measured / "eval", tmp_path / "same")
    report: Report = lossless_report(tmp_path / "same" / "report.json", read_folder(measured / "head").record)
    assert report.results[0].acceptance_length == document["results"][0]["acceptance_length"]
    read_by_all(measured, document, tmp_path)


@pytest.mark.parametrize("version", [0, 1, 2, "3", None, True, GONE, [3]])
def test_another_schema_version_is_named(version, measured, tmp_path):
    document = changed(json.loads((measured / "eval" / "report.json").read_text()), ("schema_version",), version)
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=r"report\.json: (schema_version .*, expected 3|no report .*'schema_version')"):
        read_report(tmp_path / "report.json")


@few
@given(wrong=mutations)
def test_a_report_with_other_keys_is_read_or_refused(wrong, measured, tmp_path_factory):
    document = json.loads((measured / "eval" / "report.json").read_text())
    for place, value in wrong:
        at = list(places_in(document, in_lists=True))
        document = changed(document, at[place % len(at)], VALUES[value])
    read_by_all(measured, document, tmp_path_factory.getbasetemp() / "read")
