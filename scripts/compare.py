"""`headstart compare`: runs or evaluations side by side: differing settings, results, and the ranking."""

import json
import statistics
import sys
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..configs.errors import BadInput
from ..configs.files import new_folder, write_json
from ..configs.terminal import PlainConsole

if TYPE_CHECKING:
    from ..eval.report.comparison import NamedReport
    from ..eval.report.comparison_page import TrainingRun


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Two or more: run folders, or those that eval wrote.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="A new folder for compare.html, compare.json and, of runs, compare.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare training runs, finished or under way, or evaluations of several heads.

    \b
    Examples, three seeds of two losses, and the two best of them:
      for seed in 1 2 3; do for loss in kl tv; do
        headstart train runs/eagle3.yaml ... head.loss="{$loss: 1.0}" train.seed=$seed train.output_dir=runs/$loss-$seed
      done; done
      headstart compare runs/kl-* runs/tv-* --output runs/kl-or-tv
      headstart compare runs/kl-2/eval runs/tv-1/eval --output runs/best

    Prints of each run the steps done, the last loss, tokens per second, the acceptance length of the best validation
    (at which step) and of the last, taught and where it was decoded, a forecast of it after twice the steps with an
    80 % interval, and the settings in which the runs differ. Of evaluations (folders with report.json), on each suite
    who is ahead, whether the intervals overlap, and what besides the heads is not alike.
    """
    from ..eval.report.comparison import read_evaluation
    from ..eval.report.comparison_page import write_page

    if len(folders) < 2:
        raise BadInput("compare: give at least two runs or evaluations")
    if output is not None and output.exists():
        raise BadInput(f"--output {output}: exists already")
    names = dict(zip(folders, short_names(folders), strict=True))
    runs = [read_run(folder, names[folder]) for folder in folders if not is_evaluation(folder)]
    evaluations = [read_evaluation(folder, names[folder]) for folder in folders if is_evaluation(folder)]
    document = [*run_entries(runs), *(evaluation.summary() for evaluation in evaluations)]
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        show(runs, evaluations)
    if output is not None:
        with new_folder(output) as folder:
            write_json(folder / "compare.json", document)
            page = write_page(folder, evaluations, runs)
        print(f"written to {output.expanduser() / page.name}", file=sys.stderr)


def is_evaluation(folder: Path) -> bool:
    return (folder / "report.json").is_file() and not (folder / "config.yaml").is_file()


def short_names(folders: list[Path]) -> list[str]:
    """The shortest trailing parts of each path that tell it from the others, without the end that all share.

    Raises BadInput if two are the same.
    """
    from ..eval.suites.prompts import distinct_names

    paths = [list(folder.resolve().parts) for folder in folders]
    if len(set(map(tuple, paths))) < len(paths):
        raise BadInput("compare: the same folder is given twice")
    while min(map(len, paths)) > 1 and len({parts[-1] for parts in paths}) == 1:
        for parts in paths:
            parts.pop()
    return distinct_names([["/".join(parts[i:]) for i in reversed(range(len(parts)))] for parts in paths])


def read_run(folder: Path, name: str) -> "TrainingRun":
    """Raises BadInput if it is no run folder, or nothing was logged yet."""
    from ..configs.jsonl import read_appended
    from ..configs.loader import read_config
    from ..eval.report.comparison_page import TrainingRun
    from ..train.tracking import flat
    from ..train.trend import Validated, forecast

    if not (folder / "config.yaml").is_file():
        raise BadInput(f"{folder}: no run folder: it has no config.yaml; nor an evaluation: no report.json")
    settings = {key.replace("/", "."): value for key, value in flat(read_config(folder / "config.yaml")).items()}
    rows = read_appended(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    if not steps:
        raise BadInput(f"{folder}: no step was logged yet")
    validations = [(row["step"], row["validation"]) for row in rows if "validation" in row]
    counted = [(step, part) for step, part in validations if part["acceptance_length"]]
    taught = [(step, part["acceptance_length"]) for step, part in counted]
    course = [Validated(step, part["acceptance_length"], part["num_rounds"]) for step, part in counted]
    twice = astuple(forecast(course, 2 * course[-1].step)) if course else None
    decoded = [(step, part["decoded"]["acceptance_length"]) for step, part in validations if part.get("decoded")]
    losses = [(row["step"], row["loss"]) for row in steps]
    speed = round(statistics.median(row["tokens_per_second"] for row in steps), 1)
    finished = (folder / "final").is_dir()
    return TrainingRun(name, str(folder), finished, settings, speed, losses, taught, decoded, twice)


def run_entries(runs: "list[TrainingRun]") -> list[dict[str, Any]]:
    """Runs as compare.json has them, with the settings that not all share."""
    from ..eval.report.comparison_page import differing_settings

    differs = differing_settings(runs).items()
    return [{**run.to_json(), "differs": {key: values[i] for key, values in differs}} for i, run in enumerate(runs)]


def show(runs: "list[TrainingRun]", evaluations: "list[NamedReport]") -> None:
    """Both on the screen."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from ..eval.report.comparison import headline, standings, unlike
    from ..eval.report.comparison_page import RUN_COLUMNS

    console, lines = PlainConsole(), []
    if runs:
        columns = [Column("run", no_wrap=True), *(Column(title, justify="right") for title in RUN_COLUMNS)]
        table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
        for run in runs:
            table.add_row(run.folder, *run.cells())
        console.print(table)
        lines += [f"{entry['run']}: {overrides(entry['differs'])}" for entry in run_entries(runs)]
    if evaluations:
        ranks = standings(evaluations)
        lines += [headline(ranks), *(f"{standing.traffic}: {standing.words}" for standing in ranks)]
        lines += [f"not alike: {line}" for line in unlike(evaluations)]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def overrides(settings: dict[str, Any]) -> str:
    """Settings as command-line overrides, without those that a run does not have."""
    return " ".join(f"{key}={value}" for key, value in settings.items() if value is not None) or "(the same)"
