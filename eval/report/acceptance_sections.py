"""Sections of a page: acceptance by position, suite, segment, context and domain, and the trees that were drafted."""

from collections.abc import Callable, Sequence
from dataclasses import astuple

from ..measurement.breakdown import range_start
from ..measurement.metrics import AcceptancePart
from ..measurement.result import DomainPart, FixedTreeShape, Result
from .charts import Bar, Series, bar_chart, line_chart, tree_chart
from .one_result import grouped, interval_of, label, name_of, number, ratio_words, setting_of, speedup_words
from .sections import Figure, Section, by_suite


def once_per_batch_size(results: Sequence[Result]) -> list[Result]:
    """Of results that differ only in the batch size, the first: acceptance is about the same in all."""
    return list({(setting_of(result), result.suite): result for result in reversed(results)}.values())[::-1]


def acceptance_section(ours: Sequence[Result]) -> Section:
    """By draft position, suite, segment and context."""
    section = Section("acceptance")
    distinct = [result for result in once_per_batch_size(ours) if result.acceptance_length is not None]
    deepest = max((result.num_draft_tokens for result in distinct), default=0)
    positions = [str(k + 1) for k in range(deepest)]
    rows = []
    for result in distinct:
        rates = [*result.acceptance_rate, *[None] * (deepest - len(result.acceptance_rate))]
        length = ratio_words(result.acceptance_length, result.acceptance_length_ci95)
        rows.append([name_of(result), result.suite, length, *map(number, rates)])
    columns = ["setting", "suite", "length [95 %]", *(f"position {k}" for k in positions)]
    section.add_table("Acceptance by suite and draft position", columns, rows)
    suites = by_suite(distinct)
    for suite, results in suites.items():
        title, lines = f"Acceptance rate by draft position on {suite}", []
        for result in results:
            rates = [(float(k), rate) for k, rate in enumerate(result.acceptance_rate) if rate is not None]
            lines.append(Series(name_of(result), rates))
        chart = line_chart(title, lines, axis="draft position", ticks=positions, most=1.0)
        section.figures.append(Figure(f"{title}.", chart))
    bars = [length_bar(f"{name_of(result)}, {result.suite}", result) for result in distinct]
    add_lengths(section, "suite", bars if len(suites) > 1 else [], deepest)
    add_lengths(section, "segment", [bar for r in distinct for bar in part_bars(r, r.by_segment)], deepest)
    ranges = [(r, {name: r.by_context[name] for name in sorted(r.by_context, key=range_start)}) for r in distinct]
    contexts = [bar for result, parts in ranges for bar in part_bars(result, parts)]
    add_lengths(section, "context length in tokens", contexts, deepest)
    return section


def part_bars(result: Result, parts: dict[str, AcceptancePart]) -> list[Bar]:
    """Bars of a result's parts, if there are several."""
    where = f"{name_of(result)}, {result.suite}"
    return [length_bar(f"{where}: {name}", part) for name, part in parts.items()] if len(parts) > 1 else []


def add_lengths(section: Section, what: str, bars: Sequence[Bar], deepest: int) -> None:
    """Add a chart of acceptance lengths, if there is one to show."""
    if bars:
        title = f"Acceptance length by {what}"
        chart = bar_chart(title, bars, most=deepest + 1.0, mark=1.0)
        section.figures.append(Figure(f"{title}; 1 is no draft accepted.", chart))


def length_bar(name: str, part: Result | AcceptancePart | DomainPart) -> Bar:
    """An acceptance length, and over how many rounds."""
    length = part.acceptance_length or 0.0
    return Bar(name, [length], f"{length:.2f} ({part.num_rounds} rounds)")


def parts_section(what: str, ours: Sequence[Result], parts_of: Callable[[Result], dict[str, DomainPart]]) -> Section:
    """Length and speedup of each part of a suite's prompts, where there are several. Args: what: domain or turn."""
    section = Section(f"{what}s")
    parted = [result for result in ours if len(parts_of(result)) > 1]
    for result in once_per_batch_size(parted):
        where, parts = f"{name_of(result)}, {result.suite}", parts_of(result).items()
        lengths = [length_bar(one, part) for one, part in parts]
        most = result.num_draft_tokens + 1.0
        chart = bar_chart(f"Acceptance length by {what} of {where}", lengths, most=most, mark=1.0)
        section.figures.append(Figure(f"Acceptance length by {what}; 1 is no draft accepted. {where}.", chart))
        bars = [
            Bar(one, [part.speedup], speedup_words(part), interval_of(part))
            for one, part in parts
            if part.speedup is not None
        ]
        if bars:
            chart = bar_chart(f"Speedup by {what} of {where}", bars, mark=1.0)
            section.figures.append(Figure(f"Speedup by {what}, with 95 % intervals. {label(result)}.", chart))
    for suite, results in by_suite(parted).items():
        rows = [
            [label(result), one, str(part.num_prompts), number(part.acceptance_length), speedup_words(part)]
            for result in results
            for one, part in parts_of(result).items()
        ]
        columns = ["setting", what, "prompts", "length", "speedup [95 %]"]
        section.add_table(f"{what.capitalize()}s of {suite}", columns, rows)
    return section


def trees_section(ours: Sequence[Result]) -> Section:
    """Trees of fixed shape drawn, each once; the limits of dynamic ones."""
    section = Section("trees")
    rows = []
    shaped = [result for result in ours if result.tree_shape]
    for results in grouped(shaped, lambda result: str(result.tree_shape)).values():
        shape = results[0].tree_shape
        settings = "; ".join(dict.fromkeys(f"{name_of(result)}, {result.suite}" for result in results))
        if isinstance(shape, FixedTreeShape):
            chart = tree_chart(f"Draft tree of {settings}", shape.parents)
            section.figures.append(Figure(f"{settings}: {len(shape.parents)} nodes in every round.", chart))
        elif shape:
            rows.append([settings, str(shape.num_nodes), str(shape.depth), str(shape.top_k)])
    columns = ["setting", "nodes verified", "depth", "nodes expanded per level"]
    return section.add_table("Dynamic trees: another shape in every round", columns, rows, 1)


def confidence_section(ours: Sequence[Result]) -> Section:
    """The estimates of drafts beside what was accepted, by tenths of the estimate and by slot."""
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
        every = [name_of(result), result.suite, "all", str(sum(told.num_drafts)), "-", "-"]
        rows.append([*every, number(told.error, 3), number(told.error_by_chance, 3)])
        for k, slot in enumerate(told.by_slot):
            figures = (slot.estimated, slot.accepted, slot.error, slot.error_by_chance)
            words = [number(figure, 3) for figure in figures]
            rows.append([name_of(result), result.suite, str(k + 1), str(slot.num_drafts), *words])
    columns = ["setting", "suite", "position", "drafts", "estimated", "accepted", "error", "by chance"]
    return section.add_table("Calibration error of the estimates by draft position", columns, rows, 3)


def forced_section(ours: Sequence[Result]) -> Section:
    """Teacher-forced against decoded acceptance lengths."""
    rows = []
    for result in once_per_batch_size(ours):
        forced, decoded = result.teacher_forced_acceptance_length, result.acceptance_length
        if forced is not None and decoded is not None:
            rows.append([name_of(result), result.suite, number(forced), number(decoded), f"{decoded - forced:+.2f}"])
    columns = ["setting", "suite", "teacher-forced", "decoded", "difference"]
    return Section("teacher-forced").add_table("Acceptance length, teacher-forced and decoded", columns, rows)


def conventions_section(ours: Sequence[Result]) -> Section:
    """The same counts in other engines' words."""
    rows = []
    for result in once_per_batch_size(ours):
        figures = (result.acceptance_length, *astuple(result.conventions))
        words = (" ".join(map(number, figure)) if isinstance(figure, list) else number(figure) for figure in figures)
        rows.append([name_of(result), result.suite, *words])
    columns = ["setting", "suite", "ours, EAGLE's tau", "vLLM mean acceptance length", "vLLM per position",
               "SGLang accept_length", "EAGLE n-alpha"]  # fmt: skip
    return Section("conventions").add_table("Acceptance in other engines' conventions", columns, rows)
