"""Causes of rejected drafts, as they show in a result's own figures and in the record of the head's training."""

from ...figures.metrics import AcceptancePart
from ...measurement.breakdown import range_start
from .findings import (
    Case,
    Finding,
    Rule,
    below_validation,
    is_lower,
    low_acceptance,
    merged,
    sortable_length,
    tokens,
    validated,
)

LEAST_UNCOVERED = 0.1  # share of the first position's rejections that a cut vocabulary must explain
LEAST_LIKE_TRAINING = 0.5  # share of prompts that must end as in training


def rendered_differently(case: Case) -> str | None:
    """How these prompts were rendered unlike those of training, in words; None: alike, or not known."""
    result, trained, differences = case.result, case.trained, []
    here, there = result.rendering.template_hash, trained.template_hash
    if here and there and here != there:
        differences.append(f"the chat template here ({here[:8]}) is not that of training ({there[:8]})")
    share = result.like_training.asked
    if share is not None and share < LEAST_LIKE_TRAINING and trained.prompt_ending:
        ending = trained.prompt_ending.text
        differences.append(f"{share:.0%} of these prompts end with {ending!r}, as all prompts in training did")
    thinking, settings = result.rendering.thinking, {answers.thinking for answers in trained.answers or []}
    if thinking is not None and settings == {not thinking}:  # None: the template's default, which may be the same
        on, off = ("on", "off") if thinking else ("off", "on")
        differences.append(f"thinking is {on} here, and was {off} for the training answers")
    return "; ".join(differences) or None


def wrong_template(case: Case) -> Finding | None:
    """Prompts rendered unlike those of training, and accepted less than in its validation."""
    differences, low = rendered_differently(case), low_acceptance(case)
    if differences is None or low is None:
        return None
    advice = (
        "The head was trained on prompts in another form. Measure it, and serve it, with the chat template of its "
        "training: messages rather than plain prompts, the same system prompt, and the same thinking setting. Whether "
        "the prompts are of another domain too shows only then."
    )
    return Finding("Template: prompts are rendered unlike in training", advice, f"{differences}; {low}")


def sampling(case: Case) -> Finding | None:
    """Temperature above 0 with deterministic drafts, accepted less than greedily in validation, or, unknown, little."""
    result, low = case.result, low_acceptance(case)
    if not result.temperature or low is None or result.tree.startswith("sampled"):
        return None
    compared = "greedily" if validated(case) else f"of at most {result.num_draft_tokens + 1}"
    figures = f"temperature {result.temperature:g}, {low}, {compared}"
    for peer in case.peers:
        same = (peer.drafter, peer.suite) == (result.drafter, result.suite)
        if same and peer.tree.startswith("sampled") and is_lower(result, peer):
            figures += f"; with --tree {peer.tree} {tokens(peer)}"
            break
    advice = (
        "A draft is the drafter's most probable token, and the token that the target samples need not be the target's "
        "own most probable one. --tree sampled-chain samples the drafts too; --temperature 0 on the same prompts shows "
        "what sampling costs."
    )
    return Finding("Sampling: temperature above 0", advice, figures)


def other_domain(case: Case) -> Finding | None:
    """A suite on which the same setting is accepted less than on another, or less than in the head's validation.

    Validation is greedy, so it is compared with greedy results only, and only over contexts as long as training rows.
    """
    if wrong_template(case):
        return None
    result = case.result
    drafts = result.tree, result.num_draft_tokens
    same = [peer for peer in case.alike if (peer.tree, peer.num_draft_tokens) == drafts and peer.suite != result.suite]
    better = [peer for peer in same if is_lower(result, peer)]
    if better and not worse_beyond_training(case):
        best = max(better, key=sortable_length)
        advice = (
            "The same drafter and settings are accepted less on one suite than on another. For such prompts, train the "
            "head on the target's own answers to prompts like them, in the template in which they are served."
        )
        figures = f"{tokens(result)} here, {tokens(best)} on {best.suite}"
        return Finding("Domain: accepted less on this suite than on another", advice, figures)
    within = merged([part for _, part in contexts(case)[0]])
    less = below_validation(case, within) if within and not result.temperature else None
    if less is None:
        return None
    advice = (
        "The head is accepted less than in the validation of its own training, with prompts in the same form: these "
        "prompts, or their answers, are not like the training rows. Train on the target's own answers to prompts like "
        "these."
    )
    return Finding("Domain: prompts are not like the training rows", advice, less)


def other_dtype(case: Case) -> Finding | None:
    """A target in another dtype, or quantised otherwise, than the one that the head was trained on; greedy only."""
    trained, target = case.trained, case.target
    if trained.target_dtype is None or target is None or target.dtype is None:
        return None
    dtypes, quantizations = (target.dtype, trained.target_dtype), (target.quantization, trained.target_quantization)
    differences = [
        f"{name} {here or 'none'}, in training {there or 'none'}"
        for name, (here, there) in (("dtype", dtypes), ("quantization", quantizations))
        if here != there
    ]
    less = None if case.result.temperature or rendered_differently(case) else below_validation(case)
    if not differences or less is None:
        return None
    advice = (
        "The target computes in another precision than in training, so its hidden states and its choices differ. "
        "Measure in the precision of training (--dtype) to see how much of the difference this explains."
    )
    return Finding("Target: another precision than in training", advice, f"{'; '.join(differences)}; {less}")


def training_disagrees(case: Case) -> Finding | None:
    """A teacher-forced length on the decoded text that differs by more than cut last rounds explain; greedy only."""
    result = case.result
    forced, rounds, rows = result.teacher_forced_acceptance_length, result.num_rounds, result.num_prompts
    if forced is None or result.temperature or rounds <= rows:
        return None
    low = (result.num_committed - rows * (result.num_draft_tokens + 1)) / rounds
    high = result.num_committed / (rounds - rows)
    if low <= forced <= high:
        return None
    advice = (
        "On the very text that was decoded, the head's teacher-forced drafts give another acceptance length than "
        "decoding, by more than cut last rounds explain. In decoding the head reads other inputs than in training "
        "(positions, hidden states, masks): no setting here mends that."
    )
    figures = f"predicted {forced:.2f}, decoded {tokens(result)}; cut rounds explain {low:.2f} to {high:.2f}"
    return Finding("Training and decoding disagree", advice, figures)


def cut_vocabulary(case: Case) -> Finding | None:
    """A draft vocabulary without tokens that the target wrote."""
    vocabulary, rate = case.result.draft_vocabulary, (case.result.acceptance_rate or [None])[0]
    if not vocabulary or vocabulary.coverage is None or rate is None or rate >= 1:
        return None
    missing = 1 - vocabulary.coverage
    if missing < LEAST_UNCOVERED * (1 - rate):
        return None
    advice = (
        "A token outside the draft vocabulary can never be drafted. Train with a larger head.draft_vocab_size, or "
        "choose the vocabulary from answers in this domain (headstart data vocab)."
    )
    figures = (
        f"{vocabulary.size:,} draft tokens lack {missing:.1%} of what the target wrote here; at the first position "
        f"{1 - rate:.1%} of drafts are rejected"
    )
    return Finding("Vocabulary: the head cannot draft what the target writes", advice, figures)


Parts = list[tuple[str, AcceptancePart]]  # by range of the context length


def contexts(case: Case) -> tuple[Parts, Parts]:
    """The parts by context, shortest first: those as long as training rows (all, where that is unknown), and longer."""
    parts = sorted(case.result.by_context.items(), key=lambda item: range_start(item[0]))
    most = case.trained.max_length
    within = [part for part in parts if most is None or range_start(part[0]) <= most]
    return within, parts[len(within) :]


def worse_beyond_training(case: Case) -> Finding | None:
    """Contexts longer than any training row, drafted worse than shorter ones, or, without such, than in validation."""
    short, long = contexts(case)
    within, beyond = merged([part for _, part in short]), merged([part for _, part in long])
    if beyond is None:
        return None
    less = None
    if within is not None and is_lower(beyond, within):
        less = f"from {range_start(long[0][0]):,} tokens on {tokens(beyond)}, below that {tokens(within)}"
    elif within is None and not case.result.temperature and not rendered_differently(case):
        less = below_validation(case, beyond)
    if less is None:
        return None
    advice = "Contexts longer than any training row are drafted worse: train on longer rows (data.max_length)."
    figures = f"training rows had at most {case.trained.max_length:,} tokens; {less}"
    return Finding("Contexts beyond the training length", advice, figures)


# first those that the figures show directly, then those that they suggest
ACCEPTANCE_RULES: tuple[Rule, ...] = (
    training_disagrees,
    wrong_template,
    cut_vocabulary,
    worse_beyond_training,
    sampling,
    other_domain,
    other_dtype,
)
