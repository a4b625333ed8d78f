"""What to deploy, in words: which of the measured settings is proved to be faster than no drafts at all."""

from collections.abc import Sequence
from dataclasses import replace

from ..figures.metrics import LEAST_TIMED
from ..figures.repetition import WithoutLoops
from ..measurement.result import Result
from ..proof.sampling_check import POWER, SMALLEST_P, share_seen
from .conclusion import Conclusion
from .results.one_result import (
    deviates,
    disturbance_words,
    interval_as_chosen,
    interval_of,
    interval_words,
    is_doubtful,
    is_faster,
    is_lossless,
    label,
    learnt_words,
    loop_words,
    lower_end,
    name_of,
    num_timed,
    number,
    requests_words,
    rests_on_loops,
    setting_of,
    speedup_words,
    timed_words,
)
from .results.pairs import not_told_apart

FEW_TIMED = 8  # prompts or batches below which they say little of other traffic
LOW_BANDWIDTH = 0.3  # share of a copy's bandwidth below which the baseline's time goes elsewhere


# All of them


def conclude(results: Sequence[Result], commands: Sequence[str] = ()) -> Conclusion:
    """What to deploy, and what the texts showed. Args: commands: that serve what is recommended."""
    advice = recommend(results)
    reasons = [*advice.reasons, f"Losslessness: {lossless_evidence(results)}"]
    return replace(advice, reasons=reasons, commands=commands if advice.is_good else ())


def recommend(results: Sequence[Result]) -> Conclusion:
    """What to deploy of these results; where that is nothing, why, by the one that came nearest."""
    best, timed = best_deployable(results), [result for result in results if result.speedup is not None]
    unit, cautions = "speedup [95 % interval]", list[str]()
    if not timed:
        shown, figure = results, "-"
        headline, reasons = "Do not deploy: nothing was timed", ["No answer had a token to speed up."]
    else:
        nearest = best or max(timed, key=lambda one: (is_lossless(one), num_timed(one) >= LEAST_TIMED, lower_end(one)))
        shown, figure, unit = [nearest], speedup_words(nearest), f"{unit}, {nearest.suite}"
        headline, reasons, cautions = approval(best, results) if best else refusal(nearest, len(results))
    learnt = learnt_words(shown)
    headline += f"; but {learnt}" if learnt else ""
    return Conclusion(best is not None, headline, figure, unit, reasons, cautions)


Advice = tuple[str, list[str], list[str]]  # headline, reasons, cautions


def best_deployable(results: Sequence[Result], *, among: int | None = None) -> Result | None:
    """The deployable setting with the highest lower end of its interval; None if there is none.

    That it is one of several is allowed for: an interval that is chosen for its lower end is wrong more often than one
    that was named beforehand. Args: among: of so many; None: of these."""
    num_choices = max(1, len(results) if among is None else among)
    deployable = [
        result
        for result in results
        if is_faster(result, num_choices=num_choices)
        and is_lossless(result)
        and not rests_on_loops(result, num_choices=num_choices)
    ]
    return max(deployable, key=lower_end, default=None)


def approval(best: Result, ours: Sequence[Result]) -> Advice:
    """The setting to deploy, why, and on which traffic it does not help."""
    reasons = [
        f"On {best.suite}, {requests_words(best.batch_size)}, it decodes {number(best.speedup)} {interval_words(best)} "
        f"times as fast as the same engine without drafts (95 % interval over {timed_words(best)}).",
        f"Each forward of the target gives {number(best.acceptance_length)} tokens, of at most "
        f"{best.num_draft_tokens + 1}.",
    ]
    same = [result for result in ours if setting_of(result) == setting_of(best) and result is not best]
    slow = [result for result in same if not is_faster(result)]
    cautions = [
        f"Not on {result.suite}, {requests_words(result.batch_size)}: there its speedup is {speedup_words(result)}, "
        "not shown to be above 1."
        for result in slow
    ]
    for result in same:
        if not is_lossless(result):
            problem = f"{result.lossless.unexplained} texts differ from the target's own there."
            if deviates(result):
                problem = "the texts sampled there are not distributed as the target's own."
            where = f"{result.suite}, {requests_words(result.batch_size)}"
            cautions.append(f"Not on {where}, before this is understood: {problem}")
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
    return headline, reasons, cautions + doubts(best)


def chosen_words(best: Result, num_choices: int) -> str:
    """What follows from having measured so many results."""
    if len(best.observations) < 2:  # of an older report
        return f"The best of {num_choices} results looks a little better than it is; measure it again alone."
    words = f"It is the best of {num_choices} results: with that allowed for, the 95 % interval is "
    words += widened_words(best, num_choices)
    if without := best.repetition.without_loops:
        words += f", without looping texts {widened_words(without, num_choices)}"
    return f"{words}."


def widened_words(part: Result | WithoutLoops, num_choices: int) -> str:
    """The interval of one of so many: `[1.71, 2.13]`."""
    low, high = interval_as_chosen(part, num_choices) or (None, None)
    return f"[{number(low)}, {number(high)}]"


def doubts(best: Result) -> list[str]:
    """What makes the figures of a result less certain."""
    cautions = []
    if best.failed:
        cautions.append(f"{len(best.failed)} prompts of {best.suite} could not be measured, and are left out.")
    if is_doubtful(best):
        cautions.append(f"Measure again on a quiet machine: {disturbance_words(best)}.")
    if num_timed(best) < FEW_TIMED:
        cautions.append(f"Only {timed_words(best)} were timed: they say little of other traffic.")
    if best.repetition.without_loops:
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


def refusal(nearest: Result, num_results: int) -> Advice:
    """Says why nothing is to be deployed, by the result that came nearest of so many."""
    low, high = interval_of(nearest) or (0.0, 0.0)
    where = f"{label(nearest)}, on {nearest.suite}"
    headline = f"Do not deploy any setting that was measured ({timed_words(nearest)})"
    if nearest.sampling_check and deviates(nearest):
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
        looping = nearest.repetition.without_loops if rests_on_loops(nearest, num_choices=num_results) else None
        low = lower_end(looping or nearest, num_choices=num_results)
        reason = (
            f"{where}: the interval lies above 1, but it is the best of {num_results} results; with that allowed for, "
            f"it reaches down to {low:.2f}{' without looping texts' if looping else ''}. Measure this one again, alone."
        )
    elif high < 1:
        reason = f"Even the best, {where}, is slower than no drafts: the whole interval lies below 1."
    else:
        reason = f"The best, {where}, is not shown to be faster than no drafts: its interval reaches down to {low:.2f}."
    return headline, [reason], []


# Losslessness


def lossless_evidence(results: Sequence[Result]) -> str:
    """What the checks of the texts showed, over all results."""
    return " ".join(filter(None, (compared_evidence(results), sampled_evidence(results)))) or "No text was compared."


def compared_evidence(results: Sequence[Result]) -> str:
    """Says what comparing texts token by token showed; empty where none were compared."""
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
    """Says how well texts behind drafts that were drawn follow the target; empty where there were none."""
    checks = [result.sampling_check for result in results if result.sampling_check]
    tested = [check.p_value for check in checks if check.p_value is not None]
    if not tested:
        return "Too few tokens were sampled to test whether they are the target's." if checks else ""
    verb = "do not visibly deviate" if min(tested) >= SMALLEST_P else "DEVIATE"
    fewest = min(check.num_tokens for check in checks if check.p_value is not None)
    return (
        f"Texts behind drafts drawn at random {verb} from the target's own distribution, tested token by token: p is "
        f"{min(tested):.2g} in the worst of {len(tested)} {'results' if len(tested) > 1 else 'result'}, over at least "
        f"{fewest:,} tokens. A rule that gets {share_seen(fewest):.1%} of the tokens wrong, all in one direction, "
        f"would have been seen with {POWER:.0%}; one that gets fewer wrong, or errs in both, may not be."
    )
