"""The report page's parts: each a section of text, charts and tables, from the results alone."""

from collections.abc import Sequence
from typing import Any

from .charts import Bar, Interval, Line, bar_chart, line_chart, tree_chart
from .document import lossless_words, number
from .page_parts import Figure, Section, Table
from .recommendation import Result, label, setting, speedup_words


def suites_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by suite, in the report's order."""
    found: dict[str, list[Result]] = {}
    for entry in results:
        found.setdefault(entry["suite"], []).append(entry)
    return found


def once_per_batch_size(results: Sequence[Result]) -> list[Result]:
    """Of results that differ in nothing but the batch size, the first: acceptance is about the same in all."""
    return list({(setting(entry), entry["suite"]): entry for entry in reversed(results)}.values())[::-1]


def interval_of(entry: Result) -> Interval | None:
    low, high = entry["speedup_ci95"]
    return None if low is None else (low, high)


def settings_section(results: Sequence[Result]) -> Section:
    """Every result in a row."""
    columns = [
        "setting", "suite", "prompts", "length", "speedup [95 %]", "p10 / median / p90", "with prefill",
        "tok/s, base's", "first token, base's, ms", "lossless",
    ]  # fmt: skip
    rows = [
        [
            label(entry),
            entry["suite"],
            str(entry["num_prompts"]),
            number(entry["acceptance_length"]),
            speedup_words(entry),
            " / ".join(number(entry[f"speedup_{which}"]) for which in ("p10", "median", "p90")),
            number(entry["end_to_end_speedup"]),
            ", ".join(number(entry[key], 1) for key in ("tokens_per_second", "baseline_tokens_per_second")),
            ", ".join(number(entry[key], 1) for key in ("ttft_ms", "baseline_ttft_ms")),
            lossless_words(entry),
        ]
        for entry in results
    ]
    text = (
        "Length is acceptance_length: tokens committed per forward of the target, bonus token included. Speeds are of "
        "decoding, prefill left out; p10, median and p90 are speedups of single prompts (of batches, where several "
        "rows are decoded at a time); the base is the same engine without drafts. Lossless: greedy texts identical to "
        "the base's; of sampled ones, how often chance alone takes them so far from the target's distribution (p)."
    )
    return Section("settings", "All settings", [text], [], [Table("Every setting that was measured", columns, rows, 2)])


def speed_section(ours: Sequence[Result]) -> Section:
    """Speedups with their intervals, one figure per suite; against batch size where there are several."""
    most = max([one[1] for one in map(interval_of, ours) if one], default=1.0)
    figures = []
    for suite, entries in suites_of(ours).items():
        bars = [
            Bar(label(entry), [entry["speedup"] or 0.0], speedup_words(entry), interval_of(entry)) for entry in entries
        ]
        caption = f"Speedup on {suite}, with 95 % intervals. Right of the line at 1: faster than no drafts."
        figures.append(Figure(caption, bar_chart(f"Speedup on {suite}", bars, most=most, mark=1.0)))
    for suite, entries in suites_of(ours).items():
        sizes = sorted({entry["batch_size"] for entry in entries})
        if len(sizes) < 2:
            continue
        lines: dict[Any, list[Result]] = {}
        for entry in entries:
            lines.setdefault(setting(entry), []).append(entry)
        drawn = [
            Line(
                label(same[0], with_batch=False),
                [next((one["speedup"] for one in same if one["batch_size"] == size), None) for size in sizes],
                [next((interval_of(one) for one in same if one["batch_size"] == size), None) for size in sizes],
            )
            for same in lines.values()
        ]
        chart = line_chart(
            f"Speedup by batch size on {suite}", list(map(str, sizes)), drawn, axis="batch size", most=most, mark=1.0
        )
        figures.append(Figure(f"Speedup by batch size on {suite}, with 95 % intervals.", chart))
    return Section("speed", "Speedup", [], figures)


def acceptance_section(ours: Sequence[Result]) -> Section:
    """By draft position, suite, segment and context."""
    text = (
        "The rate at a position is conditional: accepted, given that all before it were. The batch size changes it by "
        "chance alone, so the first of several stands for all."
    )
    section = Section("acceptance", "Where drafts are accepted", [text])
    distinct = [entry for entry in once_per_batch_size(ours) if entry["acceptance_length"] is not None]
    deepest = max((entry["num_draft_tokens"] for entry in distinct), default=0)
    positions = [str(k + 1) for k in range(deepest)]
    rows = [
        [name(entry), entry["suite"], number(entry["acceptance_length"]), *padded(entry["acceptance_rate"], deepest)]
        for entry in distinct
    ]
    if rows:
        columns = ["setting", "suite", "length", *(f"position {k}" for k in positions)]
        section.tables.append(Table("Acceptance by suite and draft position", columns, rows, 2))
    for suite, entries in suites_of(distinct).items():
        lines = [
            Line(name(entry), [*entry["acceptance_rate"], *[None] * (deepest - len(entry["acceptance_rate"]))])
            for entry in entries
        ]
        chart = line_chart(
            f"Acceptance rate by draft position on {suite}", positions, lines, axis="draft position", most=1.0
        )
        section.figures.append(Figure(f"Acceptance rate by draft position on {suite}.", chart))
    most = max((entry["num_draft_tokens"] + 1.0 for entry in distinct), default=1.0)
    if len(suites_of(distinct)) > 1:
        bars = [length_bar(f"{name(entry)}, {entry['suite']}", entry) for entry in distinct]
        chart = bar_chart("Acceptance length by suite", bars, most=most, mark=1.0)
        section.figures.append(Figure("Acceptance length by suite; 1 is no draft accepted.", chart))
    for key, what in (("by_segment", "segment"), ("by_context", "context length in tokens")):
        bars = [
            length_bar(f"{name(entry)}, {entry['suite']}: {part}", counted)
            for entry in distinct
            if len(entry[key]) > 1
            for part, counted in sorted(entry[key].items(), key=lambda item: leading_number(item[0]))
        ]
        if bars:
            chart = bar_chart(f"Acceptance length by {what}", bars, most=most, mark=1.0)
            section.figures.append(Figure(f"Acceptance length by {what}; 1 is no draft accepted.", chart))
    return section


def name(entry: Result) -> str:
    return label(entry, with_batch=False)


def padded(rates: Sequence[float | None], count: int) -> list[str]:
    return [*(number(rate) for rate in rates), *["-"] * (count - len(rates))]


def length_bar(words: str, part: dict[str, Any]) -> Bar:
    length = part["acceptance_length"] or 0.0
    return Bar(words, [length], f"{length:.2f} ({part['num_rounds']} rounds)")


def percent(share: float | None) -> str:
    """A share; a decimal below ten percent."""
    return "-" if share is None else f"{share:.{0 if share >= 0.1 else 1}%}"


def leading_number(words: str) -> int:
    """For sorting: `512-2047` by its first number, names before all."""
    first = words.split("-")[0]
    return int(first) if first.isdecimal() else -1


def time_section(ours: Sequence[Result]) -> Section:
    """What a round's milliseconds go into, beside a baseline step."""
    text = (
        "Means per round. The formula's speedup is length x baseline step / (draft + verify + rest): what these times "
        "explain of the measured one. The difference is last rounds that are cut, and rows of a batch that end early."
    )
    section = Section("time", "Where a round's time goes", [text])
    timed = [entry for entry in ours if entry["timing"]["draft_ms"] is not None]
    keys = ("draft_ms", "verify_ms", "overhead_ms")
    for suite, entries in suites_of(timed).items():
        bars: list[Bar] = []
        for entry in entries:
            parts = [entry["timing"][key] for key in keys]
            bars.append(Bar(label(entry), parts, f"{sum(parts):.2f} ms"))
            base = entry["timing"]["baseline_ms"]
            bars.append(Bar("its baseline, one step", [0, 0, 0, base], f"{base:.2f} ms"))
        caption = f"A round on {suite}, and a step of its baseline."
        chart = bar_chart(f"Milliseconds per round on {suite}", bars)
        section.figures.append(Figure(caption, chart, ("draft", "verify", "rest", "baseline step")))
    rows = [
        [
            label(entry),
            entry["suite"],
            *(number(entry["timing"][key]) for key in (*keys, "baseline_ms")),
            number(entry["timing"]["formula_speedup"]),
            number(entry["speedup"]),
            percent(entry["baseline_bandwidth"]["share_of_copy"]),
        ]
        for entry in timed
    ]
    columns = ["setting", "suite", "draft, ms", "verify, ms", "rest, ms", "baseline step, ms", "formula's speedup",
               "measured", "base, of a copy's bandwidth"]  # fmt: skip
    if rows:
        section.tables.append(Table("Milliseconds per round, and the speedup they explain", columns, rows, 2))
    return section


def trees_section(ours: Sequence[Result]) -> Section:
    """Trees of fixed shape drawn, each once; the limits of dynamic ones."""
    text = "From the last committed token on the left; of the guesses behind a token, the likelier stand above."
    section = Section("trees", "Draft trees", [text])
    shapes: dict[str, list[Result]] = {}
    for entry in ours:
        if entry["tree_shape"]:
            shapes.setdefault(str(entry["tree_shape"]), []).append(entry)
    rows = []
    for same in shapes.values():
        shape = same[0]["tree_shape"]
        whose = "; ".join(dict.fromkeys(f"{name(entry)}, {entry['suite']}" for entry in same))
        if "parents" in shape:
            chart = tree_chart(f"Draft tree of {whose}", shape["parents"])
            section.figures.append(Figure(f"{whose}: {len(shape['parents'])} nodes in every round.", chart))
        else:
            rows.append([whose, *(str(shape[key]) for key in ("num_nodes", "depth", "top_k"))])
    if rows:
        columns = ["setting", "nodes verified", "depth", "nodes expanded per level"]
        section.tables.append(Table("Dynamic trees: another shape in every round", columns, rows))
    return section


def forced_section(ours: Sequence[Result]) -> Section:
    """What training sees against what decoding reaches."""
    text = (
        "On the text that was decoded, the head's training-time view should predict what decoding reaches; last rounds "
        "that are cut make a small difference. A real gap is a fault, not a weakness of the head."
    )
    rows = [
        [
            name(entry),
            entry["suite"],
            number(entry["teacher_forced_acceptance_length"]),
            number(entry["acceptance_length"]),
            f"{entry['acceptance_length'] - entry['teacher_forced_acceptance_length']:+.2f}",
        ]
        for entry in once_per_batch_size(ours)
        if entry["teacher_forced_acceptance_length"] is not None
    ]
    columns = ["setting", "suite", "teacher-forced", "decoded", "difference"]
    tables = [Table("Acceptance length, predicted and decoded", columns, rows, 2)] if rows else []
    return Section("teacher-forced", "Training's view and decoding", [text], [], tables)


def conventions_section(ours: Sequence[Result]) -> Section:
    """The same counts in other engines' words."""
    text = (
        "The same rounds, counted as others do. vLLM's rates per position are joint (all up to there accepted), ours "
        "and EAGLE's n-alpha conditional; EAGLE's tau is our length."
    )
    rows = [
        [
            name(entry),
            entry["suite"],
            number(entry["acceptance_length"]),
            number(entry["conventions"]["vllm_mean_acceptance_length"]),
            " ".join(map(number, entry["conventions"]["vllm_per_position"])),
            number(entry["conventions"]["sglang_accept_length"]),
            " ".join(map(number, entry["conventions"]["eagle_n_alpha"])),
        ]
        for entry in once_per_batch_size(ours)
    ]
    columns = ["setting", "suite", "ours, EAGLE's tau", "vLLM mean acceptance length", "vLLM per position",
               "SGLang accept_length", "EAGLE n-alpha"]  # fmt: skip
    tables = [Table("Acceptance in other engines' conventions", columns, rows, 2)] if rows else []
    return Section("conventions", "In other engines' words", [text], [], tables)


def comparison_section(results: Sequence[Result]) -> Section:
    """Other engines that were timed beside ours."""
    rows = []
    for entry in results:
        if entry["engine"] != "headstart":
            low, high = entry["ours_over_theirs_ci95"]
            ratio = f"{number(entry['ours_over_theirs'])} [{number(low)}, {number(high)}]"
            speeds = [number(entry[key], 1) for key in ("tokens_per_second", "ours_tokens_per_second")]
            rows.append([label(entry), entry["suite"], *speeds, ratio])
    columns = ["engine and drafter", "suite", "theirs, tok/s", "ours, tok/s", "ours over theirs [95 %]"]
    tables = [Table("Whole answers, same drafter, timed in turns", columns, rows, 2)] if rows else []
    return Section("engines", "Beside other engines", ["Above 1 our engine is the faster."], [], tables)


def environment_section(report: dict[str, Any]) -> Section:
    """Where and of what this was measured."""
    results, tables = report["results"], []
    for caption, values in (("Target", report["target"]), ("Environment", report["environment"])):
        rows = [[key.replace("_", " "), words(value)] for key, value in values.items()]
        tables.append(Table(caption, ["key", "value"], rows, num_labels=2))
    keys = ("temperature", "top_k", "top_p", "accept", "steps", "max_new_tokens", "num_repeats",
            "system", "thinking", "template_hash", "suite_digest")  # fmt: skip
    ways = [[key.replace("_", " "), ", ".join(dict.fromkeys(words(one.get(key)) for one in results))] for key in keys]
    tables.append(Table("Settings", ["key", "value"], ways, num_labels=2))
    return Section("environment", "Where this was measured", [], [], tables)


def words(value: Any) -> str:
    """A value as a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
