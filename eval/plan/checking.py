"""Predicted cells measured in earnest: those of a batch size together, beside one baseline, as many as time allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...heads.drafter import Drafter
from ...heads.target import Target
from ..measurement.config import MeasureConfig
from ..measurement.disturbance import MOST_AGAIN, SHARE_AGAIN
from ..measurement.measure import measure_all
from ..measurement.metrics import LEAST_TIMED
from ..measurement.runner import Contender
from ..suites.prompts import Suite
from .accepting import evenly
from .budget import SAFETY, Budget, Costs
from .prediction import Cell


@dataclass(frozen=True)
class Check:
    """What is measured of cells of one batch size."""

    cells: list[Cell]  # none: there is no time
    num_repeats: int
    num_batches: int


def fit_check(cells: Sequence[Cell], costs: Costs, *, seconds: float, tokens: int, repeats: int, batches: int) -> Check:
    """The most promising cells, as many and in as many repeats and batches as fit.

    Repeats go first, then cells, down to the LEAST_TIMED batches that an interval needs; then batches.
    """
    ranked = sorted(cells, key=lambda cell: -cell.predicted_speedup)
    size = ranked[0].batch_size

    def takes(check: Check) -> float:
        least = 1.0 if size > 1 else 0.0  # a batch lasts until its slowest row ends, which may gain nothing
        sides = 1 + sum(max(1 / max(cell.predicted_speedup, 0.1), least) for cell in check.cells)
        one = sides * tokens * costs.step(size) + (1 + 2 * len(check.cells)) * costs.prefill(size)
        again = MOST_AGAIN * max(1, check.num_batches // SHARE_AGAIN)
        return (1 + len(check.cells)) * costs.setup + one * (1 + check.num_repeats * (check.num_batches + again))

    for least in (min(LEAST_TIMED, batches), 1):
        for number in range(len(ranked), 0, -1):
            for repeated in dict.fromkeys((repeats, 1)):
                for count in range(batches, least - 1, -1):
                    check = Check(ranked[:number], repeated, count)
                    if takes(check) <= SAFETY * seconds:
                        return check
    return Check([], repeats, 0)


def measured_cells(
    target: Target,
    drafter: Drafter,
    suite: Suite,
    chosen: Sequence[Cell],
    config: MeasureConfig,
    *,
    name: str,
    costs: Costs,
    budget: Budget,
    on_cell: Callable[[], object],
) -> list[Cell]:
    """Those of the chosen cells that were measured, and what came out. Args: name: of the drafter."""
    checked: list[Cell] = []
    sizes = sorted({cell.batch_size for cell in chosen})
    for number, size in enumerate(sizes):
        here, full = [cell for cell in chosen if cell.batch_size == size], suite.filled(size)
        check = fit_check(
            here,
            costs,
            seconds=budget.room("check") / (len(sizes) - number),
            tokens=config.max_new_tokens,
            repeats=config.num_repeats,
            batches=len(full.prompts) // size,
        )
        missed = [cell.setting.name for cell in here if cell not in check.cells]
        budget.left_out += [f"measuring {name} at batch size {size}" for name in missed]
        if check.cells:
            count = check.num_batches * size
            part = full if count == len(full.prompts) else suite.subset(evenly(len(suite.prompts), count))
            how = replace(config, batch_size=size, num_repeats=check.num_repeats)
            contenders = [Contender(name, drafter, cell.setting) for cell in check.cells]
            results = measure_all(target, contenders, part, how)
            checked += [cell.measured(result) for cell, (result, _) in zip(check.cells, results, strict=True)]
        for _ in here:
            on_cell()
    return checked
