"""Why a drafter is accepted less, or saves less, than it could: every cause that a result's own figures show.

Each rule is a pure function of a result and its peers (all results of our engine) that finds one cause, or None. Those
of acceptance come first, and of them those that the figures show directly before those that they suggest.
"""

from collections.abc import Sequence

from .acceptance_causes import (
    beyond_training,
    cut_vocabulary,
    long_context,
    other_domain,
    other_dtype,
    sampling,
    segments_differ,
    training_disagrees,
    wrong_template,
)
from .findings import LOW_ACCEPTANCE, Finding, Rule, accepted_share, tokens
from .recommendation import Result
from .time_causes import costs_more_than_it_saves, too_many_drafts, tree_too_wide

ACCEPTANCE_RULES: tuple[Rule, ...] = (
    training_disagrees,
    wrong_template,
    cut_vocabulary,
    beyond_training,
    sampling,
    other_domain,
    other_dtype,
    long_context,
    segments_differ,
)
RULES: tuple[Rule, ...] = (*ACCEPTANCE_RULES, too_many_drafts, tree_too_wide, costs_more_than_it_saves)


def diagnose(entry: Result, peers: Sequence[Result]) -> list[Finding]:
    """Every cause that the figures show; where acceptance is low and none does, that."""
    found = {rule: rule(entry, peers) for rule in RULES}
    share = accepted_share(entry)
    named = [finding for finding in found.values() if finding]
    if share is None or share >= LOW_ACCEPTANCE or any(found[rule] for rule in ACCEPTANCE_RULES):
        return named
    rate = (entry["acceptance_rate"] or [None])[0]
    words = f"{tokens(entry)} of at most {entry['num_draft_tokens'] + 1}"
    words += "" if rate is None else f"; {1 - rate:.0%} of drafts are rejected at the first position"
    advice = (
        "None of the causes that lower acceptance and would show in these figures is there. What is left is what the "
        "drafter guesses from; of a head, what it learnt from, and how long."
    )
    return [Finding("Low acceptance, cause not in these figures", advice, words), *named]
