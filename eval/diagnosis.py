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
    """cause: a heading, alike for all results it is found in. words: the figures that say so, and what to do."""

    cause: str
    words: str


Rule = Callable[[Result, Sequence[Result]], Finding | None]


def accepted_share(entry: Result) -> float | None:
    """Accepted drafts per drafted position of a path, 0 to 1."""
    length = entry["acceptance_length"]
    return None if length is None else (length - 1) / entry["num_draft_tokens"]


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
    words = (
        f"Measured at temperature {entry['temperature']:g}: acceptance length {entry['acceptance_length']:.2f}, of at "
        f"most {entry['num_draft_tokens'] + 1}. A draft is the drafter's best guess, and the target's sampled token "
        "need not be its own most probable one. "
    )
    better = [one for one in peers if one["tree"].startswith("sampled") and one["drafter"] == entry["drafter"]]
    better = [one for one in better if one["suite"] == entry["suite"] and is_lower(entry, one)]
    if better:
        words += f"Here --tree {better[0]['tree']} reaches {better[0]['acceptance_length']:.2f}."
    else:
        words += "--temperature 0 on the same prompts would show what sampling costs."
    return Finding("Sampling: temperature above 0", words)


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
    return Finding(
        "K too large: late positions add little",
        f"Position {most} adds {joint[-1]:.3f} tokens to a round: so often all {most} drafts stand. At "
        f"{per_token[most]:.2f} ms per token it may cost {joint[-1] * per_token[most]:.2f} ms; spread evenly, drafting "
        f"and the verification beyond a baseline step cost {each:.2f} ms per position. By that estimate K {best} would be "
        f"{gain:.0%} faster: measure --num-draft-tokens {best}.",
    )


def tree_too_wide(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A tree that is accepted more than the chain and is slower beyond doubt."""
    chains = [one for one in peers if one["tree"] == "chain" and is_twin(one, entry)]
    if "chain" in entry["tree"] or not chains or entry["speedup"] is None or chains[0]["speedup"] is None:
        return None
    chain, high = chains[0], entry["speedup_ci95"][1]
    if entry["acceptance_length"] <= chain["acceptance_length"] or high >= chain["speedup_ci95"][0]:
        return None
    ours, theirs = (
        f"{one['timing']['draft_ms']:.2f} ms of drafting and {one['timing']['verify_ms']:.2f} ms of verifying"
        for one in (entry, chain)
    )
    return Finding(
        "The tree costs more than it brings",
        f"It is accepted more than the chain ({entry['acceptance_length']:.2f} tokens against "
        f"{chain['acceptance_length']:.2f}) and slower: speedup {speedup_words(entry)} against {speedup_words(chain)}. "
        f"A round takes {ours}, the chain's {theirs}. Draft the chain, or fewer --tree-nodes.",
    )


def is_twin(one: Result, entry: Result) -> bool:
    """Whether two results have the same drafter, suite, batch size and sampling."""
    return all(one[key] == entry[key] for key in ("drafter", "suite", "batch_size", "temperature", "accept"))


def other_domain(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A suite on which the same setting is accepted less than on another."""
    better = [one for one in same_but(entry, peers, "suite") if is_lower(entry, one)]
    if not better:
        return None
    best = max(better, key=lambda one: one["acceptance_length"])
    return Finding(
        "Domain: this suite is drafted worse than another",
        f"On {entry['suite']} {entry['acceptance_length']:.2f} tokens per forward, on {best['suite']} "
        f"{best['acceptance_length']:.2f}, same drafter and settings. If such prompts are served, train on the "
        "target's own answers to prompts like them, in the template that they are served in.",
    )


def segments_differ(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Reasoning traces drafted worse than answers, or the other way round."""
    parts = sorted(entry["by_segment"].items(), key=lambda item: item[1]["acceptance_length"])
    if len(parts) < 2 or not is_lower(parts[0][1], parts[-1][1]):
        return None
    (worse, low), (better, high) = parts[0], parts[-1]
    return Finding(
        "Segments: one is drafted worse than the other",
        f"In `{worse}` {low['acceptance_length']:.2f} tokens per forward, in `{better}` "
        f"{high['acceptance_length']:.2f}. Check that training rows have `{worse}` tokens, and that they count.",
    )


def training_disagrees(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A teacher-forced figure, on the decoded text itself, beyond what cut last rounds explain; greedy only."""
    forced, rounds, rows = entry["teacher_forced_acceptance_length"], entry["num_rounds"], entry["num_prompts"]
    if forced is None or entry["temperature"] or rounds <= rows:
        return None
    low = (entry["num_committed"] - rows * (entry["num_draft_tokens"] + 1)) / rounds
    high = entry["num_committed"] / (rounds - rows)
    if low <= forced <= high:
        return None
    return Finding(
        "Training and decoding disagree",
        f"On the very text that was decoded, the head's training-time view predicts {forced:.2f} tokens per forward; "
        f"decoding reaches {entry['acceptance_length']:.2f}, and cut last rounds explain only {low:.2f} to {high:.2f}. "
        "The head reads something else in decoding than in training (positions, hidden states, masks): no setting here "
        "mends that.",
    )


def cut_vocabulary(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A draft vocabulary without tokens that the target wrote."""
    cut, rate = entry["draft_vocabulary"], (entry["acceptance_rate"] or [None])[0]
    if not cut or cut["coverage"] is None or rate is None or rate >= 1:
        return None
    missing = 1 - cut["coverage"]
    if missing < LEAST_UNCOVERED * (1 - rate):
        return None
    return Finding(
        "Vocabulary: the head cannot draft what the target writes",
        f"Its {cut['size']:,} draft tokens are {cut['coverage']:.1%} of what the target wrote on {entry['suite']}; the "
        f"other {missing:.1%} can never be drafted, and at the first position {1 - rate:.1%} of all drafts are "
        "rejected. Train with a larger head.draft_vocab_size, or choose it from answers in this domain (headstart data vocab).",
    )


def long_context(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """Acceptance that falls with the length of the context, against the length of training rows where it is known."""
    parts = sorted(entry["by_context"].items(), key=lambda item: int(item[0].split("-")[0]))
    fallen = [(name, part) for name, part in parts[1:] if is_lower(part, parts[0][1])]
    if not fallen:
        return None
    (first, short), (name, part) = parts[0], min(fallen, key=lambda item: item[1]["acceptance_length"])
    words = (
        f"At {name} tokens of context {part['acceptance_length']:.2f} tokens per forward, at {first} "
        f"{short['acceptance_length']:.2f}. "
    )
    trained = entry.get("trained_max_length")
    if trained is None:
        return Finding(
            "Long contexts are drafted worse", words + "How long the head's training rows were is not known here."
        )
    if int(name.split("-")[0]) < trained:
        words += f"Training rows had up to {trained:,} tokens: check how many were that long."
        return Finding("Long contexts are drafted worse", words)
    words += f"Training rows had at most {trained:,} tokens: train on longer ones (data.max_length)."
    return Finding("Contexts beyond the training length", words)


def costs_more_than_it_saves(entry: Result, peers: Sequence[Result]) -> Finding | None:
    """A round that takes longer than the baseline steps that its tokens stand for, and what most of it goes into."""
    timing, length = entry["timing"], entry["acceptance_length"]
    if timing["draft_ms"] is None or length is None:
        return None
    base = timing["baseline_ms"]
    whole = timing["draft_ms"] + timing["verify_ms"] + timing["overhead_ms"]
    if whole < length * base:
        return None
    excess = {
        "Drafting": timing["draft_ms"],
        "Verifying": timing["verify_ms"] - base,
        "The work around a round": timing["overhead_ms"],
    }
    largest = max(excess, key=lambda name: excess[name])
    return Finding(
        f"{largest} costs more than the drafts save",
        f"A round saves {length - 1:.2f} baseline steps of {base:.2f} ms, {(length - 1) * base:.2f} ms. "
        f"It adds {timing['draft_ms']:.2f} ms of drafting, {timing['verify_ms'] - base:+.2f} ms of verifying against a "
        f"baseline step, and {timing['overhead_ms']:.2f} ms of the rest.",
    )


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
    first = "" if rate is None else f" {1 - rate:.0%} of drafts are rejected at the first position."
    words = (
        f"{entry['acceptance_length']:.2f} tokens per forward, of at most {entry['num_draft_tokens'] + 1}.{first} None "
        "of the causes that these figures could show is there: what is left is what the drafter guesses from (a head: "
        "what it learnt, and how long)."
    )
    return [Finding("Low acceptance, cause not in these figures", words), *named]
