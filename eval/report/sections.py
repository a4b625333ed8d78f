"""The parts of a page (`Section`, `Figure`), and the sections on speed, time, settings and surroundings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from markupsafe import Markup

from ..measurement.result import Result
from .charts import Bar, bar_chart
from .conclusion import Table
from .results.document import Report
from .results.one_result import (
    disturbance_words,
    grouped,
    interval_of,
    label,
    loop_words,
    lossless_words,
    name_of,
    number,
    prompts_words,
    ratio_words,
    speedup_words,
)
from .results.pairs import beside_fastest

MOST_FAILED = 20  # shown; report.json has all
SETTINGS_SHOWN = ("temperature", "top_k", "top_p", "accept", "steps", "max_new_tokens",
                  "system", "variables", "template_hash", "suite_digest")  # fmt: skip


@dataclass(frozen=True)
class Figure:
    caption: str
    chart: Markup


@dataclass
class Section:
    """anchor: its key in section.html.j2, which has its title and text. A section without content is left out."""

    anchor: str
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add_table(
        self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_labels: int = 2
    ) -> "Section":
        """The section with a table, if that has rows."""
        if rows:
            self.tables.append(Table(caption, columns, rows, num_labels))
        return self


def by_suite(results: Sequence[Result]) -> dict[str, list[Result]]:
    return grouped(results, lambda result: result.suite)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(share: float | None) -> str:
    """A share; with a decimal below ten percent."""
    return "-" if share is None else f"{share:.{0 if share >= 0.1 else 1}%}"


def settings_section(results: Sequence[Result]) -> Section:
    """Every result in a row, and its speeds in another."""
    columns = ["setting", "suite", "prompts", "length", "speedup [95 %]", "lossless"]
    rows = [
        [
            label(result),
            result.suite,
            prompts_words(result),
            number(result.acceptance_length),
            speedup_words(result),
            lossless_words(result),
        ]
        for result in results
    ]
    section = Section("settings").add_table("Every setting that was measured", columns, rows)
    columns = [
        "setting", "suite", "p10 / median / p90", "with prefill", "tok/s, base's",
        "first token, base's, ms",
    ]  # fmt: skip
    rows = [
        [
            label(result),
            result.suite,
            " / ".join(map(number, result.spread)),
            number(result.timing.end_to_end_speedup),
            f"{number(result.tokens_per_second, 1)}, {number(result.baseline_tokens_per_second, 1)}",
            f"{number(result.timing.ttft_ms, 1)}, {number(result.timing.baseline_ttft_ms, 1)}",
        ]
        for result in results
    ]
    section.add_table("Their speeds", columns, rows)
    looping = [[label(result), result.suite, words] for result in results if (words := loop_words(result))]
    return section.add_table("Texts that loop", ["setting", "suite", "how many, and without them"], looping, 3)


def pairs_section(ours: Sequence[Result]) -> Section:
    """Every setting beside the fastest one on the same prompts."""
    rows = [
        [
            label(pair.setting),
            name_of(pair.other),
            pair.setting.suite,
            ratio_words(pair.speed, pair.speed_ci95),
            ratio_words(pair.length, pair.length_ci95),
        ]
        for pair in beside_fastest(ours)
    ]
    columns = ["setting", "the fastest", "suite", "of its speed [95 %]", "of its tokens per forward [95 %]"]
    return Section("pairs").add_table("Beside the fastest setting, prompt by prompt", columns, rows, 3)


def speed_section(ours: Sequence[Result]) -> Section:
    """Speedups with their intervals, one figure per suite."""
    section = Section("speed")
    most = max([interval[1] for interval in map(interval_of, ours) if interval], default=1.0)
    for suite, results in by_suite(ours).items():
        bars = [Bar(label(r), r.speedup or 0.0, speedup_words(r), interval_of(r)) for r in results]
        caption = f"Speedup on {suite}, with 95 % intervals. Right of the line at 1: faster than no drafts."
        section.figures.append(Figure(caption, bar_chart(f"Speedup on {suite}", bars, most=most)))
    return section


def time_section(ours: Sequence[Result]) -> Section:
    """What a round's milliseconds go into, beside a baseline step."""
    section = Section("time")
    timed = [result for result in ours if result.timing.draft_ms is not None]
    rows = []
    for result in timed:
        figures = map(number, (*astuple(result.timing)[:5], result.speedup))
        rows.append([label(result), result.suite, *figures, percent(result.baseline_bandwidth.share_of_copy)])
    columns = ["setting", "suite", "draft, ms", "verify, ms", "rest, ms", "baseline step, ms", "formula's speedup",
               "measured", "base, of a copy's bandwidth"]  # fmt: skip
    section.add_table("Milliseconds per round, and the speedup they explain", columns, rows)
    rows = []
    for result in timed:
        medians = result.step_medians
        figures = (medians.round_ms, medians.verify_ms, medians.baseline_ms, medians.baseline_verify_ms)
        words = disturbance_words(result) or "-"
        rows.append([label(result), result.suite, words, *map(number, figures)])
    columns = ["setting", "suite", "disturbed", "round, ms", "verify, ms", "baseline step, ms", "its forward, ms"]
    return section.add_table("Medians of steps, and what disturbed them", columns, rows, num_labels=3)


def failed_section(results: Sequence[Result]) -> Section:
    """Prompts that are in no figure, and why."""
    counts = Counter((result.suite, failed.row, failed.reason) for result in results for failed in result.failed)
    rows = [[*key, str(count)] for key, count in counts.items()]
    caption = f"Prompts that failed, {min(len(rows), MOST_FAILED)} of {len(rows)}"
    columns = ["suite", "row", "reason", "results without it"]
    return Section("failed").add_table(caption, columns, rows[:MOST_FAILED], 3)


def environment_section(report: Report) -> Section:
    """Where and of what the report was measured, and how its results were."""
    section = Section("environment")
    for caption, known in (("Target", report.target), ("Environment", report.environment)):
        rows = [[key.replace("_", " "), cell(value)] for key, value in asdict(known).items()]
        section.add_table(caption, ["key", "value"], rows)
    entries = [entry | entry["rendering"] for entry in (result.to_json() for result in report.results)]
    shown = {
        key: dict.fromkeys(cell(None if entry[key] in ("", None, {}) else entry[key]) for entry in entries)
        for key in SETTINGS_SHOWN
    }
    rows = [[key.replace("_", " "), ", ".join(values)] for key, values in shown.items() if values]
    return section.add_table("Settings", ["key", "value"], rows)
