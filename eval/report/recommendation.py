"""What to deploy, in words: which of the measured settings is proved to be faster than no drafts at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..measurement.sampling_check import SMALLEST_P, SamplingCheck

Result = dict[str, Any]  # an entry of report.json's results

FEW_TIMED = 8  # prompts or batches below which a bootstrap interval is too narrow to trust
LOW_BANDWIDTH = 0.3  # share of a copy's bandwidth below which the baseline's time goes elsewhere


@dataclass(frozen=True)
class Verdict:
    """best: the setting to deploy, or where none is, the one that came nearest. figure: its speedup with interval."""

    is_deployable: bool
    headline: str
    figure: str
    reasons: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    best: Result | None = None


def label(entry: Result, *, with_batch: bool = True) -> str:
    """A setting in a few words: drafter, tree, K, batch size. A number stays with its name on one line."""
    tree = entry["tree"] if "chain" in entry["tree"] else f"{entry['tree']} tree of\xa0{entry['num_drafted']}"
    parts = [entry["drafter"], tree, f"K\xa0{entry['num_draft_tokens']}"]
    if entry["engine"] != "headstart":
        parts.insert(0, entry["engine"])
    if entry["accept"] != "exact":
        parts.append(f"{entry['accept']} (lossy)")
    return " · ".join([*parts, f"batch\xa0{entry['batch_size']}"] if with_batch else parts)


def setting(entry: Result) -> tuple[Any, ...]:
    """What a deployment chooses; the traffic brings suite and batch size."""
    return tuple(entry[key] for key in ("drafter", "tree", "num_drafted", "num_draft_tokens", "accept", "temperature"))


def num_timed(entry: Result) -> int:
    """Prompts, or batches of them, that the interval was drawn from."""
    return -(-entry["num_prompts"] // entry["batch_size"])


def times(value: float | None) -> str:
    """A ratio; `-` where there was nothing to measure."""
    return "-" if value is None else f"{value:.2f}"


def speedup_words(entry: Result) -> str:
    """`1.92 [1.81, 2.03]`."""
    low, high = entry["speedup_ci95"]
    return f"{times(entry['speedup'])} [{times(low)}, {times(high)}]"


def is_lossless(entry: Result) -> bool:
    """Whether the text is the target's own, as far as was seen: a lossless rule, no unexplained difference, and sampled
    tokens that may be draws from the target's distribution."""
    return entry["accept"] == "exact" and not entry["lossless"]["unexplained"] and not deviates(entry)


def deviates(entry: Result) -> bool:
    """Whether sampled texts are not the target's, by a test that chance does not explain."""
    check = entry.get("sampling_check")
    return check is not None and not SamplingCheck(**check).holds


def is_faster(entry: Result) -> bool:
    """Whether the speedup's interval, drawn from more than one prompt or batch, lies above 1."""
    low = entry["speedup_ci95"][0]
    return low is not None and low > 1 and num_timed(entry) > 1


def best_of(results: Sequence[Result]) -> Result | None:
    """The deployable setting with the highest lower end of its interval; None where there is none."""
    return max(
        (entry for entry in results if is_faster(entry) and is_lossless(entry)),
        key=lambda entry: entry["speedup_ci95"][0],
        default=None,
    )


def verdict(results: Sequence[Result]) -> Verdict:
    """Of all results, those of other engines left aside."""
    ours = [entry for entry in results if entry["engine"] == "headstart"]
    best = best_of(ours)
    return refusal(ours) if best is None else approval(best, ours)


def approval(best: Result, ours: Sequence[Result]) -> Verdict:
    unit = "prompts" if best["batch_size"] == 1 else "batches"
    reasons = [
        f"On {best['suite']}, at batch {best['batch_size']}, it decodes {times(best['speedup'])} times as fast as the "
        f"same engine without drafts; the 95 % interval over {num_timed(best)} {unit} lies above 1.",
        f"{times(best['acceptance_length'])} tokens are committed per forward of the target, of at most "
        f"{best['num_draft_tokens'] + 1}.",
    ]
    others = [entry for entry in ours if setting(entry) == setting(best) and entry is not best and not is_faster(entry)]
    cautions = [
        f"Not on {entry['suite']} at batch {entry['batch_size']}: there the same setting's speedup is "
        f"{speedup_words(entry)}, not shown to be above 1."
        for entry in others
    ]
    cautions += [
        f"Not on {entry['suite']} at batch {entry['batch_size']} before this is understood: "
        + (
            "the texts sampled there are not distributed as the target's own."
            if deviates(entry)
            else f"{entry['lossless']['unexplained']} texts differ from the target's own there."
        )
        for entry in ours
        if setting(entry) == setting(best) and not is_lossless(entry)
    ]
    if len(ours) > 1:
        cautions.append(
            f"The best of {len(ours)} results looks a little better than it is; measure it once more alone."
        )
    if best.get("failed"):
        cautions.append(f"{len(best['failed'])} prompts of {best['suite']} could not be measured, and are left out.")
    if num_timed(best) < FEW_TIMED:
        cautions.append(f"Only {num_timed(best)} {unit} were timed: the interval is likely too narrow.")
    share = best["baseline_bandwidth"]["share_of_copy"]
    if share is not None and share < LOW_BANDWIDTH:
        cautions.append(
            f"The baseline reads memory at {share:.1%} of what a copy reaches here, so its time goes elsewhere "
            "(launching, Python, arithmetic): over a faster engine the speedup may be another."
        )
    headline = f"Deploy {label(best)}"
    if any(entry["suite"] != best["suite"] for entry in others):
        headline += f", for traffic like {best['suite']}"
    return Verdict(True, headline, speedup_words(best), reasons, cautions, best)


def refusal(ours: Sequence[Result]) -> Verdict:
    """Why nothing is to be deployed, by the result that came nearest."""
    timed = [entry for entry in ours if entry["speedup"] is not None]
    if not timed:
        return Verdict(False, "Do not deploy: nothing was timed", "-", ["No answer had a token to speed up."])
    nearest = max(timed, key=lambda entry: (is_lossless(entry), entry["speedup_ci95"][0]))
    low, high = nearest["speedup_ci95"]
    where = f"{label(nearest)}, on {nearest['suite']}"
    if nearest["accept"] != "exact":
        reason = f"Every setting was measured with the {nearest['accept']} rule: the text is not the target's."
    elif deviates(nearest):
        reason = (
            f"The texts of {where}, are not distributed as the target's own: tokens lie so far off by chance with "
            f"p = {nearest['sampling_check']['p_value']:.1g} only."
        )
    elif not is_lossless(nearest):
        reason = (
            f"Of {where}, {nearest['lossless']['unexplained']} of {nearest['lossless']['checked']} texts differ from "
            "the target's own by more than rounding, and no other setting is without such texts."
        )
    elif low > 1:
        reason = f"{where}: a single prompt or batch was timed, so there is no interval. Measure more of them."
    elif high < 1:
        reason = f"Even the best, {where}, is slower than no drafts: the whole interval lies below 1."
    else:
        reason = f"The best, {where}, is not shown to be faster than no drafts: its interval reaches down to {low:.2f}."
    return Verdict(False, "Do not deploy any setting that was measured", speedup_words(nearest), [reason], [], nearest)


def lossless_evidence(results: Sequence[Result]) -> str:
    """What was seen of the texts, over all results of our engine with a lossless rule."""
    exact = [entry for entry in results if entry["engine"] == "headstart" and entry["accept"] == "exact"]
    if not exact:
        return "Every setting was measured with a lossy rule: the text is not the target's."
    return " ".join(filter(None, (greedy_evidence(exact), sampled_evidence(exact)))) or "No text was compared."


def greedy_evidence(exact: Sequence[Result]) -> str:
    """Of texts compared token by token; nothing where none was."""
    sums = {key: sum(entry["lossless"][key] for entry in exact) for key in LOSSLESS_KEYS}
    if not sums["checked"]:
        return ""
    words = f"{sums['identical']} of {sums['checked']} texts equal the target's own, token for token"
    if sums["explained"]:
        words += f"; {sums['explained']} part where two tokens tie within rounding"
    words += f"; {sums['unexplained']} differ UNEXPLAINED" if sums["unexplained"] else "; none differs unexplained"
    return words + "."


def sampled_evidence(exact: Sequence[Result]) -> str:
    """Of sampled texts; nothing where none was sampled."""
    checks = [entry["sampling_check"] for entry in exact if entry["sampling_check"]]
    tested = [check["p_value"] for check in checks if check["p_value"] is not None]
    if not tested:
        return "Too few tokens were sampled to test whether they are the target's." if checks else ""
    words = "follows" if min(tested) >= SMALLEST_P else "does NOT follow"
    return (
        f"What was sampled {words} the target's own distribution, tested token by token: p is {min(tested):.2g} in "
        f"the worst of {len(tested)} {'results' if len(tested) > 1 else 'result'}."
    )


LOSSLESS_KEYS = ("checked", "identical", "explained", "unexplained")
