"""`headstart compare`: runs or evaluations side by side: what differs, what came of it, who is ahead."""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..configs.errors import BadInput

if TYPE_CHECKING:
    from ..eval.report.comparison import Evaluation


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
    (at which step) and of the last, taught and where it was decoded; and the settings in which the runs differ. Of
    evaluations (folders with report.json), on each suite who is ahead, whether the intervals overlap, and what besides
    the heads is not alike.
    """
    from ..eval.report.comparison import read_evaluation, summary

    if len(folders) < 2:
        raise BadInput("compare: give at least two runs or evaluations")
    if output is not None and output.exists():
        raise BadInput(f"--output {output}: exists already")
    names = dict(zip(folders, short_names(folders), strict=True))
    runs = [read_run(folder) for folder in folders if not is_evaluation(folder)]
    evaluations = [read_evaluation(folder, names[folder]) for folder in folders if is_evaluation(folder)]
    entries = [{**entry.figures, "differs": differing(entry, runs)} for entry in runs]
    found = [*entries, *(summary(one) for one in evaluations)]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(entries, evaluations)
    if output is not None:
        output.mkdir(parents=True)
        (output / "compare.json").write_text(json.dumps(found, indent=2) + "\n")
        if runs:
            plot(runs, output / "compare.svg")
        print(f"written to {write_page(output, evaluations, runs, entries)}", file=sys.stderr)


def is_evaluation(folder: Path) -> bool:
    return (folder / "report.json").is_file() and not (folder / "config.yaml").is_file()


def short_names(folders: list[Path]) -> list[str]:
    """Of each path the parts that are not common to all at its start or end. Raises BadInput where two are the same."""
    parts = [list(folder.absolute().parts) for folder in folders]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({one[end] for one in parts}) == 1:
            for one in parts:
                one.pop(end)
    names = ["/".join(one) for one in parts]
    if len(set(names)) < len(names):
        raise BadInput("compare: the same folder is given twice")
    return names


def show(runs: list[dict[str, Any]], evaluations: "list[Evaluation]") -> None:
    """Both on the screen."""
    from rich.console import Console

    from ..eval.report.comparison import headline, standings, unlike

    console = Console()
    plain: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
    if runs:
        console.print(as_table(runs))
        for entry in runs:
            console.print(f"{entry['run']}: {settings(entry['differs'])}", **plain)
    if evaluations:
        found = standings(evaluations)
        console.print(headline(found), **plain)
        for one in found:
            console.print(f"{one.traffic}: {one.words}", **plain)
        for line in unlike(evaluations):
            console.print(f"not alike: {line}", **plain)


def write_page(output: Path, evaluations: "list[Evaluation]", runs: "list[Run]", entries: list[dict[str, Any]]) -> Path:
    """compare.html."""
    from ..eval.report import comparison_page as compare_page

    trained = [
        compare_page.TrainingRun(
            run.name,
            run.figures,
            entry["differs"],
            run.curve,
            [(step, row["acceptance_length"]) for step, row in run.validations if row["acceptance_length"]],
            [(step, row["decoded"]["acceptance_length"]) for step, row in run.validations if row.get("decoded")],
        )
        for run, entry in zip(runs, entries, strict=True)
    ]
    return compare_page.write_page(output, evaluations, trained)


@dataclass
class Run:
    """A run folder as read. settings: config.yaml flattened. curve: (step, loss). validations: (step, row)."""

    name: str
    settings: dict[str, Any]
    curve: list[tuple[int, float]]
    validations: list[tuple[int, dict[str, Any]]]
    figures: dict[str, Any]


def read_run(folder: Path) -> Run:
    """Raises BadInput where it is no run folder, or nothing was logged yet."""
    from ..configs.loader import read_config
    from ..train.tracking import flat, read_rows

    if not (folder / "config.yaml").is_file():
        raise BadInput(f"{folder}: no run folder: it has no config.yaml; nor an evaluation: no report.json")
    settings = flat(read_config(folder / "config.yaml"))
    rows = read_rows(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    if not steps:
        raise BadInput(f"{folder}: no step was logged yet")
    validations = [(row["step"], row["validation"]) for row in rows if "validation" in row]
    lengths = [(entry["acceptance_length"], step) for step, entry in validations if entry["acceptance_length"]]
    best = max(lengths, default=(None, None))
    figures = {
        "run": str(folder),
        "finished": (folder / "final").is_dir(),
        "steps": steps[-1]["step"],
        "loss": round(steps[-1]["loss"], 4),
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in steps), 1),
        "best_acceptance_length": best[0],
        "best_step": best[1],
        "last_acceptance_length": lengths[-1][0] if lengths else None,
        "decoded_acceptance_length": decoded_length(validations),
    }
    return Run(folder.name, settings, [(row["step"], row["loss"]) for row in steps], validations, figures)


def decoded_length(validations: list[tuple[int, dict[str, Any]]]) -> float | None:
    """Of the last validation that also decoded."""
    decoded = [entry["decoded"]["acceptance_length"] for _, entry in validations if entry.get("decoded")]
    return decoded[-1] if decoded else None


def differing(one: Run, runs: list[Run]) -> dict[str, Any]:
    """The settings of a run that not all runs share, its folder apart."""
    keys = sorted({key for run in runs for key in run.settings} - {"train/output_dir"})
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {
        key.replace("/", "."): one.settings.get(key) for key, each in values.items() if any(v != each[0] for v in each)
    }


def settings(differs: dict[str, Any]) -> str:
    """As overrides on the command line have them; keys that a run has not are left out."""
    return " ".join(f"{key}={value}" for key, value in differs.items() if value is not None) or "(the same)"


def as_table(entries: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    titles = {"run": "run", "steps": "steps", "loss": "loss", "tokens_per_second": "tokens/s"}
    titles |= {"best_acceptance_length": "best", "best_step": "at", "last_acceptance_length": "last"}
    titles |= {"decoded_acceptance_length": "decoded"}
    for key, title in titles.items():
        table.add_column(title, justify="left" if key == "run" else "right", no_wrap=key == "run")
    for entry in entries:
        cells = [shown(entry[key]) for key in titles]
        cells[1] += "" if entry["finished"] else " (not finished)"
        table.add_row(*cells)
    return table


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def plot(runs: list[Run], path: Path) -> None:
    """Loss and validated acceptance length over steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInput(f"{path}: plotting needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        (line,) = left.plot(*zip(*run.curve, strict=True), label=run.name, linewidth=1)
        points = [(step, entry["acceptance_length"]) for step, entry in run.validations if entry["acceptance_length"]]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", color=line.get_color(), label=run.name)
    left.set(xlabel="optimizer step", ylabel="loss")
    right.set(xlabel="optimizer step", ylabel="acceptance length (validation)")
    left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path)
