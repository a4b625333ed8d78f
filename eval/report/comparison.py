"""Several evaluations side by side: which is ahead on which traffic, and what keeps them from being compared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..figures.metrics import LEAST_TIMED
from ..measurement.result import Result
from .conclusion import Conclusion
from .results.document import Report, read_report, short_name
from .results.one_result import (
    grouped,
    interval_of,
    is_faster,
    is_lossless,
    learnt_words,
    lower_end,
    name_of,
    num_timed,
    number,
    requests_words,
    rests_on_loops,
    speedup_words,
    timed_words,
)

TARGET_KEYS = ("fingerprint", "dtype", "quantization", "is_adapted")
ENVIRONMENT_KEYS = ("device", "num_threads", "headstart", "torch", "transformers")
SUITE_KEYS = ("num_prompts", "max_new_tokens", "steps", "top_k", "top_p", "template_hash", "system", "variables",
              "suite_digest")  # fmt: skip
LEAST_APART = 1.1  # ratio of two evaluations' baselines from which their machines were not equally fast
SUMMARY_KEYS = ("drafter", "suite", "tree", "num_draft_tokens", "batch_size", "temperature", "acceptance_length",
                "acceptance_rate", "speedup", "speedup_ci95", "timing", "lossless")  # fmt: skip


@dataclass(frozen=True)
class NamedReport:
    """A report under a short name, which no other evaluation of the comparison has."""

    name: str
    report: Report

    @property
    def results(self) -> list[Result]:
        """The results of our engine, with the evaluation's name before each drafter."""
        return [replace(result, drafter=f"{self.name}: {result.drafter}") for result in self.report.results]

    def summary(self) -> dict[str, Any]:
        """The evaluation as `compare --json` prints it."""
        entries = [result.to_json() for result in self.results]
        results = [{key: entry[key] for key in SUMMARY_KEYS} for entry in entries]
        return {"evaluation": self.name, "target": asdict(self.report.target), "results": results}


def read_evaluation(folder: Path, name: str) -> NamedReport:
    """Raises BadInput if the folder has no report of this schema version."""
    return NamedReport(name, read_report(folder / "report.json"))


@dataclass(frozen=True)
class Standing:
    """The evaluations on one kind of traffic, compared by their best settings.

    ranked: evaluation and result, the best first. winner: the name of the first, where its speedup's interval lies
    above all others'; None: intervals overlap, or there is nothing to compare.
    """

    traffic: str
    ranked: list[tuple[str, Result]]
    winner: str | None
    words: str


def standings(evaluations: Sequence[NamedReport]) -> list[Standing]:
    """By suite, batch size and temperature."""
    measured = [(evaluation.name, result) for evaluation in evaluations for result in evaluation.results]
    kinds = grouped(measured, lambda item: (item[1].suite, item[1].batch_size, item[1].temperature))
    found = []
    for (suite, size, temperature), results in kinds.items():
        sampled = f", temperature {temperature:g}" if temperature else ""
        found.append(standing(f"{suite}, {requests_words(size)}{sampled}", results))
    return found


def standing(traffic: str, results: Sequence[tuple[str, Result]]) -> Standing:
    """Compares the evaluations by the lossless setting of each whose speedup's interval has the highest lower end."""
    best: dict[str, Result] = {}
    for name, result in results:
        if interval_of(result) and is_lossless(result):
            best[name] = max(best.get(name, result), result, key=lower_end)
    ranked = sorted(best.items(), key=lambda item: lower_end(item[1]), reverse=True)
    if not ranked:
        return Standing(traffic, [], None, "nothing lossless was timed")
    name, first = ranked[0]
    words = in_words(first) + ("" if is_faster(first) else ", which is not shown to be faster than no drafts")
    if len(ranked) == 1:
        return Standing(traffic, ranked, None, f"only {words}")
    near = max((result for _, result in ranked[1:]), key=lambda result: (interval_of(result) or (0.0, 0.0))[1])
    is_clear = lower_end(first) > (interval_of(near) or (0.0, 0.0))[1]
    how = "do not overlap" if is_clear else "overlap"
    if min(num_timed(first), num_timed(near)) < LEAST_TIMED:
        is_clear, how = False, f"are over too few to hold: {LEAST_TIMED} are needed"
    if len({result.suite_digest for _, result in ranked}) > 1:
        is_clear, how = False, "are over different prompts"
    if first.step_medians.is_impossible:
        is_clear, how = False, "are of a figure that cannot be true"
    words += f"; then {in_words(near)}; the intervals {how}"
    return Standing(traffic, ranked, name if is_clear else None, words)


def in_words(result: Result) -> str:
    """A setting and its figures."""
    figures = f"speedup {speedup_words(result)} over {timed_words(result)}"
    loops = ", which rests on texts that loop" if is_faster(result) and rests_on_loops(result) else ""
    return f"{name_of(result)}: {figures}{loops}, {number(result.acceptance_length)} tokens per forward"


def headline(ranks: Sequence[Standing]) -> str:
    """The comparison in a line."""
    contested = [standing for standing in ranks if len(standing.ranked) > 1]
    winners = {standing.winner for standing in contested}
    if not contested:
        return "Nothing here was measured in more than one evaluation"
    if winners == {None}:
        return "Not shown to differ: on no traffic is one proved to be ahead"
    if len(winners) == 1:
        return f"{winners.pop()} is the fastest on all that several evaluations measured"
    named = ", ".join(f"{standing.winner} on {standing.traffic}" for standing in contested if standing.winner)
    return f"No single winner: {named}"


def comparison(evaluations: Sequence[NamedReport]) -> Conclusion:
    """Who is ahead where, and what besides the heads is not alike."""
    ranks = standings(evaluations)
    is_clear = any(standing.winner for standing in ranks)
    cautions = [f"Not alike: {line}." for line in unlike(evaluations)]
    reasons = [f"On {standing.traffic}: {standing.words}." for standing in ranks]
    return Conclusion(is_clear, f"{headline(ranks)}.", reasons=reasons, cautions=cautions)


# What keeps evaluations from being compared


def unlike(evaluations: Sequence[NamedReport]) -> list[str]:
    """What differs besides the heads, a sentence each: figures are not comparable, or only with care."""
    targets = {evaluation.name: asdict(evaluation.report.target) for evaluation in evaluations}
    environments = {evaluation.name: asdict(evaluation.report.environment) for evaluation in evaluations}
    lines = [line for key in TARGET_KEYS for line in difference_in_words(f"target {key}", key, targets)]
    lines += [line for key in ENVIRONMENT_KEYS for line in difference_in_words(key, key, environments)]
    by_name = {evaluation.name: evaluation.results for evaluation in evaluations}
    for suite in dict.fromkeys(result.suite for results in by_name.values() for result in results):
        on_suite = {name: [result for result in results if result.suite == suite] for name, results in by_name.items()}
        measured = {name: results for name, results in on_suite.items() if results}
        if lacking := [name for name in by_name if name not in measured]:
            lines.append(f"suite {suite}: not measured in {', '.join(lacking)}")
        settings = {name: settings_of(results) for name, results in measured.items()}
        lines += [line for key in SUITE_KEYS for line in difference_in_words(f"{key} on {suite}", key, settings)]
        lines += unequal_baselines(suite, measured)
    learnt = {name: words for name, results in by_name.items() if (words := learnt_words(results))}
    lines += [f"{name}: {words}" for name, words in learnt.items()]
    if few := sorted({name for name, results in by_name.items() if any(num_timed(r) < LEAST_TIMED for r in results)}):
        lines.append(
            f"fewer than {LEAST_TIMED} prompts or batches were timed in {', '.join(few)}: intervals do not hold"
        )
    return lines


def settings_of(results: Sequence[Result]) -> dict[str, str]:
    """How the prompts of a suite were made and answered; of several values each once."""
    entries = [entry | entry["rendering"] for entry in (result.to_json() for result in results)]
    return {key: ", ".join(dict.fromkeys(str(entry[key]) for entry in entries)) for key in SUITE_KEYS}


def difference_in_words(what: str, key: str, sides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence where evaluations have different values of a key, else nothing."""
    values = {name: str(side[key]) for name, side in sides.items()}
    if len(set(values.values())) < 2:
        return []
    return [f"{what.replace('_', ' ')}: " + "; ".join(f"{name} {short_name(v)}" for name, v in values.items())]


def unequal_baselines(suite: str, measured: Mapping[str, Sequence[Result]]) -> list[str]:
    """Baselines that differ in speed, which should not depend on the evaluation: a machine was slower or busier."""
    lines = []
    for size in sorted({result.batch_size for results in measured.values() for result in results}):
        speeds: dict[str, float] = {}
        for name, results in measured.items():
            known = [speed for r in results if r.batch_size == size and (speed := r.baseline_tokens_per_second)]
            if known:
                speeds[name] = sum(known) / len(known)
        if speeds and max(speeds.values()) > LEAST_APART * min(speeds.values()):
            words = "; ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
            where = f"the baseline on {suite}, batch {size}, in tokens per second"
            lines.append(f"{where}: {words}. Not equally fast machines")
    return lines
