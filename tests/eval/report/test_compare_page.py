"""Evaluations side by side: a winner only where intervals are apart, and a warning wherever more than heads differs."""

import json
import re
from xml.etree import ElementTree

import pytest
from headstart.configs.errors import BadInput
from headstart.eval.measurement.environment import Environment, TargetInfo
from headstart.eval.measurement.lossless import LosslessReport
from headstart.eval.measurement.metrics import Conventions
from headstart.eval.measurement.result import Bandwidth, Result, Timing
from headstart.eval.report.charts import Series, line_chart, thinned
from headstart.eval.report.comparison import NamedReport, headline, read_evaluation, standings, unlike
from headstart.eval.report.comparison_page import TrainingRun, render, render_curves
from headstart.eval.report.document import Report
from results import made_result


def entry(speedup=1.5, low=1.4, high=1.6, **changes) -> Result:
    """A result with what the comparison and its page read."""
    figures = {
        "num_rounds": 1000, "acceptance_length": 2.72, "acceptance_rate": [0.8, 0.7, 0.65], "tokens_per_second": 150.0,
        "baseline_tokens_per_second": 100.0, "speedup": speedup, "speedup_ci95": (low, high), "speedup_p10": 1.3,
        "speedup_median": 1.5, "speedup_p90": 1.7, "end_to_end_speedup": 1.4, "ttft_ms": 12.0, "baseline_ttft_ms": 9.0,
        "conventions": Conventions(2.7, [0.8], 2.7, [0.8]), "timing": Timing(1.0, 12.0, 0.5, 10.0, 2.0),
        "baseline_bandwidth": Bandwidth(7.0, 0.7), "lossless": LosslessReport(20, 20),
    }  # fmt: skip
    return made_result(**{**figures, **changes})


def evaluation(name, *results, device="a machine", dtype="float32"):
    environment = Environment(headstart="0.1.0", torch="2.13", device=device, copy_gigabytes_per_second=9.5)
    return NamedReport(
        name, Report(environment, TargetInfo(name="org/model", fingerprint="0f", dtype=dtype), [*results])
    )


def test_who_is_ahead_is_said_and_only_intervals_apart_prove_it():
    slow, fast = evaluation("a", entry()), evaluation("b", entry(2.0, 1.8, 2.2), entry(1.2, 1.1, 1.3, tree="static"))
    [found] = standings([slow, fast])
    assert found.winner == "b" and found.words.endswith("the intervals do not overlap")
    assert headline([found]) == "b is the fastest on all that several evaluations measured"
    near = standings([slow, evaluation("b", entry(1.6, 1.5, 1.7))])
    assert near[0].winner is None and near[0].words.endswith("the intervals overlap")
    assert headline(near) == "Not shown to differ: everywhere the intervals overlap"


def test_a_winner_on_one_suite_is_none_overall():
    first = evaluation("a", entry(2.0, 1.9, 2.1), entry(suite="code"))
    second = evaluation("b", entry(), entry(2.0, 1.9, 2.1, suite="code"))
    line = headline(standings([first, second]))
    assert line.startswith("No single winner: a on chat") and "b on code" in line


def test_what_is_not_lossless_or_not_measured_does_not_win():
    broken = entry(9.0, 8.0, 10.0, lossless=LosslessReport(20, 19, 0, 1))
    [found] = standings([evaluation("a", broken), evaluation("b", entry(0.9, 0.8, 0.99))])
    assert found.winner is None and "only b" in found.words and "not shown to be faster than no drafts" in found.words
    assert headline([found]) == "Nothing here was measured in more than one evaluation"


@pytest.mark.parametrize(
    ("other", "warning"),
    [
        (evaluation("b", entry(), device="another"), "device: a a machine; b another"),
        (evaluation("b", entry(), dtype="bfloat16"), "target dtype: a float32; b bfloat16"),
        (evaluation("b", entry(suite="code")), "suite chat: not measured in b"),
        (evaluation("b", entry(num_prompts=99)), "num prompts on chat: a 20; b 99"),
        (evaluation("b", entry(template_hash="ff")), "template hash on chat: a aa; b ff"),
        (evaluation("b", entry(baseline_tokens_per_second=60.0)), "in tokens per second: a 100.0; b 60.0"),
        (evaluation("b", entry(num_prompts=3)), "were timed in b"),
    ],
)
def test_what_differs_besides_the_heads_is_said(other, warning):
    assert any(warning in line for line in unlike([evaluation("a", entry()), other]))


def test_like_evaluations_have_no_warning():
    assert unlike([evaluation("a", entry()), evaluation("b", entry(2.0, 1.8, 2.2))]) == []


def test_the_page_has_both_and_fetches_nothing():
    bad = "<script>x</script>"
    losses = [(i, 3.0 / i) for i in range(1, 500)]
    run = training_run(bad, {"train.seed": 1}, losses, [(200, 1.9), (400, 2.1)], [(400, 2.2)])
    other = training_run("other", {"train.seed": 2}, losses)
    page = render([evaluation(bad, entry()), evaluation("b", entry(2.0, 1.8, 2.2))], [run, other])
    assert "<script" not in page and "http" not in page and "url(" not in page and "&lt;script&gt;" in page
    for words in ("2.00 [1.80, 2.20]", "1.50 [1.40, 1.60]", "b is the fastest", "20/20", "2.10 at 400", "train.seed"):
        assert words in page.replace("\xa0", " ")
    opened = re.findall(r"<(section|table|figure|svg|ul|div)\b", page)
    assert all(opened.count(tag) == page.count(f"</{tag}>") for tag in set(opened))
    assert "validations, taught" in page and "validations, decoded" not in page, "one point is no curve"
    assert 'class="recommendation deploy"' in page and len(page) < 100_000


def training_run(name, settings=(), losses=((1, 3.0),), taught=(), decoded=()):
    return TrainingRun(
        name=name, folder=f"runs/{name}", finished=True, settings=dict(settings), tokens_per_second=1234.5,
        losses=losses, taught=taught, decoded=decoded, after_twice=(2.2, 2.1, 2.3) if taught else None,
    )  # fmt: skip


def test_runs_alone_are_a_page_too():
    page = render([], [training_run("a", taught=[(1, 2.1)]), training_run("b")])
    assert (
        "a reached the best validation, 2.10 tokens" in page
        and "2.20 [2.10, 2.30]" in page
        and "Settings that differ" not in page
    )


def test_curves_keep_their_last_value_and_few_points():
    lines = [Series("a", thinned([(i, 1.0) for i in range(1, 1001)], most=120)), Series("b", [])]
    chart = line_chart("t", lines, axis="step", with_dots=False)
    assert "a: 1.00 at 1000" in chart and "b: none" in chart
    assert len(thinned([(i, 0.0) for i in range(1000)], most=120)) <= 120
    assert thinned([(1, 2.0), (2, 4.0)], most=120) == [(1, 2.0), (2, 4.0)] and thinned([], most=120) == []


def test_the_curves_are_an_svg_file_of_their_own():
    runs = [training_run(name, losses=[(1, 3.0), (2, 2.0)], taught=[(2, 1.9)]) for name in ("<a>", "b")]
    root = ElementTree.fromstring(render_curves(runs))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "<a>: 2.00 at 2" in "".join(root.itertext())
    assert len(root.findall(".//{*}svg")) == 2 and "--c0:" in "".join(root.itertext())


def test_reports_are_read_and_others_refused(tmp_path):
    one = evaluation("a", entry())
    (tmp_path / "report.json").write_text(json.dumps(one.report.to_json()))
    read = read_evaluation(tmp_path, "a")
    assert read == one and read.summary()["results"][0]["speedup_ci95"] == [1.4, 1.6]
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(BadInput, match="no report of headstart eval"):
        read_evaluation(tmp_path, "a")
