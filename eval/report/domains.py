"""The report page's sections on the prompts themselves: figures by domain, and prompts that could not be measured."""

from collections.abc import Sequence

from .charts import Bar, bar_chart
from .document import number
from .page_parts import Figure, Section, Table
from .recommendation import Result, label, speedup_words
from .sections import length_bar, name, once_per_batch_size, suites_of

MOST_FAILED = 20  # shown; report.json has all


def domains_section(ours: Sequence[Result]) -> Section:
    """Length and speedup of each domain, where a suite has several."""
    text = (
        "What the rows of a suite call their category. The speedup of a domain is that of its own prompts (of batches "
        "wholly of it), at least two; few prompts make its interval wide."
    )
    section = Section("domains", "By domain", [text])
    parted = [entry for entry in ours if len(entry.get("by_domain", ())) > 1]
    for entry in once_per_batch_size(parted):
        what = f"{name(entry)}, {entry['suite']}"
        lengths = [length_bar(domain, part) for domain, part in entry["by_domain"].items()]
        most = entry["num_draft_tokens"] + 1.0
        chart = bar_chart(f"Acceptance length by domain of {what}", lengths, most=most, mark=1.0)
        section.figures.append(Figure(f"Acceptance length by domain; 1 is no draft accepted. {what}.", chart))
        bars = [
            Bar(domain, [part["speedup"]], speedup_words(part), tuple(part["speedup_ci95"]))
            for domain, part in entry["by_domain"].items()
            if part["speedup"] is not None
        ]
        if bars:
            chart = bar_chart(f"Speedup by domain of {what}", bars, mark=1.0)
            section.figures.append(Figure(f"Speedup by domain, with 95 % intervals. {label(entry)}.", chart))
    for suite, entries in suites_of(parted).items():
        rows = [
            [label(entry), domain, str(part["num_prompts"]), number(part["acceptance_length"]), speedup_words(part)]
            for entry in entries
            for domain, part in entry["by_domain"].items()
        ]
        columns = ["setting", "domain", "prompts", "length", "speedup [95 %]"]
        section.tables.append(Table(f"Domains of {suite}", columns, rows, 2))
    return section


def failed_section(results: Sequence[Result]) -> Section:
    """Prompts that are in no figure, and why."""
    found: dict[tuple[str, str, str], int] = {}
    for entry in results:
        for one in entry.get("failed", ()):
            key = entry["suite"], one["row"], one["reason"]
            found[key] = found.get(key, 0) + 1
    rows = [[*key, str(count)] for key, count in found.items()]
    columns = ["suite", "row", "reason", "results without it"]
    caption = f"Prompts that failed, {min(len(rows), MOST_FAILED)} of {len(rows)}"
    tables = [Table(caption, columns, rows[:MOST_FAILED], 3)] if rows else []
    return Section("failed", "Prompts that failed", ["They are in no figure; all others stand."], [], tables)
