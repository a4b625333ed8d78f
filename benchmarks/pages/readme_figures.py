"""The table and the chart of the README, from docs/results/smollm2.json, and of a GPU from gpu/report.json beside it.

    python -m headstart.benchmarks.pages.readme_figures

A test finds them stale where the results have changed since.
"""

import json
from pathlib import Path
from typing import Any

from ...base.files import write_text
from ...eval.report.charts import WIDTH, Bar, bar_chart
from ...eval.report.page import page_template

RESULTS, README, CHART = Path("docs/results/smollm2.json"), Path("README.md"), Path("docs/results/speedups.svg")
FUNCTIONS, QUESTIONS, ON_GPU = "Python functions", "GSM8K questions", "orders, on an H200 GPU"
WORK = {  # the measurements of each domain, by how their `work` begins
    FUNCTIONS: "SmolLM2-135M-Instruct, bf16, Python functions (MBPP): families beside each other",
    QUESTIONS: "headstart auto, 20 minutes, 1,500 GSM8K questions, 2026-11-26",
}
IN_TABLE = {
    "hybrid": "look-ups and EAGLE-3",
    "suffix": "look-ups in the model's answers",
    "eagle3": "EAGLE-3",
    "DSpark": "DSpark",
}
IN_CHART = {**IN_TABLE, "eagle": "EAGLE-1", "medusa": "Medusa"}


def main() -> None:
    write_text(README, with_figures(README.read_text(), table(RESULTS)))
    write_text(CHART, chart(RESULTS))


def measured(results: Path, domain: str) -> dict[str, Any]:
    """The greedy measurements of a domain, by the first word of the drafter; of several the first."""
    found: dict[str, Any] = {}
    for entry in json.loads(results.read_text()):
        if entry["work"].startswith(WORK[domain]) and not entry["temperature"]:
            found.setdefault(entry["drafter"].replace("+", " ").replace(",", " ").split()[0], entry)
    return found


def measured_on_gpu(results: Path) -> dict[str, Any]:
    """As `measured`, of the report of a whole product's run on a GPU."""
    report = json.loads((results.parent / "gpu" / "report.json").read_text())
    by_word = {one["drafter"].split("+")[0]: one for one in report["results"]}
    return {**by_word, "DSpark": by_word["block"]}  # the recipe of runs/block.yaml


def table(results: Path) -> str:
    """Markdown; a cell is empty where a drafter was not measured."""
    domains = {domain: measured(results, domain) for domain in WORK} | {ON_GPU: measured_on_gpu(results)}
    lines = [f"| drafter | {' | '.join(f'{domain}: acceptance length | speedup' for domain in domains)} |"]
    lines += ["|---" * (1 + 2 * len(domains)) + "|"]
    for key, name in IN_TABLE.items():
        lines.append(f"| {name} | {' | '.join(figures(by_drafter.get(key)) for by_drafter in domains.values())} |")
    return "\n".join([*lines, "", f"![Speedup by drafter, {FUNCTIONS}]({CHART})", ""])


def figures(entry: dict[str, Any] | None) -> str:
    """Two cells of the table; empty ones of what was not measured."""
    return " | " if entry is None else f"{entry['acceptance_length']:.2f} | {speedup(entry)}"


def chart(results: Path) -> str:
    """SVG: the speedups of all families in one domain."""
    entries = measured(results, FUNCTIONS)
    bars = [
        Bar(name, entries[key]["speedup"], speedup(entries[key]), entries[key]["speedup_ci95"])
        for key, name in IN_CHART.items()
        if key in entries
    ]
    bars.sort(key=lambda bar: -bar.value)
    picture = bar_chart(f"Speedup by drafter, {FUNCTIONS}", bars)
    return page_template("compare.svg.j2").render(charts=[picture], width=WIDTH + 20, height=20 + 34 * len(bars))


def speedup(entry: dict[str, Any]) -> str:
    low, high = entry["speedup_ci95"]
    return f"{entry['speedup']:.2f} [{low:.2f}, {high:.2f}]"


def with_figures(page: str, made: str, *, name: str = "figures") -> str:
    """The page with this between the marks of that name."""
    start, end = f"<!-- {name}: start -->\n", f"<!-- {name}: end -->\n"
    before, rest = page.split(start)
    return f"{before}{start}{made}{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    main()
