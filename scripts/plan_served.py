"""`headstart plan --engine vllm|sglang`: K by requests at a time, by the rounds of the engine's own server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from ..base.files import remove
from ..base.owned import OwnedFolder
from ..base.terminal import PlainConsole
from ..eval.measurement.resume import BatchStore
from ..eval.plan.accepting import evenly
from ..eval.plan.budget import at_doublings
from ..eval.plan.in_server import ServedCell, checked, finalists, forecast, rates_in, write_plan
from ..eval.plan.prediction import errors
from ..eval.report.results.drafter_words import served_words
from ..eval.report.served_page import ServedReport, show_served, write_served
from ..eval.served.served_result import ServedResult
from .evaluating.eval_served import HEADS, WantedMeasurement, WantedServers, measured_in, questions_in


def plan_in_server(
    wanted: WantedServers, asked: WantedMeasurement, lengths: Sequence[int], output: Path, settings: dict[str, Any], *,
    limit: int, overwrite: bool,
) -> None:  # fmt: skip
    """Measure some K, forecast the others, measure the best of these, and write plan.json and report.html.

    Args: asked: with one drafter. lengths: K. limit: of questions, spread evenly. Raises: BadInput."""
    [drafter], engine = asked.drafters, wanted.served_by
    with OwnedFolder(output, command="headstart plan", settings=settings) as folder:
        folder.check_settings(settings, finished="plan.json", overwrite=overwrite)
        every = questions_in(asked)
        questions = replace(every, asked=[every.asked[number] for number in evenly(len(every.asked), limit)])
        with BatchStore(folder.path, on_first=folder.keep) as store:

            def measured(num: Sequence[int], sizes: Sequence[int]) -> list[ServedResult]:
                specs = [f"{drafter}@{length}" for length in num]
                here = replace(wanted, concurrency=sizes), replace(asked, drafters=specs)
                return measured_in(*here, folder.path / HEADS, store, questions)

            first = measured(at_doublings(tuple(sorted(lengths))), wanted.concurrency)
            cells, then = forecast(first, lengths), list[ServedResult]()
            for length, sizes in finalists(cells).items():
                then += measured([length], sizes)
            cells, rates = checked(cells, then), rates_in(first)
            folder.record(settings)
            report = ServedReport.of(asked.target, [*first, *then])
            page = write_served(folder.path, report, command="headstart plan")
            write_plan(folder.path, engine.name, drafter, cells, rates, report.results)
            store.finish()
            remove(folder.path / HEADS)
    show_cells(engine.title, drafter, cells)
    show_served(report, page)
    if engine.name == "sglang":
        files = f"--speculative-adaptive --speculative-adaptive-config {output / 'adaptive.json'} (EAGLE, EAGLE-3)"
        print(f"SGLang: {files}; --speculative-dspark-sps-table-path {output / 'sps_table.json'} (DSpark)")


def show_cells(title: str, drafter: str, cells: Sequence[ServedCell]) -> None:
    console = PlainConsole()
    console.print(f"timed in {title}'s own server, which counted what it accepts", highlight=False)
    how = "speedup as measured; in brackets, forecast before it or instead"
    console.print(f"{served_words(drafter)}: {how}", highlight=False)
    sizes = sorted({cell.concurrency for cell in cells})
    columns = [Column(f"{size} at a time", justify="right") for size in sizes]
    table = Table("K", "length", *columns, box=SIMPLE_HEAD, pad_edge=False)
    found = {(cell.num_draft_tokens, cell.concurrency): cell for cell in cells}
    for num in sorted({cell.num_draft_tokens for cell in cells}):
        here = [found.get((num, size)) for size in sizes]
        length = next(cell.acceptance_length for cell in here if cell)
        table.add_row(str(num), f"{length:.2f}", *map(cell_text, here))
    console.print(table)
    if (check := errors(cells)).num_cells:
        console.print(f"forecast against measurement in {check.words}", highlight=False)


def cell_text(cell: ServedCell | None) -> str:
    if cell is None:
        return "-"
    told = "" if cell.measured_speedup is None else f"{cell.measured_speedup:.2f} "
    return told + ("" if cell.predicted_speedup is None else f"({cell.predicted_speedup:.2f})")
