"""How many rounds two heads take for the same answers, and whether the new one is offered in place of the old one.

The target reads each held-out conversation once, and both heads draft its answers greedily. The new head is offered if
it is better on new traffic and no worse on old rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ...base.errors import BadInput
from ...data_pipelines.loader import collate
from ...data_pipelines.masks.chat import encode_row
from ...data_pipelines.rows.config import DataConfig
from ...data_pipelines.rows.samples import Sample
from ...data_pipelines.rows.sources import Row
from ...data_pipelines.rows.traffic import ServedChat
from ...data_pipelines.storage.shard_file import StoredSample
from ...eval.figures.metrics import LEAST_TIMED, Acceptance, expected_acceptance, ratio_and_interval, rounded
from ...eval.report.results.one_result import grouped
from ...eval.report.served_page import cautions as served_cautions
from ...eval.report.served_page import sentences
from ...eval.served.served_result import ServedResult, lower_end_among
from ...heads.base import ChainStarts, DraftBatch, DraftHead
from ...targets.cpu.packing import pack_linears
from ...targets.target import Target
from .held_out import NEW, OLD
from .running.journal import Compared, Decision

BATCH_TOKENS = 4096  # tokens per batch, padding included
ALL = "all"  # domains
LEAST_GAIN = 1.02  # on new traffic the interval of the ratio must lie above this for the new head to be offered
MOST_LOSS = 0.99  # smallest ratio on old rows for which it is offered
STAYS = "Nothing is to be won: the old head stays"
FORGETS = "The old head stays: the new one drafts new traffic better, but old traffic worse"


@dataclass(frozen=True)
class DraftedRow:
    """A row whose answers several heads drafted: of each head the rounds, and the tokens that they committed."""

    row: ServedChat
    rounds: list[int]
    committed: list[int]


def as_samples(rows: Iterable[ServedChat], target: Target, max_length: int) -> list[tuple[ServedChat, Sample]]:
    """The rows with their tokens, cut to max_length; rows that the target cannot be given are left out."""
    config, found = DataConfig(train="", max_length=min(max_length, target.num_positions)), []
    for row in rows:
        try:
            samples = encode_row(Row(row.row, row.origin), target.tokenizer, config, target.vocab_size)
        except BadInput:
            continue
        if samples:  # of several sequences, the one with most answer tokens
            found.append((row, max(samples, key=lambda sample: int(sample.loss_mask.sum()))))
    return found


@torch.no_grad()
def draft_rows(
    target: Target,
    heads: Sequence[DraftHead],
    rows: Sequence[tuple[ServedChat, Sample]],
    *,
    check_stop: Callable[[], None] = lambda: None,
) -> list[DraftedRow]:
    """Each of the heads drafts the answers of the rows, as many tokens at a time as the first one drafts by default.

    The target reads a row once, and all heads read the same features.

    Args: check_stop: called before each batch; it may raise SystemExit.
    """
    pack_linears(target.base)  # as training does
    left, drafted = sorted(rows, key=lambda row: len(row[1])), list[DraftedRow]()
    num_draft = min(heads[0].num_depths, heads[0].default_draft_tokens)
    while left:
        check_stop()
        size = max(BATCH_TOKENS // len(left[-1][1]), 1)  # the longest first
        part, left = left[-size:], left[:-size]
        batch = collate([StoredSample(sample) for _, sample in part]).to(target.device).filled(heads[0].read_target)
        counted = [acceptance_of(head, batch, num_draft) for head in heads]
        for (row, _), *of_row in zip(part, *counted, strict=True):
            drafted.append(DraftedRow(row, [one.num_rounds for one in of_row], [one.num_committed for one in of_row]))
    return drafted


def acceptance_of(head: DraftHead, batch: DraftBatch, num_draft_tokens: int) -> list[Acceptance]:
    """What each row of a batch accepts of a head's greedy drafts."""
    found, counted = head.loss(batch, num_depths=num_draft_tokens), []
    for i in range(len(batch.input_ids)):
        start = ChainStarts(found.starts.positions[i : i + 1], found.starts.valid[i : i + 1])
        counted.append(expected_acceptance(start, found.hits[i : i + 1], num_draft_tokens=num_draft_tokens))
    return counted


def compare_by_domain(traffic: str, drafted: Sequence[DraftedRow]) -> list[Compared]:
    """Compares two heads on all rows, then by domain. Args: traffic: NEW or OLD."""
    both = [one for one in drafted if all(one.rounds)]
    domains = grouped((one for one in both if one.row.domain), lambda one: one.row.domain or ALL)
    return [compare(traffic, domain, group) for domain, group in [(ALL, both), *sorted(domains.items())]]


def compare(traffic: str, domain: str, drafted: Sequence[DraftedRow]) -> Compared:
    """The ratio of target forwards on some rows; its interval is over conversations, as answers of one are alike."""
    if not drafted:
        return Compared(traffic, domain, 0, None, None, None, [None, None])
    conversations = grouped(drafted, lambda one: one.row.question).values()
    before, after = ([sum(one.rounds[head] for one in rows) for rows in conversations] for head in (0, 1))
    ratio, interval = ratio_and_interval(before, after)
    return Compared(
        traffic,
        domain,
        conversations=len(before),
        before=rounded(sum(one.committed[0] for one in drafted) / sum(before)),
        after=rounded(sum(one.committed[1] for one in drafted) / sum(after)),
        ratio=rounded(ratio),
        interval=[rounded(end) for end in interval],
    )


def decide_between(compared: Sequence[Compared], served: Sequence[ServedResult] = ()) -> Decision:
    """Decides between the old head and the new one, without the commands that carry it out.

    Args:
        compared: both heads on held-out new traffic and, if there are any, on held-out old rows.
        served: the new head beside the old one in the server; if there are any, they say which is better on new
            traffic.
    """
    whole = {part.traffic: part for part in reversed(compared) if part.domain == ALL}  # a domain may be called so
    new, old = whole[NEW], whole.get(OLD)
    cautions: list[str] = []
    if new.ratio is None or new.conversations < LEAST_TIMED:
        few = f"{new.conversations} conversations could be compared, {LEAST_TIMED} are the least."
        return Decision(False, STAYS, [few], cautions)
    reasons = [*sentences(served), f"On new traffic: {ratio_in_words(new)}."]
    low = new.interval[0] or 0.0
    cautions += [f"{line}." for line in served_cautions(served)]
    if served:  # faster under a load, and slower under none
        num = len(served)
        low = max((lower_end_among(one, num) for one in served if not one.rests_on_loops(num)), default=0.0)
        low = 0.0 if any(not one.is_right or (one.speedup_ci95[1] or 1.0) < 1 for one in served) else low
    is_better = low > LEAST_GAIN
    if not is_better:
        least = f", but not shown to be by the {100 * (LEAST_GAIN - 1):.0f} % that a new deployment is worth"
        reasons.append(f"That is better{least}." if low > 1 else "That is not shown to be better.")
    keeps = True
    if old is not None and (old.ratio is None or old.conversations < LEAST_TIMED):
        few = f"On old traffic {old.conversations} conversations could be compared, {LEAST_TIMED} are the least"
        cautions.append(f"{few}: what the new head loses on it is not known.")
    elif old is not None and old.ratio is not None:
        keeps = old.ratio >= MOST_LOSS
        reasons.append(f"On old traffic: {ratio_in_words(old)}" + ("." if keeps else ", a loss of more than 1 %."))
        if keeps and (old.interval[0] is None or old.interval[0] < MOST_LOSS):
            cautions.append("A loss of more than 1 % on old traffic is not ruled out: its interval goes further.")
    else:
        cautions.append("No old rows were given with --replay: what the new head loses on them is not known.")
    cautions += [
        f"Worse on {part.traffic} traffic of {part.domain}: {ratio_in_words(part)}."
        for part in compared
        if part.domain != ALL and part.interval[1] is not None and part.interval[1] < 1
    ]
    if is_better and keeps:
        return Decision(True, "Deploy the new head", reasons, cautions)
    return Decision(False, FORGETS if is_better else STAYS, reasons, cautions)


def ratio_in_words(compared: Compared) -> str:
    """`1.20 [1.15, 1.26] times the tokens per forward, 2.10 for 1.75, over 40 conversations`."""
    low, high = (f"{end:.3f}" if end is not None else "-" for end in compared.interval)
    lengths = f"{compared.after:.2f} for {compared.before:.2f}"
    return (
        f"{compared.ratio:.3f} [{low}, {high}] times the tokens per forward, {lengths}, over "
        f"{compared.conversations} conversations"
    )
