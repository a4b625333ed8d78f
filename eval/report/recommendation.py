"""What to deploy, in words: which of the measured settings is proved to be faster than no drafts at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..measurement.metrics import LEAST_TIMED
from ..measurement.result import Result
from ..measurement.sampling_check import SMALLEST_P
from .one_result import (
    deviates,
    disturbance_words,
    has_lossless_rule,
    interval_as_chosen,
    interval_of,
    is_doubtful,
    is_faster,
    is_lossless,
    label,
    loop_words,
    lower_end,
    medians_disagree,
    name_of,
    num_timed,
    number,
    rests_on_loops,
    setting_of,
    speedup_words,
    timed_words,
)
from .pairs import not_told_apart

FEW_TIMED = 8  # prompts or batches below which they say little of other traffic
LOW_BANDWIDTH = 0.3  # share of a copy's bandwidth below which the baseline's time goes elsewhere


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


# All of them


def recommend(results: Sequence[Result]) -> Recommendation:
    """What to deploy of all results that are over the same engine without drafts."""
    ours = [result for result in results if not result.is_beside]
    best = best_deployable(ours)
    return refusal(ours) if best is None else approval(best, ours)


def best_deployable(results: Sequence[Result]) -> Result | None:
    """The deployable setting with the highest lower end of its interval; None if there is none.

    That it is one of several is allowed for: an interval that is chosen for its lower end is wrong more often than one
    that was named beforehand."""
    num_choices = max(1, len(results))
    deployable = [
        result
        for result in results
        if is_faster(result, num_choices=num_choices) and is_lossless(result) and not rests_on_loops(result)
    ]
    return max(deployable, key=lower_end, default=None)


def approval(best: Result, ours: Sequence[Result]) -> Recommendation:
    """The setting to deploy, why, and on which traffic it does not help."""
    reasons = [
        f"On {best.suite}, at batch {best.batch_size}, it decodes {number(best.speedup)} times as fast as the same "
        f"engine without drafts; the 95 % interval over {timed_words(best)} lies above 1.",
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
        cautions.append(chosen_words(best, len(ours)))
    if alike := not_told_apart(best, ours):
        names = "; ".join(name_of(result) for result in alike)
        cautions.append(f"Neither shown to be faster nor slower, on the same prompts: {names}.")
    headline = f"Deploy {label(best)}"
    if any(result.suite != best.suite for result in slow):
        headline += f", for traffic like {best.suite}"
    headline += f" ({timed_words(best)})"
    if 2 * best.disturbance.num_disturbed >= max(1, best.disturbance.num_passes):
        headline += "; but most of its measurement was disturbed"
    return Recommendation(True, headline, reasons, cautions + doubts(best), best)


def chosen_words(best: Result, num_choices: int) -> str:
    """What follows from having measured so many results."""
    low, high = interval_as_chosen(best, num_choices) or (None, None)
    if len(best.observations) < 2:  # of an older report or another engine
        return f"The best of {num_choices} results looks a little better than it is; measure it again alone."
    return (
        f"It is the best of {num_choices} results: with that allowed for, the 95 % interval is "
        f"[{number(low)}, {number(high)}]."
    )


def doubts(best: Result) -> list[str]:
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
        cautions.append(f"Only {timed_words(best)} were timed: they say little of other traffic.")
    if best.without_loops:
        cautions.append(f"{loop_words(best)}.")
    if best.num_prompts % best.batch_size:
        cautions.append(f"Prompts of {best.suite} were repeated until the last batch was full.")
    share = best.baseline_bandwidth.share_of_copy
    if share is not None and share < LOW_BANDWIDTH:
        cautions.append(
            f"The baseline reads memory at {share:.1%} of what a copy reaches here, so its time goes elsewhere "
            "(launching, Python, arithmetic): over a faster engine the speedup may be another."
        )
    return cautions


def refusal(ours: Sequence[Result]) -> Recommendation:
    """Why nothing is to be deployed, by the result that came nearest."""
    timed = [result for result in ours if result.speedup is not None]
    if not timed:
        return Recommendation(False, "Do not deploy: nothing was timed", ["No answer had a token to speed up."])
    nearest = max(timed, key=lambda result: (is_lossless(result), num_timed(result) >= LEAST_TIMED, lower_end(result)))
    low, high = interval_of(nearest) or (0.0, 0.0)
    where = f"{label(nearest)}, on {nearest.suite}"
    headline = f"Do not deploy any setting that was measured ({timed_words(nearest)})"
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
            "own by more than rounding, and no other setting is without such texts."
        )
    elif nearest.step_medians.is_impossible:
        reason = (
            f"The figures of {where}, cannot be true: {disturbance_words(nearest)}. Measure again on a quiet machine."
        )
    elif num_timed(nearest) < LEAST_TIMED:
        verb = "was" if num_timed(nearest) == 1 else "were"
        headline = f"Do not deploy on this alone: only {timed_words(nearest)} {verb} timed"
        reason = f"{where}: an interval over fewer than {LEAST_TIMED} does not hold what it promises. Measure more."
    elif is_faster(nearest) and rests_on_loops(nearest):
        headline = f"Do not deploy on this alone: the gain rests on texts that loop ({timed_words(nearest)})"
        reason = (
            f"{where}: {loop_words(nearest)}. What repeats itself is drafted by copying: measure at the temperature "
            "that is served, and prompts whose answers end."
        )
    elif is_faster(nearest):
        reason = (
            f"{where}: the interval lies above 1, but it is the best of {len(ours)} results; with that allowed for, it "
            f"reaches down to {lower_end(nearest, num_choices=len(ours)):.2f}. Measure this one again, alone."
        )
    elif high < 1:
        reason = f"Even the best, {where}, is slower than no drafts: the whole interval lies below 1."
    else:
        reason = f"The best, {where}, is not shown to be faster than no drafts: its interval reaches down to {low:.2f}."
    return Recommendation(False, headline, [reason], best=nearest)


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
    words = f"{identical} of {checked} texts equal the baseline's, token for token"
    if proved:
        words += f"; {proved} differ by rounding alone, proved against the model's own code"
    words += f"; {unexplained} differ UNEXPLAINED" if unexplained else "; none differs unexplained"
    return words + "."


def sampled_evidence(results: Sequence[Result]) -> str:
    """Of sampled texts; empty where none was sampled."""
    checks = [result.sampling_check for result in results if result.sampling_check]
    tested = [check.p_value for check in checks if check.p_value is not None]
    if not tested:
        return "Too few tokens were sampled to test whether they are the target's." if checks else ""
    verb = "do not visibly deviate" if min(tested) >= SMALLEST_P else "DEVIATE"
    fewest = min(check.num_tokens for check in checks if check.p_value is not None)
    return (
        f"The sampled texts {verb} from the target's own distribution, tested token by token: p is {min(tested):.2g} "
        f"in the worst of {len(tested)} {'results' if len(tested) > 1 else 'result'}, over at least {fewest:,} tokens."
    )
