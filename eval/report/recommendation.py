"""What to deploy, in words: which of the measured settings is proved to be faster than no drafts at all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..measurement.result import ENGINE, DomainPart, Result, StepMedians
from ..measurement.sampling_check import SMALLEST_P
from ..verify import ACCEPT_RULES

FEW_TIMED = 8  # prompts or batches below which a bootstrap interval is too narrow to trust
LOW_BANDWIDTH = 0.3  # share of a copy's bandwidth below which the baseline's time goes elsewhere
Interval = tuple[float, float]
Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key of theirs, in the order in which the keys come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Recommendation:
    """best: the setting to deploy or, where there is none, the one that came nearest."""

    is_deployable: bool
    headline: str
    reasons: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    best: Result | None = None

    @property
    def figure(self) -> str:
        """Its speedup."""
        return speedup_words(self.best) if self.best else "-"


# One result


def label(result: Result, *, with_batch: bool = True) -> str:
    """A setting in a few words: drafter, tree, K, batch size. No line break between a number and its name."""
    tree = result.tree if "chain" in result.tree else f"{result.tree} tree of\xa0{result.num_drafted}"
    parts = [result.drafter, tree, f"K\xa0{result.num_draft_tokens}"]
    if result.engine != ENGINE:
        parts.insert(0, result.engine)
    if not has_lossless_rule(result):
        parts.append(f"{result.accept} (lossy)")
    return " · ".join([*parts, f"batch\xa0{result.batch_size}"] if with_batch else parts)


def setting_of(result: Result) -> tuple[Any, ...]:
    """What a deployment chooses. Suite and batch size are not of it: they come with the traffic."""
    r = result
    return r.drafter, r.tree, r.num_drafted, r.num_draft_tokens, r.accept, r.temperature


def num_timed(result: Result) -> int:
    """Prompts, or batches of them, over which the interval was bootstrapped."""
    return -(-result.num_prompts // result.batch_size)


def number(value: float | None, digits: int = 2) -> str:
    """A figure as text; `-` where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def speedup_words(part: Result | DomainPart | StepMedians) -> str:
    """`1.92 [1.81, 2.03]`; with a `!` behind it where the result was disturbed."""
    low, high = part.speedup_ci95
    mark = " !" if isinstance(part, Result) and is_doubtful(part) else ""
    return f"{number(part.speedup)} [{number(low)}, {number(high)}]{mark}"


def interval_of(part: Result | DomainPart | StepMedians) -> Interval | None:
    """The 95 % interval of the speedup; None where nothing was timed."""
    low, high = part.speedup_ci95
    return None if low is None or high is None else (low, high)


def lower_end(part: Result) -> float:
    """Of the speedup's interval; 0 where nothing was timed."""
    return (interval_of(part) or (0.0, 0.0))[0]


def has_lossless_rule(result: Result) -> bool:
    """Whether the accept rule keeps the target's distribution."""
    return result.accept in ACCEPT_RULES and ACCEPT_RULES[result.accept].is_lossless


def is_lossless(result: Result) -> bool:
    """Whether the text is the target's own as far as the checks show: a lossless rule, no unexplained difference, and
    sampled tokens that may be draws from the target's distribution."""
    return has_lossless_rule(result) and not result.lossless.unexplained and not deviates(result)


def deviates(result: Result) -> bool:
    """Whether sampled texts deviate from the target's distribution by more than chance explains."""
    return result.sampling_check is not None and not result.sampling_check.holds


def is_faster(result: Result) -> bool:
    """Whether the speedup's interval, drawn from more than one prompt or batch, lies above 1, and can be true."""
    return lower_end(result) > 1 and num_timed(result) > 1 and not result.step_medians.is_impossible


def is_doubtful(result: Result) -> bool:
    """Whether passes were disturbed, also when they were measured again, or figures cannot be true."""
    return result.disturbance.num_disturbed > 0 or result.step_medians.is_impossible


def disturbance_words(result: Result) -> str:
    """What disturbed a result; empty where nothing did."""
    found, medians = result.disturbance, result.step_medians
    words = []
    if found.num_disturbed:
        share = (
            "" if found.others_share is None else f"; other processes used {found.others_share:.0%} of the processor"
        )
        words.append(
            f"{found.num_disturbed} of {found.num_passes} passes disturbed ({', '.join(found.reasons)}{share})"
        )
    if medians.is_impossible:
        words.append(
            f"verifying takes {number(medians.verify_ms)} ms and a baseline step {number(medians.baseline_verify_ms)} "
            "ms, medians, which cannot be"
        )
    return "; ".join(words)


def medians_disagree(result: Result) -> bool:
    """Whether the speedup and that from medians of steps have intervals that do not meet."""
    ours, theirs = interval_of(result), interval_of(result.step_medians)
    if ours is None or theirs is None or num_timed(result) < 2:
        return False
    return ours[1] < theirs[0] or theirs[1] < ours[0]


# All of them


def recommend(results: Sequence[Result]) -> Recommendation:
    """What to deploy of all results that are over the same engine without drafts."""
    ours = [result for result in results if not result.is_beside]
    best = best_of(ours)
    return refusal(ours) if best is None else approval(best, ours)


def best_of(results: Sequence[Result]) -> Result | None:
    """The deployable setting with the highest lower end of its interval; None where there is none."""
    return max((result for result in results if is_faster(result) and is_lossless(result)), key=lower_end, default=None)


def approval(best: Result, ours: Sequence[Result]) -> Recommendation:
    """The setting to deploy, why, and on which traffic it does not help."""
    unit = "prompts" if best.batch_size == 1 else "batches"
    reasons = [
        f"On {best.suite}, at batch {best.batch_size}, it decodes {number(best.speedup)} times as fast as the same "
        f"engine without drafts; the 95 % interval over {num_timed(best)} {unit} lies above 1.",
        f"{number(best.acceptance_length)} tokens are committed per forward of the target, of at most "
        f"{best.num_draft_tokens + 1}.",
    ]
    same = [result for result in ours if setting_of(result) == setting_of(best) and result is not best]
    slow = [result for result in same if not is_faster(result)]
    cautions = [
        f"Not on {result.suite} at batch {result.batch_size}: there the same setting's speedup is "
        f"{speedup_words(result)}, not shown to be above 1."
        for result in slow
    ]
    for result in same:
        if not is_lossless(result):
            problem = f"{result.lossless.unexplained} texts differ from the target's own there."
            if deviates(result):
                problem = "the texts sampled there are not distributed as the target's own."
            cautions.append(f"Not on {result.suite} at batch {result.batch_size} before this is understood: {problem}")
    if len(ours) > 1:
        cautions.append(f"The best of {len(ours)} results looks a little better than it is; measure it again alone.")
    headline = f"Deploy {label(best)}"
    if any(result.suite != best.suite for result in slow):
        headline += f", for traffic like {best.suite}"
    if 2 * best.disturbance.num_disturbed >= max(1, best.disturbance.num_passes):
        headline += "; but most of its measurement was disturbed"
    return Recommendation(True, headline, reasons, cautions + doubts(best, unit), best)


def doubts(best: Result, unit: str) -> list[str]:
    """What makes the figures of a result less certain."""
    cautions = []
    if best.failed:
        cautions.append(f"{len(best.failed)} prompts of {best.suite} could not be measured, and are left out.")
    if is_doubtful(best):
        cautions.append(f"Measure again on a quiet machine: {disturbance_words(best)}.")
    if medians_disagree(best):
        medians = best.step_medians
        cautions.append(
            f"Medians of steps give a speedup of {speedup_words(medians)}, which does not meet {speedup_words(best)}: "
            "some steps took far longer than others."
        )
    if num_timed(best) < FEW_TIMED:
        cautions.append(f"Only {num_timed(best)} {unit} were timed: the interval is likely too narrow.")
    share = best.baseline_bandwidth.share_of_copy
    if share is not None and share < LOW_BANDWIDTH:
        cautions.append(
            f"The baseline reads memory at {share:.1%} of what a copy reaches here, so its time goes elsewhere "
            "(launching, Python, arithmetic): over a faster engine the speedup may be another."
        )
    return cautions


def refusal(ours: Sequence[Result]) -> Recommendation:
    """Why nothing is to be deployed, by the result that came nearest."""
    timed = [result for result in ours if interval_of(result)]
    if not timed:
        return Recommendation(False, "Do not deploy: nothing was timed", ["No answer had a token to speed up."])
    nearest = max(timed, key=lambda result: (is_lossless(result), lower_end(result)))
    low, high = interval_of(nearest) or (0.0, 0.0)
    where = f"{label(nearest)}, on {nearest.suite}"
    if not has_lossless_rule(nearest):
        reason = f"Every setting was measured with the {nearest.accept} rule: the text is not the target's."
    elif nearest.sampling_check and deviates(nearest):
        reason = (
            f"The texts of {where}, are not distributed as the target's own: by chance, tokens deviate so far with "
            f"p = {nearest.sampling_check.p_value:.1g} only."
        )
    elif not is_lossless(nearest):
        reason = (
            f"Of {where}, {nearest.lossless.unexplained} of {nearest.lossless.checked} texts differ from the target's "
            "own, also in forwards of equal shapes, and no other setting is without such texts."
        )
    elif nearest.step_medians.is_impossible:
        reason = (
            f"The figures of {where}, cannot be true: {disturbance_words(nearest)}. Measure again on a quiet machine."
        )
    elif low > 1:
        reason = f"{where}: a single prompt or batch was timed, so there is no interval. Measure more of them."
    elif high < 1:
        reason = f"Even the best, {where}, is slower than no drafts: the whole interval lies below 1."
    else:
        reason = f"The best, {where}, is not shown to be faster than no drafts: its interval reaches down to {low:.2f}."
    return Recommendation(False, "Do not deploy any setting that was measured", [reason], best=nearest)


# Losslessness


def lossless_evidence(results: Sequence[Result]) -> str:
    """What the checks of the texts showed, over all results of theirs with a lossless rule."""
    lossless = [result for result in results if not result.is_beside and has_lossless_rule(result)]
    if not lossless:
        return "Every setting was measured with a lossy rule: the text is not the target's."
    return " ".join(filter(None, (greedy_evidence(lossless), sampled_evidence(lossless)))) or "No text was compared."


def greedy_evidence(results: Sequence[Result]) -> str:
    """Of texts compared token by token; empty where there were none."""
    checked = sum(result.lossless.checked for result in results)
    if not checked:
        return ""
    identical = sum(result.lossless.identical for result in results)
    proved = sum(result.lossless.proved for result in results)
    unexplained = sum(result.lossless.unexplained for result in results)
    words = f"{identical} of {checked} texts equal the target's own, token for token"
    if proved:
        words += f"; {proved} differ by rounding alone, proved: the baseline writes them in forwards of equal shapes"
    words += f"; {unexplained} differ UNEXPLAINED" if unexplained else "; none differs unexplained"
    return words + "."


def sampled_evidence(results: Sequence[Result]) -> str:
    """Of sampled texts; empty where none was sampled."""
    checks = [result.sampling_check for result in results if result.sampling_check]
    tested = [check.p_value for check in checks if check.p_value is not None]
    if not tested:
        return "Too few tokens were sampled to test whether they are the target's." if checks else ""
    verb = "follow" if min(tested) >= SMALLEST_P else "do NOT follow"
    return (
        f"The sampled texts {verb} the target's own distribution, tested token by token: p is {min(tested):.2g} in the "
        f"worst of {len(tested)} {'results' if len(tested) > 1 else 'result'}."
    )
