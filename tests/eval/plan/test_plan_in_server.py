"""A plan by a server's rounds: what was not measured is forecast from what was, and what engines read of it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from headstart.base.errors import BadInput
from headstart.eval.plan.in_server import (
    ServedCell,
    checked,
    finalists,
    forecast,
    rates_in,
    steps_by_batch_size,
    steps_per_second,
)
from headstart.eval.plan.prediction import errors
from headstart.eval.served.figures import Percentiles, SideFigures
from headstart.eval.served.load import Load
from headstart.eval.served.served_result import ServedResult, ServerAcceptance
from headstart.eval.served.text_check import PromptCheck
from headstart.scripts.plan_command import plan

RATE = 0.8  # at every draft position


def side(tokens_per_second):
    return SideFigures(12, 0, 0, tokens_per_second, None, Percentiles(), Percentiles(), None, Percentiles(), 0.1)


def measured(num, size, *, has_rates=True):
    """K drafts in a server whose forward takes 10 ms, and 2 ms more per draft and 8 requests, with 0.8 accepted."""
    length = sum(RATE**k for k in range(num + 1))
    round_ms, step_ms = 10 + 2 * num * size / 8, 10
    speedup = length * step_ms / round_ms
    accepted = ServerAcceptance(length, [RATE] * num if has_rates else [], 100, 0)
    whole = ("vllm", f"head:H at K {num}", num, Load(size), 96, 0.0, 12, "ABBAABBA", True)
    sides = side(1000 * size / step_ms), side(1000 * size * length / round_ms)
    return ServedResult(*whole, speedup, (speedup - 0.1, speedup + 0.1), *sides, accepted, PromptCheck(), None)


@pytest.mark.parametrize("size", [1, 8, 32])
def test_what_was_not_measured_is_what_a_measurement_gives(size):
    """Rounds grow linearly with K here, and rates are known by position."""
    first = [measured(num, size) for num in (1, 2, 8)]
    assert rates_in(first) == [RATE] * 8
    for cell in forecast(first, range(1, 9)):
        truth = measured(cell.num_draft_tokens, size).speedup or 0.0
        assert cell.speedup == pytest.approx(truth, abs=2e-4), cell
        assert (cell.predicted_speedup is None) == (cell.num_draft_tokens in (1, 2, 8))


def test_without_rates_lengths_lie_between_the_measured_ones():
    first = [measured(num, 1, has_rates=False) for num in (1, 3)]
    lengths = [cell.acceptance_length for cell in forecast(first, [1, 2, 3])]
    assert lengths[1] == pytest.approx((lengths[0] + lengths[2]) / 2)


def test_the_best_forecast_is_measured_and_its_error_shown():
    first = [measured(num, size) for num in (1, 2, 8) for size in (1, 32)]
    cells = forecast(first, range(1, 9))
    assert finalists(cells) == {7: [1]}, "with 32 at a time, none comes near the best that was measured"
    truth = measured(7, 1)
    slower = ServedResult(**{**vars(truth), "speedup": (truth.speedup or 0.0) / 1.1})
    found = checked(cells, [slower])
    assert errors(found).num_cells == 1 and errors(found).max_error == pytest.approx(0.1, abs=1e-3)
    assert errors(cells).num_cells == 0


def test_sglang_reads_forwards_per_second_and_k_by_batch_size():
    cells = [
        ServedCell(2, 1, 2.0, 10, 20.0, measured_speedup=1.5),
        ServedCell(4, 1, 2.5, 10, 25.0, measured_speedup=0.9),
        ServedCell(2, 8, 2.0, 10, 40.0, measured_speedup=1.1),
        ServedCell(3, 8, 2.0, 10, 1.0, 1.2),
    ]
    table = steps_per_second(cells)
    assert table == {
        "sample_batch_tokens": [3, 5, 24],
        "sample_steps_per_sec": [50.0, 40.0, 25.0],
        "max_batch_tokens": 24,
    }
    first = [measured(num, size) for num in (1, 2, 8) for size in (1, 32)]
    assert steps_by_batch_size(first) == {"1": {"candidate_steps": [8]}, "32": {"candidate_steps": [0]}}


def test_of_several_k_one_is_told_only_if_its_gain_holds_for_the_best_of_so_many():
    """An interval from 1.02 on, by 4 pairs of blocks, lies above 1 alone, but not as the best of six."""
    alone = replace(measured(2, 8), speedup=1.1, speedup_ci95=(1.02, 1.18))
    worse = [replace(measured(num, 8), speedup=0.8, speedup_ci95=(0.7, 0.9)) for num in range(3, 8)]
    assert steps_by_batch_size([alone]) == {"1": {"candidate_steps": [2]}}
    assert steps_by_batch_size([alone, *worse]) == {"1": {"candidate_steps": [0]}}


def test_a_plan_is_made_in_the_server(python, saved_target, tmp_path, capsys):
    rows = "".join(json.dumps({"input_ids": [1, 5 + i]}) + "\n" for i in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    how: dict[str, Any] = {"target": str(saved_target), "prompts": str(tmp_path / "rows.jsonl"), "max_new_tokens": 8}
    how |= {"engine": "vllm", "engine_python": python, "drafter": "ngram", "num_draft_tokens": [1, 2]}
    plan(**how, batch_size=[1, 2], output=tmp_path / "out")
    told = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(told["cells"]) == 4 and told["acceptance_rate"] and told["engine"] == "vllm"
    said = capsys.readouterr().out
    assert said.startswith("timed in vLLM's own server") and "vLLM with look-ups, 1 draft: 1 at a time:" in said
    assert "\nlook-ups: speedup as measured" in said
    assert "headstart plan: " in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "measured.jsonl").exists()
    with pytest.raises(BadInput, match="--engine: name 'tgi': expected headstart or vllm or sglang"):
        plan(**{**how, "engine": "tgi"}, output=tmp_path / "other")
