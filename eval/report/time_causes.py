"""Why drafts that are accepted save less time than they could: causes among a result's times."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .findings import Finding, is_twin, tokens
from .recommendation import Result, speedup_words

LEAST_GAIN = 0.02  # expected gain by fewer drafts below which K is left alone


def too_many_drafts(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Late positions of a chain that add fewer tokens than their share of the round's time is worth."""
    timing, most = entry["timing"], entry["num_draft_tokens"]
    if entry["tree"] not in ("chain", "sampled-chain") or timing["draft_ms"] is None or most < 2:
        return None
    joint = list(accumulate((rate or 0.0 for rate in entry["acceptance_rate"]), mul))
    whole = timing["draft_ms"] + timing["verify_ms"] + timing["overhead_ms"]
    each = (timing["draft_ms"] + max(timing["verify_ms"] - timing["baseline_ms"], 0.0)) / most
    per_token = {k: (whole - (most - k) * each) / (1 + sum(joint[:k])) for k in range(1, most + 1)}  # ms
    best = min(per_token, key=lambda k: per_token[k])
    gain = per_token[most] / per_token[best] - 1
    if best == most or gain < LEAST_GAIN:
        return None
    advice = (
        "The last position adds as many tokens to a round as all drafts stand, and may cost what a round takes for as "
        "many. What it does cost is estimated: drafting, and verifying beyond a baseline step, spread evenly over the "
        "positions; a part of it does not depend on K, so less is gained than the estimate. Measure the smaller K."
    )
    words = (
        f"position {most} adds {joint[-1]:.3f} tokens, may cost {joint[-1] * per_token[most]:.2f} ms and costs about "
        f"{each:.2f} ms; --num-draft-tokens {best} would be up to {gain:.0%} faster"
    )
    return Finding("K may be too large: late positions add little", advice, words)


def tree_too_wide(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A tree that is accepted more than the chain and is slower beyond doubt."""
    chains = [one for one in peers if one["tree"] == "chain" and is_twin(one, entry)]
    if "chain" in entry["tree"] or not chains or entry["speedup"] is None or chains[0]["speedup"] is None:
        return None
    chain, high = chains[0], entry["speedup_ci95"][1]
    if entry["acceptance_length"] <= chain["acceptance_length"] or high >= chain["speedup_ci95"][0]:
        return None
    ours, theirs = (
        f"{tokens(one)}, drafts {one['timing']['draft_ms']:.2f} ms, verifies {one['timing']['verify_ms']:.2f} ms, "
        f"speedup {speedup_words(one)}"
        for one in (entry, chain)
    )
    advice = "It is accepted more than the chain and is slower. Draft the chain, or fewer --tree-nodes."
    return Finding("The tree costs more than it brings", advice, f"{ours}; the chain {theirs}")


def costs_more_than_it_saves(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A round that takes longer than the baseline steps that its tokens stand for, and what most of it goes into."""
    timing, length = entry["timing"], entry["acceptance_length"]
    if timing["draft_ms"] is None or length is None:
        return None
    base = timing["baseline_ms"]
    if timing["draft_ms"] + timing["verify_ms"] + timing["overhead_ms"] < length * base:
        return None
    excess = {
        "Drafting": timing["draft_ms"],
        "Verifying": timing["verify_ms"] - base,
        "The work around a round": timing["overhead_ms"],
    }
    largest = max(excess, key=lambda name: excess[name])
    advice = (
        "A round adds more time to a baseline step than the steps that it saves would have taken; "
        f"{largest[0].lower()}{largest[1:]} is the largest part."
    )
    words = (
        f"saves {length - 1:.2f} steps of {base:.2f} ms, {(length - 1) * base:.2f} ms; adds {timing['draft_ms']:.2f} "
        f"ms of drafting, {timing['verify_ms'] - base:.2f} ms of verifying beyond a step, {timing['overhead_ms']:.2f} "
        "ms of the rest"
    )
    return Finding(f"{largest} costs more than the drafts save", advice, words)
