"""The report of a measurement in servers: report.json, report.html, and the sentence that stands first in them."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ... import __version__
from ...base.errors import BadInput
from ...base.files import write_json, write_text
from ...base.jsonl import loads
from ...base.typed import read_json
from ...engines.servers.registry import SERVER_ENGINES
from ..figures.environment import device_name
from ..figures.metrics import LEAST_TIMED
from ..served.figures import Percentiles, SideFigures
from ..served.load import ARRIVING
from ..served.questions import unreadable_words
from ..served.served_result import DRAFTS_TOO, ITS_OWN, ServedResult, deployable, lower_end_among
from ..served.text_check import TextCheck
from .charts import Series, line_chart
from .page import page_template
from .results.document import SCHEMA_VERSION, short_name
from .results.drafter_words import served_words
from .results.one_result import grouped, learnt_text, number, ratio_words
from .sections import Figure, Section

FEW_QUESTIONS = 8  # of fewer, figures over blocks of time say little


@dataclass(frozen=True)
class ServedReport:
    """environment: of this machine, which asked; the servers may be elsewhere."""

    target: str
    environment: dict[str, Any]
    results: list[ServedResult]

    @classmethod
    def of(cls, target: str, results: list[ServedResult]) -> "ServedReport":
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        told = {"headstart": __version__, "device": device, "num_cpus": os.cpu_count(), "platform": platform.platform()}
        return cls(target, told, results)

    def to_json(self) -> dict[str, Any]:
        told = {"schema_version": SCHEMA_VERSION, "environment": self.environment, "target": self.target}
        return {**told, "served": [asdict(result) for result in self.results]}


def read_served(path: Path) -> ServedReport:
    """report.json of a measurement in servers. Raises BadInput if the file is none of this schema version."""
    try:
        document = loads(path.read_text())
        version, results = document["schema_version"], document["served"]
        target, environment = document["target"], document["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: no report of a server: {type(error).__name__} {error}") from error
    if version != SCHEMA_VERSION or not isinstance(results, list):
        raise BadInput(f"{path}: schema_version {version}, expected {SCHEMA_VERSION} and a list of results")
    typed = [read_json(ServedResult, entry, where=f"{path}: served.{i}") for i, entry in enumerate(results)]
    return ServedReport(target, environment, typed)


def sentences(results: Sequence[ServedResult]) -> list[str]:
    """One for each way of drafting: what to do at which load."""
    found = []
    for drafter, same in grouped(results, lambda result: result.drafter).items():
        title = SERVER_ENGINES[same[0].engine].title
        beside = "" if same[0].is_beside_none else f", beside {served_words(same[0].baseline_drafter)}"
        told = "; ".join(verdict(result, len(results)) for result in same)
        if any(doubt.startswith(DRAFTS_TOO) for result in same for doubt in result.doubts):
            beside = ", beside a server that drafts too"
        found.append(f"{title} with {served_words(drafter)}{beside}: {told}.")
    return found


def measured_schedule(results: Sequence[ServedResult]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, K] as measured at each concurrency, up to
    the next one; K is 0 where no interval proves a gain. Of the drafter with the best figure: a server has one."""
    known = [result for result in results if len(result.order) >= 2 * LEAST_TIMED or result.load.is_single]
    closed = [result for result in known if result.load.rate is None and result.num_draft_tokens]
    proved = deployable(closed)
    if not proved:
        return []
    best = max(proved, key=lambda result: result.speedup or 0.0).drafter.partition(" at K ")[0]
    same = [result for result in closed if result.drafter.partition(" at K ")[0] == best]
    sizes = sorted({result.load.concurrency for result in same})
    ranges: list[list[int]] = []
    for size, following in zip(sizes, [*sizes[1:], sizes[-1] + 1], strict=True):
        here = [result for result in same if result.load.concurrency == size and result in proved]
        chosen = max(here, key=lambda result: result.speedup or 0.0).num_draft_tokens if here else 0
        if ranges and ranges[-1][2] == chosen:
            ranges[-1][1] = following - 1
        else:
            ranges.append([size if ranges else 1, following - 1, chosen or 0])
    return ranges


def schedule_line(results: Sequence[ServedResult]) -> str:
    """What vLLM is told of it; empty where nothing pays, or one K pays everywhere."""
    is_whole = results[0].engine == "vllm" and results[0].is_beside_none
    ranges = measured_schedule(results) if is_whole else []
    if len(ranges) < 2:
        return ""
    keys = {"num_speculative_tokens": max(part[2] for part in ranges), "num_speculative_tokens_per_batch_size": ranges}
    return f"vLLM, in --speculative-config: {json.dumps(keys)[1:-1]}"


def verdict(result: ServedResult, num_results: int) -> str:
    """Says in words what was found under one load, as one of so many results."""
    low, high = result.speedup_ci95
    sides = ("baseline", result.baseline), ("with drafts", result.drafted)
    if late := " and ".join(name for name, side in sides if not side.keeps_up):
        return f"{result.load.name}: the server cannot keep this rate ({late}), so its times are those of a queue"
    if result.speedup is None:
        return f"{result.load.name}: nothing was measured"
    if low is None or high is None:
        return f"{result.load.name}: {result.speedup:.2f} times as fast, too few answers for an interval"
    figures = f"{result.speedup:.2f} times as fast [{low:.2f}, {high:.2f}]"
    return f"{result.load.name}: {figures}{advice_behind(result, low, high, num_results)}"


def advice_behind(result: ServedResult, low: float, high: float, num_results: int) -> str:
    """What follows from a measured interval, the gravest first; empty where it is a gain without a doubt."""
    if result.loses_answers:
        return ", but more questions fail with drafts: do not deploy"
    if result.texts and result.texts.num_wrong:
        return f", but {result.texts.num_wrong} texts are not the target's own: do not deploy"
    if low > 1 and result.rests_on_loops(1):
        return ", but only by texts that loop: do not deploy on this alone"
    if lower_end_among(result, num_results) > 1 and not result.rests_on_loops(num_results):
        return ""
    if high < 1:
        return ", leave drafts off" if result.is_beside_none else ", slower"
    return ", so no difference is proved" + (f" among {num_results} results" if low > 1 else "")


def write_served(folder: Path, report: ServedReport, *, command: str = "headstart eval") -> Path:
    """Write report.json and report.html; returns the page's path. Args: command: that measured, for the heading."""
    write_json(folder / "report.json", report.to_json())
    return write_text(folder / "report.html", render_served(report, command))


def render_served(report: ServedReport, command: str) -> str:
    """The page. No script is in it, and nothing is fetched."""
    results = report.results
    return page_template("served.html.j2").render(
        command=command,
        target=short_name(report.target),
        environment=report.environment,
        sentences=sentences(results),
        pays=bool(deployable(results)),
        schedule=schedule_line(results),
        cautions=cautions(results),
        sections=[load_section(results), latency_section(results), client_section(results)],
    )


def load_section(results: Sequence[ServedResult]) -> Section:
    section = Section("served")
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        for name, side in ((result.baseline_drafter, result.baseline), (result.drafter, result.drafted)):
            if side.user_tokens_per_second and side.tokens_per_second:
                at = lines.setdefault(served_words(name), {}).setdefault(result.load.name, [])
                at.append((side.user_tokens_per_second, side.tokens_per_second))
    if lines:
        caption = (
            "Up: tokens per second of the machine; right: of one user. Each point is one load; up and right is better."
        )
        series = [Series(name, sorted(map(mean_point, loads.values()))) for name, loads in lines.items()]
        section.figures.append(Figure(caption, line_chart(caption, series, axis="tokens per second of one user")))
    rows = []
    for result in results:
        accepted = result.acceptance
        rates = " ".join(map(number, accepted.acceptance_rate)) if accepted else ""
        rows.append([
            served_words(result.drafter), result.load.name, ratio_words(result.speedup, result.speedup_ci95),
            both(result.baseline.tokens_per_second, result.drafted.tokens_per_second),
            both(result.baseline.user_tokens_per_second, result.drafted.user_tokens_per_second),
            number(accepted and accepted.acceptance_length), rates or "-", text_words(result),
        ])  # fmt: skip
    columns = [
        "drafts",
        "load",
        "speedup [95 %]",
        "tokens/s",
        "tokens/s per user",
        "length",
        "rate by position",
        "texts",
    ]
    return section.add_table("Baseline -> with these drafts", columns, rows)


def mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of one side under one load: a baseline is measured beside each way of drafting."""
    return fmean(x for x, _ in points), fmean(y for _, y in points)


def sides_of(results: Sequence[ServedResult]) -> list[tuple[list[str], SideFigures]]:
    """Both sides of each result, behind the words that stand before their figures."""
    return [
        ([served_words(result.drafter), result.load.name, name], side)
        for result in results
        for name, side in (("baseline", result.baseline), ("with drafts", result.drafted))
    ]


def latency_section(results: Sequence[ServedResult]) -> Section:
    rows = [
        [*words, percentiles(side.ttft_ms), percentiles(side.tpot_ms), number(side.goodput)]
        for words, side in sides_of(results)
    ]
    columns = ["drafts", "load", "side", "first token, ms", "per further token, ms", "goodput, questions/s"]
    return Section("latency").add_table("p50, p90, p99", columns, rows, 3)


def client_section(results: Sequence[ServedResult]) -> Section:
    rows = []
    for words, side in sides_of(results):
        counts = map(str, (side.num_answers, side.num_failed, side.num_repeated))
        rows.append([*words, *counts, percentiles(side.client_late_ms), f"{side.client_cpu:.0%}"])
    columns = ["drafts", "load", "side", "answers", "failed", "repeated", "client late, ms", "client's core"]
    section = Section("client").add_table("Our own client", columns, rows, 3)
    servers = [
        pair
        for result in results
        for pair in zip(map(served_words, (result.baseline_drafter, result.drafter)), result.commands, strict=True)
    ]
    return section.add_table("Servers", ["side", "command or address"], list(map(list, dict.fromkeys(servers))), 2)


def unproved_words(texts: TextCheck) -> str:
    num = f"{texts.not_proved} texts differ and"
    if texts.is_other:
        return (
            f"{num} cannot be proved: without drafts too the server's texts are not those of this target (packed "
            "weights, a schema, an adapter?)"
        )
    return f"{num} were not held against the target"


def cautions(results: Sequence[ServedResult], *, drafter: str = "") -> list[str]:
    """What a reader must know beside the figures, each once. Args: drafter: of one alone; empty: of all."""
    measured = [result for result in results if not drafter or result.drafter == drafter]
    best = max(deployable(results), key=lambda one: one.speedup_ci95[0] or 0.0, default=None)
    told = dict[str, list[str]]()
    for result in measured:
        found = cautions_of(result)
        if result is best and len(results) > 1:
            low = f"with that allowed for, its lower end is {lower_end_among(result, len(results)):.2f}"
            found.insert(0, f"it is the best of {len(results)} results: {low}")
        for line in found:
            told.setdefault(line, []).append(f"{served_words(result.drafter)}, {result.load.name}")
    return [
        f"{'in all' if len(places) == len(measured) > 1 else '; '.join(places)}: {line}"
        for line, places in told.items()
    ]


def cautions_of(result: ServedResult) -> list[str]:
    """Those of one result, without its name."""
    found = list[str]()
    if result.prompts.other:
        others = f"{result.prompts.other} prompts ({result.prompts.first_other} first)"
        found.append(f"{others} are other ids in the server than by the target's template here")
    if result.prompts.unknown:
        found.append(f"{result.prompts.unknown} prompts have no ids here or there to tell if they are alike")
    found += filter(None, [*result.doubts, learnt_text(result.learnt)])
    most = max(result.baseline.most_in_flight, result.drafted.most_in_flight)
    if result.load.rate is not None and f"-np {ARRIVING} " in result.commands[0] and most > ARRIVING:
        found.append(f"{most} questions were in flight, of which {ARRIVING} have a slot; the others wait")
    if result.num_questions < FEW_QUESTIONS:
        found.append(f"only {result.num_questions} different questions, which says little of others")
    if result.engine == "openai":
        found.append("every block asks the same prompts; a prefix cache that the server has knows them")
    if result.is_flattered:
        found.append("its look-ups keep earlier answers, those to these prompts too: slower on new ones")
    if result.drafter.startswith(ITS_OWN):
        found.append("if it looks up earlier answers, these figures flatter: it has answered these prompts")
    if (left := result.repetition.without_loops) is not None:
        loops = f"{result.repetition.num_looping} of {len(result.repetition.texts)} texts repeat more than half of"
        ratio = ratio_words(left.speedup, left.speedup_ci95)
        found.append(f"{loops} their 4-grams; the speedup of the others is {ratio}")
    if result.acceptance is None:
        why = "it does not draft, or does not show /metrics"
        found.append(f"the server counts no drafts ({why}), so the acceptance is not known")
    if result.texts and result.texts.num_wrong:
        found.append(f"{result.texts.num_wrong} texts are not the target's own, and not by rounding")
    if result.texts and result.texts.not_proved:
        found.append(unproved_words(result.texts))
    if result.failed:
        first = result.failed[0]
        more = ", more of them with drafts: do not deploy" if result.loses_answers else ""
        found.append(f"{len(result.failed)} questions failed{more}; {first.row} first: {first.reason}")
    if result.unreadable:
        found.append(unreadable_words(result.unreadable))
    if repeated := result.baseline.num_repeated + result.drafted.num_repeated:
        found.append(f"{repeated} questions had to be repeated; the waits are in their times")
    if not result.at_once:
        found.append(f"one server at a time, in the order {result.order}")
    return found


def show_served(report: ServedReport, page: Path) -> None:
    from ...base.terminal import PlainConsole

    console = PlainConsole()
    for line in [*sentences(report.results), *filter(None, [schedule_line(report.results)]), *cautions(report.results)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {page.with_name('report.json')}, as a page to {page}", soft_wrap=True)


def text_words(result: ServedResult) -> str:
    if result.texts is None:
        return "sampled"
    checked = result.texts.report
    return f"{checked.identical} of {checked.checked} equal" + (f", {checked.proved} proved" if checked.proved else "")


def both(before: float | None, after: float | None) -> str:
    return f"{number(before)} -> {number(after)}"


def percentiles(values: Percentiles) -> str:
    return " / ".join(number(value, 1) for value in astuple(values))
