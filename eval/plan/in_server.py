"""A plan by the rounds of the server that serves: what it accepts, by draft position, and how long its rounds take at
each load forecast the K that were not measured; the most promising of these are measured, and the error shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ...base.files import write_json
from ..measurement.step_times import interpolate
from ..report.results.one_result import grouped
from ..report.served_page import measured_schedule
from ..served.served_result import ServedResult
from .planner import SCHEMA_VERSION
from .prediction import errors, expected_length


@dataclass(frozen=True)
class ServedCell:
    """K at so many requests at a time, as measured in the server or forecast from what was measured of other K."""

    num_draft_tokens: int
    concurrency: int
    acceptance_length: float
    step_ms: float  # from a forward without drafts, of all requests, to the next one
    round_ms: float  # the same with drafts
    predicted_speedup: float | None = None  # None where it was measured first, for the forecasts of others
    measured_speedup: float | None = None
    measured_ci95: Sequence[float | None] = (None, None)
    pays: bool = False  # whether that interval lies above 1

    @property
    def speedup(self) -> float:
        return self.measured_speedup or self.predicted_speedup or 0.0


def cell_of(result: ServedResult) -> ServedCell | None:
    """What was measured; None where the server counted no rounds, or nothing came."""
    length = result.acceptance and result.acceptance.acceptance_length
    plain, drafted = result.baseline.tokens_per_second, result.drafted.tokens_per_second
    if not (length and plain and drafted and result.num_draft_tokens):
        return None
    size = result.load.concurrency
    step, round_ = 1000 * size / plain, 1000 * size * length / drafted
    cell = ServedCell(result.num_draft_tokens, size, length, round(step, 3), round(round_, 3))
    return replace(cell, measured_speedup=result.speedup, measured_ci95=result.speedup_ci95, pays=result.pays)


def rates_in(results: Sequence[ServedResult]) -> list[float]:
    """The acceptance rate by draft position, from the longest drafts; empty where the server does not count so."""
    counted = [one.acceptance for one in results if one.acceptance and one.acceptance.acceptance_rate]
    longest = max(counted, key=lambda one: (len(one.acceptance_rate), one.num_rounds), default=None)
    return [] if longest is None else [rate or 0.0 for rate in longest.acceptance_rate]


def forecast(results: Sequence[ServedResult], lengths: Sequence[int]) -> list[ServedCell]:
    """A cell for every K at every load: as measured, or forecast from those that were.

    Where there are no rates by position, the acceptance length is interpolated between those of measured K. The speedup
    is acceptance length * step / round (Leviathan et al. 2023, section 3.3, with measured times)."""
    measured, rates = [cell for result in results if (cell := cell_of(result))], rates_in(results)
    cells = []
    for size in sorted({cell.concurrency for cell in measured}):
        here = {cell.num_draft_tokens: cell for cell in measured if cell.concurrency == size}
        known = sorted(here.values(), key=lambda cell: cell.num_draft_tokens)
        rounds = [(cell.num_draft_tokens, cell.round_ms) for cell in known]
        accepted = [(cell.num_draft_tokens, cell.acceptance_length) for cell in known]
        step = median(cell.step_ms for cell in known)
        for num in sorted({*lengths, *here}):
            if num in here:
                cells.append(here[num])
                continue
            length = expected_length(rates, num) if rates else interpolate(accepted, num)
            took = interpolate(rounds, num)
            speedup = round(length * step / took, 4) if took > 0 else None
            cells.append(ServedCell(num, size, round(length, 4), step, round(took, 3), speedup))
    return cells


def finalists(cells: Sequence[ServedCell]) -> dict[int, list[int]]:
    """Loads by the K that is to be measured there: the best forecast of each load that is not far below its best."""
    found: dict[int, list[int]] = {}
    for size, here in sorted(grouped(cells, lambda cell: cell.concurrency).items()):
        open_ = [cell for cell in here if cell.measured_speedup is None and cell.predicted_speedup]
        best = max(open_, key=lambda cell: cell.speedup, default=None)
        if best is not None and best.speedup > 0.9 * max(cell.speedup for cell in here):
            found.setdefault(best.num_draft_tokens, []).append(size)
    return found


def checked(cells: Sequence[ServedCell], results: Sequence[ServedResult]) -> list[ServedCell]:
    """The cells, with what was measured of those that had been forecast."""
    later = {(cell.num_draft_tokens, cell.concurrency): cell for result in results if (cell := cell_of(result))}
    return [
        replace(later[key], predicted_speedup=cell.predicted_speedup)
        if (key := (cell.num_draft_tokens, cell.concurrency)) in later
        else cell
        for cell in cells
    ]


def write_plan(
    folder: Path,
    engine: str,
    drafter: str,
    cells: Sequence[ServedCell],
    rates: Sequence[float],
    results: Sequence[ServedResult],
) -> None:
    """plan.json, and the files that SGLang reads: steps per second by tokens of a forward, and K by batch size.

    Args: results: what was measured."""
    told: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "engine": engine, "drafter": drafter}
    told |= {"acceptance_rate": list(rates), "cells": [vars(cell) for cell in cells]}
    write_json(folder / "plan.json", {**told, "check": vars(errors(cells))})
    if engine == "sglang" and cells:
        write_json(folder / "sps_table.json", steps_per_second(cells))
        write_json(folder / "adaptive.json", steps_by_batch_size(results))


def steps_per_second(cells: Sequence[ServedCell]) -> dict[str, Any]:
    """For `--speculative-dspark-sps-table-path`: forwards per second by the tokens that one verifies."""
    timed: dict[int, list[float]] = {}
    for cell in cells:
        if cell.measured_speedup is not None:
            timed.setdefault(cell.concurrency * (cell.num_draft_tokens + 1), []).append(1000 / cell.round_ms)
    tokens = sorted(timed)
    speeds = [round(median(timed[num]), 3) for num in tokens]
    return {"sample_batch_tokens": tokens, "sample_steps_per_sec": speeds, "max_batch_tokens": tokens[-1]}


def steps_by_batch_size(results: Sequence[ServedResult]) -> dict[str, Any]:
    """For `--speculative-adaptive-config`: from each batch size on, the K of `measured_schedule`; 0 where no gain is
    proved."""
    schedule = measured_schedule(results) or [[1, 1, 0]]
    return {str(first): {"candidate_steps": [length]} for first, _, length in schedule}
