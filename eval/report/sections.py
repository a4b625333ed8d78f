"""The parts of a page (`Section`, `Table`, `Figure`), and the sections on speed, time, settings and surroundings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from markupsafe import Markup

from ..measurement.result import Result
from .charts import Bar, Series, bar_chart, line_chart
from .console import lossless_words
from .document import Report
from .one_result import (
    disturbance_words,
    grouped,
    interval_of,
    label,
    loop_words,
    name_of,
    number,
    prompts_words,
    ratio_words,
    setting_of,
    speedup_words,
)
from .pairs import beside_fastest

MOST_FAILED = 20  # shown; report.json has all
SETTINGS_SHOWN = ("temperature", "top_k", "top_p", "accept", "steps", "max_new_tokens", "num_repeats",
                  "system", "thinking", "template_hash", "suite_digest")  # fmt: skip


@dataclass(frozen=True)
class Table:
    """num_labels: columns of text, aligned left; figures are aligned right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1


@dataclass(frozen=True)
class Figure:
    """legend: names of a bar's parts, in order."""

    caption: str
    chart: Markup
    legend: Sequence[str] = ()


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
    """Results by suite, in the report's order."""
    return grouped(results, lambda result: result.suite)


def cell(value: Any) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(share: float | None) -> str:
    """A share; with a decimal below ten percent."""
    return "-" if share is None else f"{share:.{0 if share >= 0.1 else 1}%}"


def settings_section(results: Sequence[Result]) -> Section:
    """Every result in a row."""
    columns = [
        "setting", "suite", "prompts", "length", "speedup [95 %]", "p10 / median / p90", "with prefill",
        "tok/s, base's", "first token, base's, ms", "lossless", "loops",
    ]  # fmt: skip
    rows = [
        [
            label(result),
            result.suite,
            prompts_words(result),
            number(result.acceptance_length),
            speedup_words(result),
            " / ".join(map(number, (result.speedup_p10, result.speedup_median, result.speedup_p90))),
            number(result.end_to_end_speedup),
            f"{number(result.tokens_per_second, 1)}, {number(result.baseline_tokens_per_second, 1)}",
            f"{number(result.ttft_ms, 1)}, {number(result.baseline_ttft_ms, 1)}",
            lossless_words(result),
            loop_words(result) or "-",
        ]
        for result in results
    ]
    return Section("settings", tables=[Table("Every setting that was measured", columns, rows, 2)])


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
    """Speedups with their intervals, one figure per suite; against the batch size where there are several."""
    section = Section("speed")
    most = max([interval[1] for interval in map(interval_of, ours) if interval], default=1.0)
    for suite, results in by_suite(ours).items():
        bars = [Bar(label(r), [r.speedup or 0.0], speedup_words(r), interval_of(r)) for r in results]
        caption = f"Speedup on {suite}, with 95 % intervals. Right of the line at 1: faster than no drafts."
        section.figures.append(Figure(caption, bar_chart(f"Speedup on {suite}", bars, most=most, mark=1.0)))
    for suite, results in by_suite(ours).items():
        sizes = sorted({result.batch_size for result in results})
        if len(sizes) < 2:
            continue
        lines = []
        for same in grouped(results, setting_of).values():
            timed = [result for result in sorted(same, key=lambda r: r.batch_size) if result.speedup is not None]
            points = [(float(sizes.index(result.batch_size)), result.speedup or 0.0) for result in timed]
            lines.append(Series(name_of(same[0]), points, list(map(interval_of, timed))))
        title, ticks = f"Speedup by batch size on {suite}", list(map(str, sizes))
        chart = line_chart(title, lines, axis="batch size", ticks=ticks, most=most, mark=1.0)
        section.figures.append(Figure(f"{title}, with 95 % intervals.", chart))
    return section


def time_section(ours: Sequence[Result]) -> Section:
    """What a round's milliseconds go into, beside a baseline step."""
    section = Section("time")
    timed = [result for result in ours if result.timing.draft_ms is not None]
    for suite, results in by_suite(timed).items():
        bars: list[Bar] = []
        for result in results:
            *parts, base = [value or 0.0 for value in astuple(result.timing)[:4]]
            bars.append(Bar(label(result), parts, f"{sum(parts):.2f} ms"))
            bars.append(Bar("its baseline, one step", [0, 0, 0, base], f"{base:.2f} ms"))
        chart = bar_chart(f"Milliseconds per round on {suite}", bars)
        legend = ("draft", "verify", "rest", "baseline step")
        section.figures.append(Figure(f"A round on {suite}, and a step of its baseline.", chart, legend))
    rows = []
    for result in timed:
        figures = map(number, (*astuple(result.timing), result.speedup))
        rows.append([label(result), result.suite, *figures, percent(result.baseline_bandwidth.share_of_copy)])
    columns = ["setting", "suite", "draft, ms", "verify, ms", "rest, ms", "baseline step, ms", "formula's speedup",
               "measured", "base, of a copy's bandwidth"]  # fmt: skip
    section.add_table("Milliseconds per round, and the speedup they explain", columns, rows)
    rows = []
    for result in timed:
        medians = result.step_medians
        figures = (medians.round_ms, medians.verify_ms, medians.baseline_ms, medians.baseline_verify_ms)
        words = disturbance_words(result) or "-"
        rows.append([label(result), result.suite, *map(number, figures), speedup_words(medians), words])
    columns = ["setting", "suite", "round, ms", "verify, ms", "baseline step, ms", "its forward, ms",
               "speedup by medians [95 %]", "disturbed"]  # fmt: skip
    return section.add_table("Medians of steps, and what disturbed them", columns, rows)


def engines_section(results: Sequence[Result]) -> Section:
    """Other engines that were timed beside ours."""
    rows = []
    for result in (result for result in results if result.is_beside):
        ratio = ratio_words(result.ours_over_theirs, result.ours_over_theirs_ci95)
        speeds = [number(result.tokens_per_second, 1), number(result.ours_tokens_per_second, 1)]
        rows.append([label(result), result.suite, *speeds, ratio])
    columns = ["engine and drafter", "suite", "theirs, tok/s", "ours, tok/s", "ours over theirs [95 %]"]
    return Section("engines").add_table("Whole answers, same drafter, timed in turns", columns, rows)


def failed_section(results: Sequence[Result]) -> Section:
    """Prompts that are in no figure, and why."""
    counts = Counter((result.suite, failed.row, failed.reason) for result in results for failed in result.failed)
    rows = [[*key, str(count)] for key, count in counts.items()]
    caption = f"Prompts that failed, {min(len(rows), MOST_FAILED)} of {len(rows)}"
    columns = ["suite", "row", "reason", "results without it"]
    return Section("failed").add_table(caption, columns, rows[:MOST_FAILED], 3)


def environment_section(reports: Mapping[str, Report], results: Sequence[Result] = ()) -> Section:
    """Where and of what the reports were measured, by their names; and how the results were, where there are some."""
    section = Section("environment")
    targets = [asdict(report.target) for report in reports.values()]
    environments = [asdict(report.environment) for report in reports.values()]
    for caption, sides in (("Target", targets), ("Environment", environments)):
        rows = [[key.replace("_", " "), *(cell(side[key]) for side in sides)] for key in sides[0]]
        section.add_table(caption, ["key", *reports], rows, len(reports) + 1)
    shown = {key: dict.fromkeys(cell(result.to_json()[key]) for result in results) for key in SETTINGS_SHOWN}
    rows = [[key.replace("_", " "), ", ".join(values)] for key, values in shown.items() if values]
    return section.add_table("Settings", ["key", "value"], rows)
