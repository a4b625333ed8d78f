"""Sections of a page: acceptance by position, suite, segment, context and domain; and the estimates of drafts."""

import re
from collections.abc import Sequence

from ..figures.metrics import AcceptancePart
from ..measurement.breakdown import context_label, range_start
from ..measurement.result import Result
from ..suites.prompts import PromptSource
from .causes.findings import merged
from .charts import Bar, Series, bar_chart, line_chart
from .results.one_result import grouped, label, name_of, number, ratio_words, setting_of, speedup_words
from .sections import Figure, Section, by_suite


def once_per_batch_size(results: Sequence[Result]) -> list[Result]:
    """Of results that differ only in the batch size, the first: acceptance is about the same in all."""
    return list({(setting_of(result), result.suite): result for result in reversed(results)}.values())[::-1]


def acceptance_section(ours: Sequence[Result]) -> Section:
    """By suite and draft position, beside the teacher-forced length; by segment and context."""
    section = Section("acceptance")
    distinct = [result for result in once_per_batch_size(ours) if result.acceptance_length is not None]
    deepest = max((result.num_draft_tokens for result in distinct), default=0)
    rows = []
    for result in distinct:
        rates = [*result.acceptance_rate, *[None] * (deepest - len(result.acceptance_rate))]
        length = ratio_words(result.acceptance_length, result.acceptance_length_ci95)
        forced = number(result.teacher_forced_acceptance_length)
        rows.append([name_of(result), result.suite, length, forced, *map(number, rates)])
    columns = ["setting", "suite", "length [95 %]", "teacher-forced", *(f"position {k + 1}" for k in range(deepest))]
    section.add_table("Acceptance by suite and draft position", columns, rows)
    add_steps(section, distinct, deepest)
    add_lengths(section, "segment", [bar for r in distinct for bar in part_bars(r, r.by_segment)], deepest)
    contexts = [bar for result in distinct for bar in part_bars(result, same_ranges(result.by_context))]
    add_lengths(section, "context length in tokens", contexts, deepest)
    return section


def add_steps(section: Section, results: Sequence[Result], deepest: int) -> None:
    """Add a chart for each suite that was measured under several checkpoints of the target, in whose names stand the
    steps of its training: lengths over these, the target itself at 0."""
    points = []
    for result in results:
        suite, _, state = result.suite.partition(" under ")
        if number_in_name := re.search(r"\d+$", state or "0"):
            points.append((suite, name_of(result), float(number_in_name[0]), result.acceptance_length or 0.0))
    for suite, same in grouped(points, lambda point: point[0]).items():
        if len({step for _, _, step, _ in same}) > 2:
            drafters = grouped(same, lambda point: point[1]).items()
            lines = [Series(name, sorted((step, length) for _, _, step, length in its)) for name, its in drafters]
            title = f"Acceptance length on {suite} by checkpoint"
            chart = line_chart(title, lines, axis="step of the target's training", most=deepest + 1.0, mark=1.0)
            section.figures.append(Figure(f"{title}; 1 is no draft accepted.", chart))


def same_ranges(by_context: dict[str, AcceptancePart]) -> dict[str, AcceptancePart]:
    """The parts by ranges that are the same for every drafter, shortest first: a head's are also split where its
    training rows end."""
    names, plain = sorted(by_context, key=range_start), context_label()(PromptSource(0, ""), [])
    ranges = grouped(names, lambda name: plain(range_start(name)))
    found = {name: merged([by_context[one] for one in same]) for name, same in ranges.items()}
    return {name: part for name, part in found.items() if part is not None}


def part_bars(result: Result, parts: dict[str, AcceptancePart]) -> list[Bar]:
    """Bars of a result's parts, if there are several: acceptance lengths, and over how many rounds."""
    if len(parts) < 2:
        return []
    lengths = [(name, part.acceptance_length or 0.0, part.num_rounds) for name, part in parts.items()]
    where = f"{name_of(result)}, {result.suite}"
    return [Bar(f"{where}: {name}", length, f"{length:.2f} ({num} rounds)") for name, length, num in lengths]


def add_lengths(section: Section, what: str, bars: Sequence[Bar], deepest: int) -> None:
    """Add a chart of acceptance lengths, if there is one to show."""
    if bars:
        title = f"Acceptance length by {what}"
        chart = bar_chart(title, bars, most=deepest + 1.0)
        section.figures.append(Figure(f"{title}; 1 is no draft accepted.", chart))


def domains_section(ours: Sequence[Result]) -> Section:
    """Length and speedup on each domain, and on each kind and number of recorded turns, where there are several."""
    section = Section("domains")
    for what, parts_of in (("domain", lambda result: result.by_domain), ("turn", lambda result: result.by_turn)):
        for suite, results in by_suite([result for result in ours if len(parts_of(result)) > 1]).items():
            rows = [
                [label(result), name, str(part.num_prompts), number(part.acceptance_length), speedup_words(part)]
                for result in results
                for name, part in parts_of(result).items()
            ]
            columns = ["setting", what, "prompts", "length", "speedup [95 %]"]
            section.add_table(f"{what.capitalize()}s of {suite}", columns, rows)
    return section


def confidence_section(ours: Sequence[Result]) -> Section:
    """The estimates of drafts beside what was accepted, by tenths of the estimate."""
    section, rows = Section("confidence"), []
    for result in once_per_batch_size(ours):
        told, where = result.calibration, f"{name_of(result)}, {result.suite}"
        if told is None:
            continue
        lines = [
            Series(name, [(float(i), share) for i, share in enumerate(shares) if share is not None])
            for name, shares in (("estimated", told.estimated), ("accepted", told.accepted))
        ]
        ticks = [f".{i}" for i in range(len(told.num_drafts))]
        chart = line_chart(f"Estimated and accepted of {where}", lines, axis="estimate from", ticks=ticks, most=1.0)
        section.figures.append(Figure(f"Mean estimate and share accepted, by tenths of the estimate. {where}.", chart))
        errors = number(told.error, 3), number(told.error_by_chance, 3)
        rows.append([name_of(result), result.suite, str(sum(told.num_drafts)), *errors])
    columns = ["setting", "suite", "drafts", "error", "by chance"]
    return section.add_table("Calibration error of the estimates", columns, rows)
