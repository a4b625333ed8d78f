"""Inputs and results of `make bench-heads`: configs/bench, docs/results/heads.json, and the tables of its page."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..base.files import write_text
from ..configs.loader import build, read_config, shipped
from ..engines.heads import head_class
from ..heads.base import HeadConfig

START, END = "<!-- bench-heads: start -->", "<!-- bench-heads: end -->"
REFERENCE = "eagle3"  # whose training speed is 1
COLUMNS = "head|idea|loss|parameters|acceptance length|draft ms / baseline step|speedup|training speed".split("|")


@dataclass(kw_only=True)
class BenchedHead:
    """configs/bench/NAME.yaml: a head at the budget's size, and what the table calls it."""

    title: str
    idea: str
    head: dict[str, Any]
    num_draft_tokens: int = 5  # K in decoding
    in_budget: bool = True  # whether it has the budget's size; else it is benched only when named

    @property
    def config(self) -> HeadConfig:
        """A fresh config: families write defaults for the target into it."""
        return build(head_class(self.head["type"]).config_class, self.head, where="head")


def bench_names() -> list[str]:
    """The heads of configs/bench, by file name."""
    return [path.stem for path in shipped("bench/*.yaml") if path.stem != "train"]


def read_bench(name: str) -> BenchedHead:
    """Raises BadInput with the names there are."""
    if name not in bench_names():
        raise BadInput(f"--heads {name}: expected some of {', '.join(bench_names())}")
    return build(BenchedHead, read_config(f"bench/{name}.yaml"), where=f"bench/{name}.yaml")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of docs/results/heads.json: docs/results/heads.md explains the keys."""

    target: str
    head: str
    seed: int
    parameters: int
    optimizer_steps: int
    train_tokens_per_second: float
    acceptance_length: float
    acceptance_rate: list[float | None]
    num_draft_tokens: int
    speedup: float
    speedup_ci95: list[float | None]
    num_prompts: int
    max_new_tokens: int
    temperature: float
    draft_ms: float
    baseline_ms: float
    loss: dict[str, float]
    lossless: dict[str, int]
    device: str  # the name of the GPU or the CPU
    num_threads: int
    date: str
    settings: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The identity of the entry: a new entry replaces an old one with the same identity."""
        return self.target, self.device, self.head, self.seed


def read_results(path: Path) -> list[Entry]:
    """The entries of a results file, none if there is no file. Raises BadInput if it is none of ours."""
    try:
        return [Entry(**row) for row in json.loads(path.read_text())] if path.is_file() else []
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path}: no list of bench results: {error!r}") from error


def write_results(path: Path, entries: Sequence[Entry]) -> None:
    """One entry a line."""
    rows = [json.dumps(asdict(entry)) for entry in sorted(entries, key=lambda entry: entry.key)]
    write_text(path, "[\n" + ",\n".join(rows) + "\n]\n")


def table(entries: Sequence[Entry]) -> str:
    """A table per target and device, since times on two of them do not compare; the longest acceptance first."""
    if not entries:
        return "Not measured yet: `make bench-heads`."
    parts = []
    for target, device in sorted({(entry.target, entry.device) for entry in entries}):
        here = [entry for entry in entries if (entry.target, entry.device) == (target, device)]
        heads = {name: [entry for entry in here if entry.head == name] for name in dict.fromkeys(e.head for e in here)}
        lengths = {name: statistics.fmean(e.acceptance_length for e in group) for name, group in heads.items()}
        reference = training_rate(heads[REFERENCE]) if REFERENCE in heads else None
        lines = [conditions(target, here), "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for name in sorted(heads, key=lambda name: (-lengths[name], name)):
            lines.append(f"| {' | '.join(table_row(heads[name], reference))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def conditions(target: str, entries: Sequence[Entry]) -> str:
    """How a target's figures were measured, in a line."""
    return (
        f"Target `{target}`: {listed(e.optimizer_steps for e in entries)} optimizer steps, "
        f"seeds {listed(e.seed for e in entries)}; {listed(e.num_prompts for e in entries)} prompts of "
        f"{listed(e.max_new_tokens for e in entries)} new tokens, greedy, batch 1; "
        f"{listed(e.device for e in entries)}, {listed(e.num_threads for e in entries)} threads; "
        f"{listed(e.date for e in entries)}."
    )


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def table_row(group: Sequence[Entry], reference: float | None) -> list[str]:
    """The cells of one head: means over its seeds. Args: reference: training speed that is told as 1."""
    benched, lengths = read_bench(group[0].head), [entry.acceptance_length for entry in group]
    loss = " + ".join(key if weight == 1 else f"{weight:g} {key}" for key, weight in group[0].loss.items())
    deviation = f" ± {statistics.stdev(lengths):.2f}" if len(lengths) > 1 else ""
    return [
        benched.title,
        benched.idea,
        loss,
        f"{group[0].parameters:,}",
        f"{statistics.fmean(lengths):.2f}{deviation}",
        f"{statistics.fmean(entry.draft_ms / entry.baseline_ms for entry in group):.2f}",
        f"{statistics.fmean(entry.speedup for entry in group):.2f}",
        f"{training_rate(group) / reference:.2f}" if reference else "-",
    ]


def training_rate(group: Sequence[Entry]) -> float:
    return statistics.fmean(entry.train_tokens_per_second for entry in group)


def render_page(path: Path, entries: Sequence[Entry]) -> None:
    """Put the tables between the two marks of a page. Raises BadInput if a page has none."""
    text = path.read_text() if path.is_file() else ""
    if text.count(START) != 1 or text.count(END) != 1:
        raise BadInput(f"{path}: expected one line {START} and one {END}")
    before, after = text.split(START)[0], text.split(END)[1]
    write_text(path, f"{before}{START}\n{table(entries)}\n{END}{after}")
