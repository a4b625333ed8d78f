"""`headstart compare`: runs or evaluations side by side: differing settings, results, and the ranking."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import BadInput
from ..base.terminal import PlainConsole

if TYPE_CHECKING:
    from ..eval.report.comparison import NamedReport
    from ..eval.report.training_runs import TrainingRun

MOST_KEYS = 3  # settings of a run that are printed


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Two or more: run folders, or those that eval wrote.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare training runs, finished or under way, or evaluations of several heads.

    \b
    Examples, three seeds of two losses, and the two best of them:
      for seed in 1 2 3; do for loss in kl l1; do
        headstart train runs/eagle3.yaml ... head.loss="{$loss: 1.0}" train.seed=$seed train.output_dir=runs/$loss-$seed
      done; done
      headstart compare runs/kl-* runs/l1-*
      headstart compare runs/kl-2/eval runs/l1-1/eval

    Prints of each run the steps done, the last loss, tokens per second, the tokens per forward of the best validation,
    at which step, and what decoding gave there, and settings in which the runs differ. Of evaluations (folders
    with report.json), on each suite who is ahead, whether the intervals overlap, and what besides the heads is not
    alike.
    """
    from ..eval.report.comparison import read_evaluation

    if len(folders) < 2:
        raise BadInput("compare: give at least two runs or evaluations")
    names = dict(zip(folders, short_names(folders), strict=True))
    runs = [read_run(folder, names[folder]) for folder in folders if not is_evaluation(folder)]
    evaluations = [read_evaluation(folder, names[folder]) for folder in folders if is_evaluation(folder)]
    document = [*run_entries(runs), *(evaluation.summary() for evaluation in evaluations)]
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        show(runs, evaluations)


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
    from ..base.jsonl import read_appended
    from ..configs.loader import read_config
    from ..eval.report.training_runs import TrainingRun
    from ..train.watching.tracking import flat

    if not (folder / "config.yaml").is_file():
        raise BadInput(f"{folder}: no run folder: it has no config.yaml; nor an evaluation: no report.json")
    settings = {key.replace("/", "."): value for key, value in flat(read_config(folder / "config.yaml")).items()}
    rows = read_appended(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    if not steps:
        raise BadInput(f"{folder}: no step was logged yet")
    validations = [(row["step"], row["validation"]) for row in rows if "validation" in row]
    taught = [(step, part["acceptance_length"]) for step, part in validations if part["acceptance_length"]]
    decoded = [(step, part["decoded"]["acceptance_length"]) for step, part in validations if part.get("decoded")]
    losses = [(row["step"], row["loss"]) for row in steps]
    speed = round(statistics.median(row["tokens_per_second"] for row in steps), 1)
    finished = (folder / "final").is_dir()
    return TrainingRun(name, str(folder), finished, settings, speed, losses, taught, decoded)


def run_entries(runs: "list[TrainingRun]") -> list[dict[str, Any]]:
    """Runs as `--json` prints them, with the settings that not all share."""
    from ..eval.report.training_runs import differing_settings

    differs = differing_settings(runs).items()
    return [{**run.to_json(), "differs": {key: values[i] for key, values in differs}} for i, run in enumerate(runs)]


def show(runs: "list[TrainingRun]", evaluations: "list[NamedReport]") -> None:
    """Both on the screen."""
    from ..eval.report.comparison import comparison
    from ..eval.report.console import results_table
    from ..eval.report.screen import show_conclusion
    from ..eval.report.training_runs import runs_conclusion, runs_table

    console = PlainConsole()
    more = "All figures and settings: --json"
    if runs:
        pairs = zip(runs, run_entries(runs), strict=True)
        told = [f"{run.name}: {overrides(entry['differs'])}" for run, entry in pairs]
        show_conclusion(runs_conclusion(runs, told), runs_table(runs), more, console)
    if evaluations:
        results = [result for evaluation in evaluations for result in evaluation.results]
        show_conclusion(comparison(evaluations), results_table(results), more, console)


def overrides(settings: dict[str, Any]) -> str:
    """The first settings as command-line overrides, without those that a run does not have."""
    told = [f"{key}={value}" for key, value in settings.items() if value is not None] or ["(the same)"]
    left_out = [f"and {len(told) - MOST_KEYS} more"] if len(told) > MOST_KEYS else []
    return " ".join([*told[:MOST_KEYS], *left_out])
