"""Why a drafter is accepted less, or saves less, than it could: causes that a result's own figures show.

Each rule is a pure function of a result and its peers (all results of our engine) that finds one cause, or None.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import Any

from .verdict import Result, speedup_words

LOW_ACCEPTANCE = 0.5  # share of drafted positions that are accepted, below which acceptance counts as low
LEAST_FALL = 0.1  # relative differences of acceptance_length below it are not worth a finding
STANDARD_ERRORS = 3.0
LEAST_UNCOVERED = 0.1  # share of the first position's rejections that a cut vocabulary must explain
LEAST_GAIN = 0.02  # expected gain by fewer drafts below which K is left alone


@dataclass(frozen=True)
class Finding:
    """cause, advice: a heading, and what it means, alike for all results. words: the figures of one that say so."""

    cause: str
    advice: str
    words: str


Rule = Callable[[Result, Sequence[Result]], Finding | None]


def accepted_share(entry: Result) -> float | None:
    """Accepted drafts per drafted position of a path, 0 to 1."""
    length = entry["acceptance_length"]
    return None if length is None else (length - 1) / entry["num_draft_tokens"]


def tokens(part: dict[str, Any]) -> str:
    """An acceptance_length in words."""
    return f"{part['acceptance_length']:.2f} tokens per forward"


def standard_error(part: dict[str, Any]) -> float:
    """Of an acceptance_length, from its rates: rounds taken as independent. Tokens."""
    reached, mean, square = 1.0, 0.0, 0.0
    for accepted, rate in enumerate([*(rate or 0.0 for rate in part["acceptance_rate"]), 0.0]):
        chance = reached * (1 - rate)  # of exactly so many accepted drafts
        mean, square, reached = mean + chance * accepted, square + chance * accepted**2, reached * rate
    return sqrt(max(square - mean**2, 0.0) / max(part["num_rounds"], 1))


def is_lower(part: dict[str, Any], than: dict[str, Any]) -> bool:
    """Whether an acceptance_length lies below another by a tenth, and by more than chance explains."""
    low, high = part["acceptance_length"], than["acceptance_length"]
    if not low or not high or low > (1 - LEAST_FALL) * high:
        return False
    return high - low > STANDARD_ERRORS * sqrt(standard_error(part) ** 2 + standard_error(than) ** 2)


def same_but(entry: Result, peers: Sequence[Result], key: str) -> list[Result]:
    """Peers that differ in one key and agree in all else that was chosen."""
    chosen = {"drafter", "suite", "tree", "num_draft_tokens", "temperature", "accept", "batch_size"} - {key}
    return [one for one in peers if one[key] != entry[key] and all(one[name] == entry[name] for name in chosen)]


def sampling(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Temperature above 0 with deterministic drafts."""
    share = accepted_share(entry)
    if not entry["temperature"] or share is None or share >= LOW_ACCEPTANCE or entry["tree"].startswith("sampled"):
        return None
    words = f"temperature {entry['temperature']:g}, {tokens(entry)} of at most {entry['num_draft_tokens'] + 1}"
    alike = [one for one in peers if one["drafter"] == entry["drafter"] and one["suite"] == entry["suite"]]
    better = [one for one in alike if one["tree"].startswith("sampled") and is_lower(entry, one)]
    if better:
        words += f"; with --tree {better[0]['tree']} {tokens(better[0])}"
    advice = (
        "A draft is the drafter's best guess, and the target's sampled token need not be its own most probable one. "
        "--tree sampled draws the drafts too; --temperature 0 on the same prompts shows what sampling costs."
    )
    return Finding("Sampling: temperature above 0", advice, words)


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


def is_twin(one: Result, entry: Result) -> bool:
    """Whether two results have the same drafter, suite, batch size and sampling."""
    return all(one[key] == entry[key] for key in ("drafter", "suite", "batch_size", "temperature", "accept"))


def other_domain(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A suite on which the same setting is accepted less than on another."""
    better = [one for one in same_but(entry, peers, "suite") if is_lower(entry, one)]
    if not better:
        return None
    best = max(better, key=lambda one: one["acceptance_length"])
    advice = (
        "The same drafter and settings are accepted less on one suite than on another. A head that is to serve such "
        "prompts learns from the target's own answers to prompts like them, in the template that they are served in."
    )
    words = f"{tokens(entry)} here, {tokens(best)} on {best['suite']}"
    return Finding("Domain: this suite is drafted worse than another", advice, words)


def segments_differ(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Reasoning traces drafted worse than answers, or the other way round."""
    parts = sorted(entry["by_segment"].items(), key=lambda item: item[1]["acceptance_length"])
    if len(parts) < 2 or not is_lower(parts[0][1], parts[-1][1]):
        return None
    (worse, low), (better, high) = parts[0], parts[-1]
    advice = "Check that training rows have tokens of the worse segment, and that they are supervised."
    words = f"in `{worse}` {tokens(low)}, in `{better}` {tokens(high)}"
    return Finding("Segments: one is drafted worse than the other", advice, words)


def training_disagrees(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A teacher-forced figure, on the decoded text itself, beyond what cut last rounds explain; greedy only."""
    forced, rounds, rows = entry["teacher_forced_acceptance_length"], entry["num_rounds"], entry["num_prompts"]
    if forced is None or entry["temperature"] or rounds <= rows:
        return None
    low = (entry["num_committed"] - rows * (entry["num_draft_tokens"] + 1)) / rounds
    high = entry["num_committed"] / (rounds - rows)
    if low <= forced <= high:
        return None
    advice = (
        "On the very text that was decoded, the head's training-time view predicts another figure than decoding "
        "reaches, beyond what cut last rounds explain. The head reads something else in decoding than in training "
        "(positions, hidden states, masks): no setting here mends that."
    )
    words = f"predicted {forced:.2f}, decoded {tokens(entry)}; cut rounds explain {low:.2f} to {high:.2f}"
    return Finding("Training and decoding disagree", advice, words)


def cut_vocabulary(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A draft vocabulary without tokens that the target wrote."""
    cut, rate = entry["draft_vocabulary"], (entry["acceptance_rate"] or [None])[0]
    if not cut or cut["coverage"] is None or rate is None or rate >= 1:
        return None
    missing = 1 - cut["coverage"]
    if missing < LEAST_UNCOVERED * (1 - rate):
        return None
    advice = (
        "A token outside the draft vocabulary can never be drafted. Train with a larger head.draft_vocab_size, or "
        "choose the vocabulary from answers in this domain (headstart data vocab)."
    )
    words = (
        f"{cut['size']:,} draft tokens lack {missing:.1%} of what the target wrote here; at the first position "
        f"{1 - rate:.1%} of drafts are rejected"
    )
    return Finding("Vocabulary: the head cannot draft what the target writes", advice, words)


def long_context(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Acceptance that falls with the length of the context, against the length of training rows where it is known."""
    parts = sorted(entry["by_context"].items(), key=lambda item: int(item[0].split("-")[0]))
    fallen = [(name, part) for name, part in parts[1:] if is_lower(part, parts[0][1])]
    if not fallen:
        return None
    (first, short), (name, part) = parts[0], min(fallen, key=lambda item: item[1]["acceptance_length"])
    words = f"at {name} tokens {tokens(part)}, at {first} {tokens(short)}"
    trained = entry.get("trained_max_length")
    if trained is None:
        advice = "Acceptance falls with the context's length. How long training rows were is not known here."
        return Finding("Long contexts are drafted worse", advice, words)
    words += f"; training rows had at most {trained:,} tokens"
    if int(name.split("-")[0]) < trained:
        advice = "Acceptance falls within the length of training rows: check how many of them were that long."
        return Finding("Long contexts are drafted worse, within the training length", advice, words)
    advice = "Acceptance falls where contexts are longer than any training row: train on longer ones (data.max_length)."
    return Finding("Contexts beyond the training length", advice, words)


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


RULES: tuple[Rule, ...] = (
    training_disagrees,
    other_domain,
    segments_differ,
    long_context,
    cut_vocabulary,
    sampling,
    too_many_drafts,
    tree_too_wide,
    costs_more_than_it_saves,
)
ACCEPTANCE_RULES = RULES[:6]


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
