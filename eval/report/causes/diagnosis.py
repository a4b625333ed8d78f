"""Why a drafter is accepted less, or saves less time, than it could: every cause that a result's figures show.

Each rule is a pure function of a case that finds one cause, or None. Here are the rules on time.
"""

from ...measurement.result import Timing
from .acceptance_causes import ACCEPTANCE_RULES
from .findings import LOW_ACCEPTANCE, Case, Finding, Rule, accepted_share, joint_rates, tokens

UNEXPLAINED = "Low acceptance, cause not in these figures"
LEAST_GAIN = 0.02  # expected gain by fewer drafts below which K is left alone


def diagnose(case: Case) -> list[Finding]:
    """Every cause that the figures show; if acceptance is low without a visible cause, a finding that says so. With a
    verify cost only time is judged, since acceptance of partly verified drafts is not comparable."""
    if case.result.verify_cost is not None:
        return [finding for finding in [costs_more_than_it_saves(case)] if finding]
    of_acceptance = [finding for rule in ACCEPTANCE_RULES if (finding := rule(case))]
    of_time = [finding for rule in TIME_RULES if (finding := rule(case))]
    share, result = accepted_share(case), case.result
    if share is None or share >= LOW_ACCEPTANCE or of_acceptance:
        return [*of_acceptance, *of_time]
    rate = (result.acceptance_rate or [None])[0]
    figures = f"{tokens(result)} of at most {result.num_draft_tokens + 1}"
    figures += "" if rate is None else f"; {1 - rate:.0%} of drafts are rejected at the first position"
    advice = (
        "None of the causes of low acceptance that would show in these figures is there. What is left is the drafter "
        "itself: its inputs and, for a head, its training data and the length of its training."
    )
    return [Finding(UNEXPLAINED, advice, figures), *of_time]


def milliseconds(timing: Timing) -> tuple[float, float, float, float] | None:
    """The milliseconds of drafting, of verifying, of the rest of a round and of a baseline step; None if nothing was
    timed."""
    draft, verify, rest, base = timing.draft_ms, timing.verify_ms, timing.overhead_ms, timing.baseline_ms
    return None if draft is None or verify is None or rest is None or base is None else (draft, verify, rest, base)


def too_many_drafts(case: Case) -> Finding | None:
    """Late positions of a chain that add fewer tokens than their share of the round's time is worth."""
    result, most = case.result, case.result.num_draft_tokens
    times = milliseconds(result.timing)
    if result.tree not in ("chain", "sampled-chain") or times is None or most < 2:
        return None
    draft, verify, rest, base = times
    joint = joint_rates(result)
    per_draft = (draft + max(verify - base, 0.0)) / most
    per_token = {k: (draft + verify + rest - (most - k) * per_draft) / (1 + sum(joint[:k])) for k in range(1, most + 1)}
    best = min(per_token, key=lambda k: per_token[k])
    gain = per_token[most] / per_token[best] - 1
    if best == most or gain < LEAST_GAIN:
        return None
    advice = (
        "The tokens that the last position adds are worth the time that a round takes for as many tokens. Its cost is "
        "estimated: drafting, and verifying beyond a baseline step, spread evenly over the positions. A part of that "
        "time does not depend on K, so less is gained than the estimate. Measure the smaller K."
    )
    figures = (
        f"position {most} adds {joint[-1]:.3f} tokens, worth {joint[-1] * per_token[most]:.2f} ms, and costs about "
        f"{per_draft:.2f} ms; --num-draft-tokens {best} would be up to {gain:.0%} faster"
    )
    return Finding("K may be too large: late positions add little", advice, figures)


def costs_more_than_it_saves(case: Case) -> Finding | None:
    """A round that takes longer than the baseline steps that its tokens save, and what most of its time goes into."""
    times, length = milliseconds(case.result.timing), case.result.acceptance_length
    if times is None or length is None:
        return None
    draft, verify, rest, base = times
    if draft + verify + rest < length * base:
        return None
    excess = {"Drafting": draft, "Verifying": verify - base, "The work around a round": rest}
    largest = max(excess, key=lambda name: excess[name])
    advice = (
        "A round adds more time to a baseline step than the steps that it saves would have taken; "
        f"{largest[0].lower()}{largest[1:]} is the largest part."
    )
    figures = (
        f"saves {length - 1:.2f} steps of {base:.2f} ms, {(length - 1) * base:.2f} ms; adds {draft:.2f} ms of "
        f"drafting, {verify - base:.2f} ms of verifying beyond a step, {rest:.2f} ms of the rest"
    )
    return Finding(f"{largest} costs more than the drafts save", advice, figures)


TIME_RULES: tuple[Rule, ...] = (too_many_drafts, costs_more_than_it_saves)
