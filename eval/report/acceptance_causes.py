"""Why drafts are accepted less than they could be: causes that a result's own figures and the head's training show."""

from ..measurement.result import AcceptancePart
from .findings import (
    LOW_ACCEPTANCE,
    Case,
    Finding,
    accepted_share,
    below_validation,
    is_lower,
    length_of,
    merged,
    tokens,
    validated,
)

LEAST_UNCOVERED = 0.1  # share of the first position's rejections that a cut vocabulary must explain
MOST_UNLIKE = 0.5  # share of prompts that must end as in training


def asked_otherwise(case: Case) -> str | None:
    """How these prompts were rendered unlike those of training, as far as both are known; None: alike, or unknown."""
    before, found = case.trained, []
    here, there = result.template_hash, before.get("template_hash")
    if here and there and here != there:
        found.append(f"the chat template here ({here[:8]}) is not training's ({there[:8]})")
    alike = result.asked_as_trained
    if alike is not None and alike < MOST_UNLIKE:
        words = f"of these prompts {alike:.0%} end with {before['prompt_ending']['text']!r}, as all in training did"
        found.append(words)
    ways, thinking = {way.thinking for way in before.get("answers") or []}, result.thinking
    if thinking is not None and ways == {not thinking}:  # where one was told nothing, its template's default may agree
        found.append(f"thinking is {'on' if thinking else 'off'} here, it was not so for the training answers")
    return "; ".join(found) or None


def wrong_template(case: Case) -> Finding | None:
    """Prompts that were rendered unlike those of training, and are accepted less than its validation was."""
    how, share = asked_otherwise(case), accepted_share(case)
    if how is None or share is None:
        return None
    less = below_validation(case)
    if less is None and (validated(case) is not None or share >= LOW_ACCEPTANCE):
        return None
    advice = (
        "The head learnt from prompts in another form than these have. Measure it, and serve it, with the chat "
        "template of its training: messages rather than plain prompts, the same system prompt and thinking. Whether "
        "they are of another domain too shows only then."
    )
    return Finding("Template: asked otherwise than in training", advice, f"{how}; {less or tokens(result)}")


def sampling(case: Case) -> Finding | None:
    """Temperature above 0 with deterministic drafts, accepted less than greedily in validation, or, unknown, little."""
    share = accepted_share(case)
    if not result.temperature or share is None or result.tree.startswith("sampled"):
        return None
    less = below_validation(case)
    if less is None and (validated(case) is not None or share >= LOW_ACCEPTANCE):
        return None
    words = f"temperature {entry['temperature']:g}, "
    words += f"{less}, greedily" if less else f"{tokens(result)} of at most {entry['num_draft_tokens'] + 1}"
    alike = [one for one in peers if one.drafter == result.drafter and one.suite == result.suite]
    better = [one for one in alike if one.tree.startswith("sampled") and is_lower(result, one)]
    if better:
        words += f"; with --tree {better[0]['tree']} {tokens(better[0])}"
    advice = (
        "A draft is the drafter's best guess, and the target's sampled token need not be its own most probable one. "
        "--tree sampled draws the drafts too; --temperature 0 on the same prompts shows what sampling costs."
    )
    return Finding("Sampling: temperature above 0", advice, words)


def other_domain(case: Case) -> Finding | None:
    """A suite on which the same setting is accepted less than on another, or less than in the head's validation.

    Validation is greedy, so it is compared with greedy results alone, and only over contexts as long as training rows.
    """
    if wrong_template(case):
        return None
    better = [one for one in same_but(entry, peers, "suite") if is_lower(result, one)]
    if better and not beyond_training(case):
        best = max(better, key=lambda one: one.acceptance_length)
        advice = (
            "The same drafter and settings are accepted less on one suite than on another. A head that is to serve "
            "such prompts learns from the target's own answers to prompts like them, in the template that they are "
            "served in."
        )
        words = f"{tokens(result)} here, {tokens(best)} on {best['suite']}"
        return Finding("Domain: this suite is drafted worse than another", advice, words)
    within = merged([part for _, part in contexts(case)[0]])
    less = below_validation(case, within) if within and not result.temperature else None
    if less is None:
        return None
    advice = (
        "The head is accepted less than in the validation of its own training, in the same form: the prompts are not "
        "like the training rows, or their answers are not. Train on the target's own answers to prompts like these."
    )
    return Finding("Domain: prompts are not like the training rows", advice, less)


def other_dtype(case: Case) -> Finding | None:
    """A target in another dtype, or quantised otherwise, than the one that the head was trained on; greedy only."""
    before, now = case.trained, result.target or {}
    keys = {"target_dtype": "dtype", "target_quantization": "quantization"}
    differs = [
        f"{name} {now[name] or 'none'}, in training {before[key] or 'none'}"
        for key, name in keys.items()
        if key in before and name in now and now[name] != before[key]
    ]
    less = None if result.temperature or asked_otherwise(case) else below_validation(case)
    if not differs or less is None:
        return None
    advice = (
        "The target computes in another precision than it did in training, so its hidden states and its choices are "
        "others; how much of the loss this is, a measurement in training's precision (--dtype) shows."
    )
    return Finding("Target: computed otherwise than in training", advice, f"{'; '.join(differs)}; {less}")


def segments_differ(case: Case) -> Finding | None:
    """Reasoning traces drafted worse than answers, or the other way round."""
    parts = sorted(result.by_segment.items(), key=lambda item: item[1].acceptance_length)
    if len(parts) < 2 or not is_lower(parts[0][1], parts[-1][1]):
        return None
    (worse, low), (better, high) = parts[0], parts[-1]
    advice = "Check that training rows have tokens of the worse segment, and that they are supervised."
    words = f"in `{worse}` {tokens(low)}, in `{better}` {tokens(high)}"
    return Finding("Segments: one is drafted worse than the other", advice, words)


def training_disagrees(case: Case) -> Finding | None:
    """A teacher-forced figure, on the decoded text itself, beyond what cut last rounds explain; greedy only."""
    forced, rounds, rows = result.teacher_forced_acceptance_length, result.num_rounds, result.num_prompts
    if forced is None or result.temperature or rounds <= rows:
        return None
    low = (result.num_committed - rows * (result.num_draft_tokens + 1)) / rounds
    high = result.num_committed / (rounds - rows)
    if low <= forced <= high:
        return None
    advice = (
        "On the very text that was decoded, the head's training-time view predicts another figure than decoding "
        "reaches, beyond what cut last rounds explain. The head reads something else in decoding than in training "
        "(positions, hidden states, masks): no setting here mends that."
    )
    words = f"predicted {forced:.2f}, decoded {tokens(result)}; cut rounds explain {low:.2f} to {high:.2f}"
    return Finding("Training and decoding disagree", advice, words)


def cut_vocabulary(case: Case) -> Finding | None:
    """A draft vocabulary without tokens that the target wrote."""
    cut, rate = result.draft_vocabulary, (result.acceptance_rate or [None])[0]
    if not cut or cut.coverage is None or rate is None or rate >= 1:
        return None
    missing = 1 - cut.coverage
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


Parts = list[tuple[str, dict[str, Any]]]


def contexts(case: Case) -> tuple[Parts, Parts]:
    """The parts by context, shortest first: those as long as training rows (where unknown, all), and longer ones."""
    parts = sorted(result.by_context.items(), key=lambda item: first_of(item[0]))
    most = case.trained.get("max_length")
    if most is None:
        return parts, []
    return [one for one in parts if first_of(one[0]) <= most], [one for one in parts if first_of(one[0]) > most]


def first_of(bucket: str) -> int:
    """Of `128-511` tokens the 128."""
    return int(bucket.split("-")[0])


def beyond_training(case: Case) -> Finding | None:
    """Contexts longer than any training row, drafted worse than shorter ones, or, without such, than in validation."""
    most = case.trained.get("max_length")
    short, long = contexts(case)
    within, beyond = merged([part for _, part in short]), merged([part for _, part in long])
    if beyond is None:
        return None
    if within is not None:
        words = f"with {first_of(long[0][0]):,} and more {tokens(beyond)}, before {tokens(within)}"
        less = words if is_lower(beyond, within) else None
    else:
        less = None if result.temperature or asked_otherwise(case) else below_validation(case, beyond)
    if less is None:
        return None
    advice = "Acceptance falls where contexts are longer than any training row: train on longer ones (data.max_length)."
    return Finding("Contexts beyond the training length", advice, f"training rows had at most {most:,} tokens; {less}")


def long_context(case: Case) -> Finding | None:
    """Acceptance that falls with the length of the context, as far as training rows reach, or that is not known."""
    parts = contexts(case)[0]
    fallen = [(name, part) for name, part in parts[1:] if is_lower(part, parts[0][1])]
    if not fallen:
        return None
    (first, start), (name, part) = parts[0], min(fallen, key=lambda item: item[1].acceptance_length)
    words, most = f"at {name} tokens {tokens(part)}, at {first} {tokens(start)}", case.trained.get("max_length")
    if most is None:
        advice = "Acceptance falls with the context's length. How long training rows were is not known here."
        return Finding("Long contexts are drafted worse", advice, words)
    words += f"; training rows had at most {most:,} tokens"
    advice = "Acceptance falls within the length of training rows: check how many of them were that long."
    return Finding("Long contexts are drafted worse, within the training length", advice, words)
