"""Acceptance by segment, context length and domain, and how prompts and contexts compare with the head's training."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from ...heads.base import DraftBatch, DraftHead
from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import DraftSetting
from ..figures.metrics import Acceptance, AcceptancePart, expected_acceptance, rounded, row_counts, speedup_of
from ..figures.recorded_training import RecordedTraining, prompt_hash
from ..suites.prompts import PromptSource, Suite
from .batches import MeasuredBatch, timed_seconds
from .result import DomainPart, VocabularyCoverage

CONTEXT_EDGES = (128, 512, 2048, 8192, 32768)  # tokens, prompt included, at the start of a round
NO_DOMAIN = "(none)"  # rows without a category, if others of the suite have one

# from the source of a prompt and its whole text, new tokens included: a round's label by the number of committed tokens
Label = Callable[[PromptSource, Sequence[int]], Callable[[int], str]]


def acceptance_by(
    batches: Iterable[MeasuredBatch], label: Label, *, num_draft_tokens: int
) -> dict[str, AcceptancePart]:
    """Acceptance of the first repeat's rounds, by label."""
    counts: dict[str, Acceptance] = {}
    for batch in batches:
        run = batch.drafted.runs[0]
        rows = zip(batch.suite.sources, batch.suite.prompts, run.token_ids, strict=True)
        for row, (source, prompt, new) in enumerate(rows):
            label_at = label(source, [*prompt, *new])
            num_committed = len(prompt) + 1  # the prefill gave the first token
            for round_ in run.rounds[1:]:
                if round_.num_committed[row] == 0:
                    break
                counted = counts.setdefault(label_at(num_committed), Acceptance.nothing(num_draft_tokens))
                counted.add(*row_counts(round_)[row])
                num_committed += round_.num_committed[row]
    return {name: acceptance_part(counted) for name, counted in counts.items()}


def acceptance_part(counted: Acceptance) -> AcceptancePart:
    """Counts as the report's figures."""
    return AcceptancePart(counted.num_rounds, rounded(counted.length), [rounded(rate) for rate in counted.rate])


def context_label(trained_length: int | None = None) -> Label:
    """Labels `0-127`, `128-511`, ... by context length. Args: trained_length: a further edge, so that no range contains
    both contexts within the training length and longer ones."""
    further = () if trained_length is None else (trained_length + 1,)
    edges = sorted({*CONTEXT_EDGES, *further})

    def name(num_committed: int) -> str:
        low = max((edge for edge in edges if edge <= num_committed), default=0)
        high = min((edge for edge in edges if edge > num_committed), default=None)
        return f"{low}-{high - 1}" if high else f"{low}-"

    return lambda *_: name


def range_start(name: str) -> int:
    """128 of the context label `128-511`."""
    return int(name.split("-")[0])


def segment_label(in_trace: Callable[[Sequence[int]], list[bool]] | None) -> Label:
    """`think` inside a reasoning trace, else `answer`. Args: in_trace: of `trace_finder`; None: no traces."""

    def label(_: PromptSource, text: Sequence[int]) -> Callable[[int], str]:
        flags = in_trace(text) if in_trace else [False]
        return lambda num_committed: "think" if flags[min(num_committed, len(flags) - 1)] else "answer"

    return label


def by_domain(batches: Sequence[MeasuredBatch], *, num_draft_tokens: int) -> dict[str, DomainPart]:
    """The `parts` of each domain; empty if no row has one."""
    if not any(source.domain for batch in batches for source in batch.suite.sources):
        return {}
    return parts(batches, lambda source: source.domain or NO_DOMAIN, num_draft_tokens=num_draft_tokens)


def by_turn(batches: Sequence[MeasuredBatch], *, num_draft_tokens: int) -> dict[str, DomainPart]:
    """The `parts` of recorded turns, by kind and by number; empty if none are recorded."""
    if not any(source.kind for batch in batches for source in batch.suite.sources):
        return {}
    kinds = parts(batches, lambda source: source.kind or NO_DOMAIN, num_draft_tokens=num_draft_tokens)
    return kinds | parts(batches, lambda source: f"turn {source.turn}", num_draft_tokens=num_draft_tokens)


def parts(
    batches: Sequence[MeasuredBatch], part_of_source: Callable[[PromptSource], str], *, num_draft_tokens: int
) -> dict[str, DomainPart]:
    """Acceptance and speedup of each part of the prompts.

    A speedup needs at least two prompts or, at batch size > 1, two batches of only that part, as the rows of a mixed
    batch are not timed separately.
    """
    names = [[part_of_source(source) for source in batch.suite.sources] for batch in batches]
    of_prompt = {source.number: part_of_source(source) for batch in batches for source in batch.suite.sources}
    counted = acceptance_by(
        batches, lambda source, _: lambda _: part_of_source(source), num_draft_tokens=num_draft_tokens
    )
    by_name = {}
    for name, num_prompts in Counter(of_prompt.values()).items():
        seconds = timed_seconds(batch for batch, own in zip(batches, names, strict=True) if set(own) == {name})
        speedup, interval = speedup_of(seconds if len(seconds) > 1 else [])
        part = counted.get(name) or acceptance_part(Acceptance.nothing(num_draft_tokens))
        by_name[name] = DomainPart(num_prompts, **vars(part), speedup=speedup, speedup_ci95=interval)
    return by_name


# Comparison with the head's training


def vocabulary_coverage(drafter: Drafter, batches: Iterable[MeasuredBatch]) -> VocabularyCoverage | None:
    """Size of a head's cut vocabulary, and the share of the first repeat's new tokens in it; None if not cut."""
    if not isinstance(drafter, DraftHead) or drafter.vocabulary is None:
        return None
    known = set(drafter.vocabulary.to_target.tolist())
    texts = (new for batch in batches for new in batch.drafted.runs[0].token_ids)
    inside = [token in known for new in texts for token in new]
    return VocabularyCoverage(len(known), round(sum(inside) / len(inside), 4) if inside else None)


def asked_as_trained(training: RecordedTraining | None, prompts: Sequence[Sequence[int]]) -> float | None:
    """The share of prompts that end with the tokens that ended all prompts in training; None if that is not known."""
    if training is None or training.prompt_ending is None or not prompts:
        return None
    ending = training.prompt_ending.token_ids
    return rounded(sum(list(prompt[-len(ending) :]) == ending for prompt in prompts) / len(prompts))


def learnt_share(training: RecordedTraining | None, suite: Suite, target: Target) -> float | None:
    """`learnt_among` of a suite's first prompts."""
    pairs = zip(suite.prompts, suite.sources, strict=True)
    return learnt_among(training, (target.tokenizer.decode(prompt) for prompt, source in pairs if source.turn == 1))


def learnt_among(training: RecordedTraining | None, prompts: Iterable[str]) -> float | None:
    """The share of prompts that are prompts of the head's training rows, or of those of the heads that it started
    from, estimated where only some of these were recorded; None if none were."""
    recorded = [] if training is None else [part for part in (training.prompts, training.earlier_prompts) if part]
    asked = [prompt_hash(prompt) for prompt in prompts] if recorded else []
    if not asked:
        return None
    shares = []
    for part in recorded:
        known = part.known()
        shares.append(sum(one in known for one in asked) / len(asked) * part.rows_per_recorded)
    return rounded(min(1.0, max(shares)))


@torch.no_grad()
def teacher_forced_length(
    target: Target, drafter: Drafter, batches: Sequence[MeasuredBatch], setting: DraftSetting
) -> float | None:
    """acceptance_length that teacher-forced drafts, as in training, give on the text that decoding wrote.

    It must equal the measured one up to rounds cut by max_new_tokens; a gap means that training and decoding disagree.
    None for trees, for drafters that are not heads, if not all drafts are verified, and for heads that draft with a
    window that they were not trained with.
    """
    num_draft, is_windowed = setting.num_draft_tokens, getattr(drafter, "draft_window", None) is not None
    if is_windowed or setting.tree is not None or setting.verify_cost is not None or not isinstance(drafter, DraftHead):
        return None
    num_rounds = num_committed = 0
    for batch in batches:
        for prompt, new in zip(batch.suite.prompts, batch.drafted.runs[0].token_ids, strict=True):
            ids = torch.tensor([[*prompt, *new]], device=target.device)
            mask = torch.arange(ids.shape[1], device=target.device)[None] >= len(prompt)
            output = target.read_texts(ids, feature_layers=drafter.feature_layers)
            out = drafter.loss(DraftBatch(ids, mask, output), num_depths=num_draft)
            counted = expected_acceptance(out.starts, out.hits, num_draft_tokens=num_draft)
            num_rounds += counted.num_rounds
            num_committed += counted.num_committed
    return rounded(num_committed / num_rounds) if num_rounds else None
