"""Predicting the speedup of each setting at each batch size from its acceptance and the duration of its rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from ..decoding.draft_setting import DraftSetting
from ..figures.metrics import LEAST_TIMED, Acceptance, ratio_and_interval, rounded
from ..measurement.result import Result
from ..measurement.step_times import StepTable
from ..report.results.one_result import grouped, lower_end
from ..suites.prompts import full_batches

LEAST_GAIN = 0.01  # relative gain needed to choose a setting that drafts more
MOST_FINALISTS = 4  # settings that are measured per batch size
MOST_ERROR = 0.2  # assumed error of predictions: cells further below the best prediction are not measured


@dataclass(frozen=True)
class Accepted:
    """What a workload's texts accept of a setting."""

    setting: DraftSetting
    counted: Acceptance
    rounds: list[int]  # of each prompt, the prefill left out
    tokens: list[int]  # new ones of each prompt, the prefill's one included

    @property
    def length(self) -> float:
        """acceptance_length; 1 where no round was needed."""
        return self.counted.length or 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting.name,
            "acceptance_length": round(self.length, 4),
            "acceptance_rate": [None if rate is None else round(rate, 4) for rate in self.counted.rate],
            "num_rounds": self.counted.num_rounds,
        }


@dataclass(frozen=True)
class Cell:
    """A setting at a batch size, and its speedup, predicted and perhaps measured."""

    setting: DraftSetting
    batch_size: int
    context: int  # mean tokens before a round
    predicted_speedup: float | None  # None of one that goes by the drafter's confidence
    predicted_ci95: Sequence[float | None] = (None, None)  # over prompts, or batches of them; of what they accept alone
    num_rounds: int = 0  # of one row each, that its acceptance is counted in
    measured_speedup: float | None = None
    measured_ci95: Sequence[float | None] = (None, None)
    measured_low: float | None = None  # its lower end where it is widened, as the setting is one of several
    num_timed: int | None = None  # prompts, or batches, that the interval is over

    @property
    def title(self) -> str:
        return self.setting.name + (" by confidence" if self.is_by_confidence else "")

    @property
    def is_by_confidence(self) -> bool:
        """Whether only the drafts are verified that pay by the drafter's estimates."""
        return self.setting.verify_cost is not None

    @property
    def proved_speedup(self) -> float | None:
        """The lower end of the measured interval, widened; None if there is none, or it is over too few to hold."""
        return self.measured_low if (self.num_timed or 0) >= LEAST_TIMED else None

    @property
    def known_speedup(self) -> float:
        return self.measured_speedup or self.predicted_speedup or 0.0

    @property
    def assured_speedup(self) -> float:
        """The proved one, else the known one: by it drafting pays or does not."""
        return self.known_speedup if self.proved_speedup is None else self.proved_speedup

    @property
    def ranked_speedup(self) -> float:
        """The lower end of its own interval where that holds, else the known one: by it settings are ranked. Widened
        ends would rank few prompts by how far these spread."""
        low = None if self.proved_speedup is None else self.measured_ci95[0]
        return self.known_speedup if low is None else low

    def measured(self, result: Result, *, num_choices: int) -> "Cell":
        """With what came out when it was measured. Args: num_choices: settings of which it is one."""
        speedup, interval = result.speedup, result.speedup_ci95
        low = None if interval[0] is None else lower_end(result, num_choices=num_choices)
        changes = {"measured_ci95": interval, "measured_low": rounded(low), "num_timed": result.num_timed}
        return replace(self, measured_speedup=speedup, **changes)

    def to_json(self) -> dict[str, Any]:
        setting = {
            "setting": self.setting.name,
            "tree": self.setting.tree_name,
            "num_draft_tokens": self.setting.num_draft_tokens,
            "num_drafted": self.setting.num_drafted,
            "verify_cost": self.setting.verify_cost,
        }
        return {**setting, **{key: value for key, value in vars(self).items() if key != "setting"}}


@dataclass(frozen=True)
class RecommendedCell:
    """The cell to serve at its batch size; is_off: not even this one is faster than no drafts, or
    shown to be where it was measured."""

    cell: Cell
    is_off: bool

    @property
    def is_proved(self) -> bool:
        """Whether it goes by an interval that holds, not by a prediction or too few measurements."""
        return self.cell.proved_speedup is not None

    def to_json(self) -> dict[str, Any]:
        return {"off": self.is_off, **self.cell.to_json(), "proved": self.is_proved}


@dataclass(frozen=True)
class CheckSummary:
    """How far predictions lie from what was measured, relative to it."""

    num_cells: int
    median_error: float | None = None
    max_error: float | None = None

    @property
    def words(self) -> str:
        """Where something was measured."""
        return f"{self.num_cells} cells: median {self.median_error:.1%}, at most {self.max_error:.1%} apart"


@dataclass(frozen=True)
class Workload:
    """What is decoded."""

    prompt_lengths: list[int]  # in the order in which batches take the prompts
    max_new_tokens: int

    @property
    def context(self) -> int:
        """Mean tokens before a round: the prompt and half of the answer."""
        return round(sum(self.prompt_lengths) / len(self.prompt_lengths) + self.max_new_tokens / 2)

    def spans(self, batch_size: int, tokens: Sequence[int]) -> list[tuple[list[int], int, int, float]]:
        """Of each batch the indices of its prompts, and the tokens before a round at its start, at its end and on
        average, counted in its longest rows, as these set how far attention reads. Prompts repeat until the last batch
        is full.

        Args: tokens: new ones of each prompt.
        """
        spans = []
        order = full_batches(len(self.prompt_lengths), batch_size)
        for i in range(0, len(order), batch_size):
            rows = order[i : i + batch_size]
            pairs = [(self.prompt_lengths[row], tokens[row]) for row in rows]
            start, end = max(length for length, _ in pairs), max(length + new for length, new in pairs)
            spans.append((rows, start, end, max(length + new / 2 for length, new in pairs)))
        return spans


def expected_length(rates: Sequence[float], num_draft_tokens: int) -> float:
    """acceptance_length of chains whose draft position k is accepted with probability rates[min(k, last)]: 1 + the sum
    of the rates' running products; Leviathan et al. 2023, eq. 1, with a separate rate per position."""
    length = reached = 1.0
    for k in range(num_draft_tokens):
        reached *= rates[min(k, len(rates) - 1)]
        length += reached
    return length


def workload_times(
    accepted: Accepted, workload: Workload, times: StepTable, *, batch_size: int
) -> tuple[list[float], list[float]]:
    """Decoding time of these prompts without drafts and with them, of each batch of that size, prefills left out.

    A step's time is shared equally by the batch's rows, and rows that have ended are not charged, as in the evaluator
    (`metrics.row_seconds`). Sampled texts differ between the two sides; lengths are those of the drafted ones.
    """
    plain, drafted = list[float](), list[float]()
    for rows, start, _, context in workload.spans(batch_size, accepted.tokens):
        base = times.at(None, batch_size=batch_size, context=context)
        spec = times.at(accepted.setting, batch_size=batch_size, context=context)
        plain.append(fmean(accepted.tokens[row] - 1 for row in rows) * base.round_ms)
        reading_ms = times.at(accepted.setting, batch_size=batch_size, context=start).reading_ms
        drafted.append(fmean(accepted.rounds[row] for row in rows) * spec.round_ms + reading_ms)
    return plain, drafted


def steady_speedup(accepted: Accepted, times: StepTable, *, batch_size: float, context: float) -> float:
    """Tokens per second with drafts over those without, all rows busy: what a server that refills its batch sees.

    acceptance_length * baseline step / round: the speed model of Leviathan et al. 2023, section 3.3, with measured
    terms in place of its cost coefficient.
    """
    base = times.at(None, batch_size=batch_size, context=context)
    return accepted.length * base.round_ms / times.at(accepted.setting, batch_size=batch_size, context=context).round_ms


def predict_cells(
    accepted: Sequence[Accepted], workload: Workload, times: StepTable, *, batch_sizes: Sequence[int]
) -> list[Cell]:
    """Every setting at every batch size, decoding the workload's texts."""
    cells = []
    for size in batch_sizes:
        for one in accepted:
            plain, drafted = workload_times(one, workload, times, batch_size=size)
            has_both = sum(plain) > 0 and sum(drafted) > 0
            speedup, interval = ratio_and_interval(plain, drafted) if has_both else (1.0, (None, None))
            ends = [rounded(end) for end in interval]
            cells.append(Cell(one.setting, size, workload.context, round(speedup, 4), ends, one.counted.num_rounds))
    return cells


def shortlist(cells: Sequence[Cell]) -> list[Cell]:
    """The cells worth measuring: at each batch size up to MOST_FINALISTS, none predicted far below the best; the best
    first."""
    chosen = []
    for _, group in sorted(grouped(cells, lambda cell: cell.batch_size).items()):
        here = sorted(((cell.predicted_speedup or 0.0, cell) for cell in group), key=lambda pair: -pair[0])
        least = here[0][0] * (1 - MOST_ERROR)
        chosen += [cell for speedup, cell in here[:MOST_FINALISTS] if speedup >= least]
    return chosen


def recommend_cells(cells: Sequence[Cell]) -> list[RecommendedCell]:
    """For each batch size the fastest cell, or `off` where none is faster than no drafts.

    Where cells were measured over enough prompts, by the lower ends of their intervals; else the fastest of those that
    were measured, else the one predicted to be. Of cells within LEAST_GAIN of the fastest, the one that drafts least.
    It is `off` by its widened end, as in a report of several results: the best is partly the best by chance.
    """
    advice = []
    for _, group in sorted(grouped(cells, lambda cell: cell.batch_size).items()):
        proved = [cell for cell in group if cell.proved_speedup is not None]
        here = proved or [cell for cell in group if cell.measured_speedup] or group
        assured = [cell for cell in here if cell.assured_speedup > 1]
        fastest = max(cell.ranked_speedup for cell in assured or here)
        near = [cell for cell in assured or here if cell.ranked_speedup >= fastest * (1 - LEAST_GAIN)]
        best = min(near, key=lambda cell: (cell.setting.num_drafted, cell.setting.num_draft_tokens))
        advice.append(RecommendedCell(best, not assured))
    return advice


def errors(cells: Iterable[Any]) -> CheckSummary:
    """How far predictions lie from what was measured. Args: cells: each has a predicted and a measured speedup."""
    speedups = [(cell.predicted_speedup, cell.measured_speedup) for cell in cells]
    apart = [abs(predicted / measured - 1) for predicted, measured in speedups if predicted and measured]
    return CheckSummary(len(apart), rounded(median(apart)), rounded(max(apart))) if apart else CheckSummary(0)
