"""Several evaluations side by side: who is ahead on which traffic, and what keeps them from being compared."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.errors import BadInput
from .document import SCHEMA_VERSION
from .page_parts import short_name
from .recommendation import FEW_TIMED, Result, is_faster, is_lossless, label, num_timed, speedup_words, times

LEAST_APART = 1.1  # ratio of two evaluations' baselines from which their machines were not equally fast
SURROUNDINGS = ("device", "num_threads", "headstart", "torch", "transformers")
TARGET_KEYS = ("fingerprint", "dtype", "quantization", "is_adapted")
SUITE_KEYS = (
    "num_prompts",
    "max_new_tokens",
    "steps",
    "top_k",
    "top_p",
    "template_hash",
    "system",
    "thinking",
    "suite_digest",
)


@dataclass(frozen=True)
class Evaluation:
    """name: short, and another for each. report: report.json as docs/report_schema.md has it."""

    name: str
    report: dict[str, Any]

    @property
    def results(self) -> list[Result]:
        """Of our engine, its drafters under this evaluation's name."""
        ours = [entry for entry in self.report["results"] if entry["engine"] == "headstart"]
        return [{**entry, "drafter": f"{self.name}: {entry['drafter']}", "of": self.name} for entry in ours]


def read_evaluation(folder: Path, name: str) -> Evaluation:
    """Raises BadInput where its report is none of this version."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_text())
        version = report["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: no report of headstart eval: {type(error).__name__} {error}") from error
    if version != SCHEMA_VERSION:
        raise BadInput(f"{path}: schema_version {version}, expected {SCHEMA_VERSION}")
    return Evaluation(name, report)


def summary(one: Evaluation) -> dict[str, Any]:
    """An evaluation as compare.json has it."""
    keys = ("suite", "tree", "num_draft_tokens", "batch_size", "temperature", "acceptance_length", "acceptance_rate",
            "speedup", "speedup_ci95", "timing", "lossless")  # fmt: skip
    results = [{"drafter": entry["drafter"], **{key: entry[key] for key in keys}} for entry in one.results]
    return {"evaluation": one.name, "target": one.report["target"], "results": results}


@dataclass(frozen=True)
class Standing:
    """The evaluations on one kind of traffic, each by its best setting, the best first. winner: its name, where its
    speedup's interval lies above all others'; None: intervals overlap, or there is nothing to compare."""

    traffic: str
    ranked: list[Result]
    winner: str | None
    words: str


def standings(evaluations: Sequence[Evaluation]) -> list[Standing]:
    """By suite, batch size and temperature."""
    kinds: dict[tuple[str, int, float], list[Result]] = {}
    for entry in (entry for one in evaluations for entry in one.results):
        kinds.setdefault((entry["suite"], entry["batch_size"], entry["temperature"]), []).append(entry)
    return [
        standing(f"{suite}, batch {size}, temperature {heat:g}", found) for (suite, size, heat), found in kinds.items()
    ]


def standing(traffic: str, results: Sequence[Result]) -> Standing:
    """Of lossless results that were timed, the setting with the highest lower end of its interval stands for each."""
    best: dict[str, Result] = {}
    for entry in results:
        if entry["speedup"] is None or not is_lossless(entry):
            continue
        before = best.get(entry["of"])
        if before is None or entry["speedup_ci95"][0] > before["speedup_ci95"][0]:
            best[entry["of"]] = entry
    ranked = sorted(best.values(), key=lambda entry: entry["speedup_ci95"][0], reverse=True)
    if not ranked:
        return Standing(traffic, [], None, "nothing lossless was timed")
    first = ranked[0]
    words = in_words(first)
    if not is_faster(first):
        words += ", which is not shown to be faster than no drafts"
    if len(ranked) == 1:
        return Standing(traffic, ranked, None, f"only {words}")
    highest = max(entry["speedup_ci95"][1] for entry in ranked[1:])
    near = max(ranked[1:], key=lambda entry: entry["speedup_ci95"][1])
    is_clear = first["speedup_ci95"][0] > highest
    words += f"; then {in_words(near)}; the intervals {'do not overlap' if is_clear else 'overlap'}"
    return Standing(traffic, ranked, first["of"] if is_clear else None, words)


def in_words(entry: Result) -> str:
    """A setting with what it reached."""
    length = times(entry["acceptance_length"])
    return f"{label(entry, with_batch=False)}: speedup {speedup_words(entry)}, {length} tokens per forward"


def headline(found: Sequence[Standing]) -> str:
    """The comparison in a line."""
    contested = [one for one in found if len(one.ranked) > 1]
    winners = {one.winner for one in contested}
    if not contested:
        return "Nothing here was measured in more than one evaluation"
    if winners == {None}:
        return "Not shown to differ: everywhere the intervals overlap"
    if len(winners) == 1:
        return f"{winners.pop()} is the fastest on all that was measured"
    named = ", ".join(f"{one.winner} on {one.traffic}" for one in contested if one.winner)
    return f"No single winner: {named}"


def unlike(evaluations: Sequence[Evaluation]) -> list[str]:
    """What differs besides the heads, a sentence each: figures are not comparable, or only with care."""
    found = []
    for key in TARGET_KEYS:
        found += differing(f"target {key}", evaluations, lambda one, key=key: one.report["target"].get(key))
    for key in SURROUNDINGS:
        found += differing(key, evaluations, lambda one, key=key: one.report["environment"].get(key))
    suites = list(dict.fromkeys(entry["suite"] for one in evaluations for entry in one.results))
    for suite in suites:
        having = [one for one in evaluations if any(entry["suite"] == suite for entry in one.results)]
        lacking = [one.name for one in evaluations if one not in having]
        if lacking:
            found.append(f"suite {suite}: not measured in {', '.join(lacking)}")
        for key in SUITE_KEYS:
            found += differing(f"{key} on {suite}", having, lambda one, key=key, suite=suite: of_suite(one, suite, key))
        found += unequal_baselines(suite, having)
    few = sorted({one.name for one in evaluations for entry in one.results if num_timed(entry) < FEW_TIMED})
    if few:
        found.append(f"fewer than {FEW_TIMED} prompts or batches were timed in {', '.join(few)}: intervals too narrow")
    return found


def differing(what: str, evaluations: Sequence[Evaluation], value: Callable[[Evaluation], Any]) -> list[str]:
    """One sentence, or none where all are alike."""
    values = {one.name: value(one) for one in evaluations}
    if len({str(one) for one in values.values()}) < 2:
        return []
    return [f"{what.replace('_', ' ')}: " + "; ".join(f"{name} {short_name(str(v))}" for name, v in values.items())]


def of_suite(one: Evaluation, suite: str, key: str) -> Any:
    """The values of a key on a suite, once each."""
    values = dict.fromkeys(str(entry.get(key, "not said")) for entry in one.results if entry["suite"] == suite)
    return ", ".join(values)


def unequal_baselines(suite: str, evaluations: Sequence[Evaluation]) -> list[str]:
    """Decoding without drafts should take all evaluations alike: else the machine was busier in one."""
    found = []
    for size in sorted({entry["batch_size"] for one in evaluations for entry in one.results}):
        speeds = {}
        for one in evaluations:
            alike = [entry for entry in one.results if (entry["suite"], entry["batch_size"]) == (suite, size)]
            known = [entry["baseline_tokens_per_second"] for entry in alike if entry["baseline_tokens_per_second"]]
            if known:
                speeds[one.name] = sum(known) / len(known)
        if speeds and max(speeds.values()) > LEAST_APART * min(speeds.values()):
            words = "; ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
            found.append(
                f"the baseline on {suite}, batch {size}, in tokens per second: {words}. Not equally fast machines"
            )
    return found
