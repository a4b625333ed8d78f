"""What `make bench-heads` found: docs/results/heads.json, and the README's table from it."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from ...eval.report.document import write_whole

START, END = "<!-- bench-heads: start -->", "<!-- bench-heads: end -->"
REFERENCE = "eagle3"  # whose training speed is 1
COLUMNS = (
    "head",
    "idea",
    "loss",
    "parameters",
    "acceptance length",
    "draft ms / baseline step",
    "speedup",
    "training speed",
)
Describe = Callable[[str], tuple[str, str]]  # name of a head -> its title and idea


def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an entry is of; a new one takes the place of the one before."""
    return entry["target"], entry["head"], entry["seed"]


def read_results(path: Path) -> list[dict[str, Any]]:
    """The entries of a results file, none where there is no file. Raises BadInput where it is none of ours."""
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text())
        _ = [(key_of(one), one["settings"]) for one in entries]
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path}: no list of bench results: {error!r}") from error
    return entries


def write_results(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(sorted(entries, key=key_of), indent=1) + "\n")


def table(entries: Sequence[dict[str, Any]], describe: Describe) -> str:
    """A table per target, the longest acceptance first. describe: the title and the idea of a head, by its name."""
    if not entries:
        return "Not measured yet: `make bench-heads`."
    parts = []
    for target in sorted({entry["target"] for entry in entries}):
        heads: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            if entry["target"] == target:
                heads.setdefault(entry["head"], []).append(entry)
        ranked = sorted(heads.items(), key=lambda item: (-mean(item[1], "acceptance_length"), item[0]))
        lines = [about(target, [entry for group in heads.values() for entry in group]), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(row(name, group, heads.get(REFERENCE), describe))} |" for name, group in ranked]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def about(target: str, entries: Sequence[dict[str, Any]]) -> str:
    """What was done to get a target's figures, in a line."""

    def values(key: str) -> str:
        return ", ".join(map(str, sorted({entry[key] for entry in entries})))

    return (
        f"Target `{target}`: {values('optimizer_steps')} optimizer steps, seeds {values('seed')}; "
        f"{values('num_prompts')} prompts of {values('max_new_tokens')} new tokens, greedy, batch 1; "
        f"{values('device')}, {values('num_threads')} threads; {values('date')}."
    )


def row(
    name: str, group: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]] | None, describe: Describe
) -> list[str]:
    """The cells of one head: means over its seeds."""
    title, idea = describe(name)
    mix = group[0]["loss"]
    loss = " + ".join(key if weight == 1 else f"{weight:g} {key}" for key, weight in mix.items())
    draft = statistics.fmean(entry["draft_ms"] / entry["baseline_ms"] for entry in group)
    trained = "train_tokens_per_second"
    speed = f"{mean(group, trained) / mean(reference, trained):.2f}" if reference else "-"
    return [
        title,
        idea,
        loss,
        f"{group[0]['parameters']:,}",
        spread(entry["acceptance_length"] for entry in group),
        f"{draft:.2f}",
        f"{mean(group, 'speedup'):.2f}",
        speed,
    ]


def mean(group: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(entry[key] for entry in group)


def spread(values: Iterable[float]) -> str:
    """`mean ± standard deviation`, the latter where there are several values."""
    found = list(values)
    return f"{statistics.fmean(found):.2f}" + (f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else "")


def render_readme(path: Path, entries: Sequence[dict[str, Any]], describe: Describe) -> None:
    """Put the table between its two marks. Raises BadInput where a page has none."""
    text = path.read_text() if path.is_file() else ""
    if text.count(START) != 1 or text.count(END) != 1:
        raise BadInput(f"{path}: expected one line {START} and one {END}")
    before, after = text.split(START)[0], text.split(END)[1]
    write_whole(path, f"{before}{START}\n{table(entries, describe)}\n{END}{after}")
