"""The heads of a refit: the old one, those between it and the trained one, and the new one; which of them is offered.

What a head learns on new rows costs it something on old ones. Weights between the two lose less of the old than they
give up of the new (interpolated weights: Wortsman 2022, WiSE-FT, arXiv 2109.01903); how far to go is chosen on
validation rows. The new head is offered if it is better on held-out new traffic and no worse on old rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

import torch

from ...data_pipelines.traffic import ServedChat
from ...eval.measurement.metrics import LEAST_TIMED, ratio_and_interval, rounded
from ...eval.report.one_result import grouped
from ...heads.base import DraftHead
from ...heads.folder import config_of, read_record, read_tensors, save_head
from ...heads.registry import head_class, start_head
from ...heads.target import Target
from .held_out import NEW, OLD, Keyed
from .journal import Compared, Decision, DriftPart, Share
from .reading import RowReading

SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the way from the old head's weights to the trained ones
KEPT = 0.995  # smallest ratio on old validation rows: a few rows alone cannot tell 1 % from nothing

ALL = "all"  # domains, weeks

LEAST_GAIN = 1.02  # on new traffic the interval of the ratio must lie above this for the new head to be offered
MOST_LOSS = 0.99  # smallest ratio on old rows for which it is offered
LEAST_COVERED = 0.95  # share of the tokens in the draft vocabulary below which a head should be trained anew
STAYS = "Nothing is to be won: the old head stays"
FORGETS = "The old head stays: the new one drafts new traffic better, but old traffic worse"


# Heads between the old one and the trained one


@torch.no_grad()
def head_between(old: str, trained: str, target: Target, share: float) -> DraftHead:
    """A head in fp32 whose weights are `share` of the way from the old head's to the trained one's.

    Args: old: any head folder or hub id. trained: a folder that `headstart train` wrote; it drafts what the old one
        does, or more (`start_head`).
    """
    record, (tensors, ids) = read_record(trained), read_tensors(trained)
    config = config_of(record, head_class(record.family).config_class)
    head = start_head(config, target, old, draft_token_ids=ids)
    for name, value in head.state_dict().items():
        value.lerp_(tensors[name].to(value), share)
    return head


def write_between(old: str, trained: str, target: Target, share: float, folder: Path) -> Path:
    """Writes `head_between` as a head folder, with how the trained one was trained and `share`; returns the folder."""
    training = {**(read_record(trained).training or {}), "share": share}
    return save_head(head_between(old, trained, target, share), folder, training=training)


def share_of(share: float, readings: Sequence[RowReading]) -> Share:
    """The journal's entry for a head that read the validation rows."""
    new, old = ([reading for reading in readings if reading.key.startswith(side)] for side in (NEW, OLD))
    return Share(share, tokens_per_round(new), tokens_per_round(old))


def is_enough(rows: Keyed, *, has_old: bool) -> bool:
    """Whether there are enough validation rows of each side to choose by."""
    sides = (NEW, OLD) if has_old else (NEW,)
    return all(sum(key.startswith(side) for key in rows) >= LEAST_TIMED for side in sides)


def best_share(shares: Sequence[Share]) -> float:
    """The share with the longest acceptance on new rows among those that keep what the old head has on old rows.

    Args: shares: of 0, the old head, and of all SHARES.
    Returns the smallest share if none keeps it.
    """
    before = next(head for head in shares if head.share == 0)
    others = [head for head in shares if head.share > 0 and head.new is not None]
    keeping = [head for head in others if before.old is None or (head.old or 0.0) >= KEPT * before.old]
    return max(keeping, key=lambda head: head.new or 0.0).share if keeping else min(SHARES)


# Drift and comparison


def drift_of(name: str, rows: Keyed, readings: Mapping[str, RowReading]) -> list[DriftPart]:
    """Acceptance of the old head on all rows that were read, then by domain and week for rows that name one.

    Args: name: NEW or OLD. readings: by key, with the old head.
    """
    read = [(row, readings[key]) for key, row in rows.items() if key in readings]
    named = grouped((pair for pair in read if pair[0].domain or pair[0].week), domain_and_week)
    groups = [((ALL, ALL), read), *sorted(named.items())] if read else []
    return [drift_part(name, *group, [reading for _, reading in pairs]) for group, pairs in groups]


def domain_and_week(pair: tuple[ServedChat, RowReading]) -> tuple[str, str]:
    return pair[0].domain or ALL, pair[0].week or ALL


def drift_part(name: str, domain: str, week: str, group: Sequence[RowReading]) -> DriftPart:
    """The journal's entry for a group of rows."""
    tokens = sum(reading.tokens for reading in group)
    covered = rounded(sum(reading.covered for reading in group) / tokens) if tokens else None
    return DriftPart(name, domain, week, len(group), tokens, tokens_per_round(group), covered)


def tokens_per_round(readings: Sequence[RowReading]) -> float | None:
    """Tokens per round of all of them; None without a round."""
    rounds = sum(reading.rounds for reading in readings)
    return rounded(sum(reading.committed for reading in readings) / rounds) if rounds else None


def compare_by_domain(
    name: str, rows: Keyed, before: Mapping[str, RowReading], after: Mapping[str, RowReading]
) -> list[Compared]:
    """Compares two heads on the rows that were read with both: on all of them, then by domain.

    Args: name: NEW or OLD. before, after: readings by key, with the old head and with the new one.
    """
    both = [(row, before[key], after[key]) for key, row in rows.items() if key in before and key in after]
    both = [(row, old, new) for row, old, new in both if old.rounds and new.rounds]
    domains = grouped((read for read in both if read[0].domain), lambda read: read[0].domain or ALL)
    return [compare(name, domain, group) for domain, group in [(ALL, both), *sorted(domains.items())]]


def compare(name: str, domain: str, read: Sequence[tuple[ServedChat, RowReading, RowReading]]) -> Compared:
    """The ratio of target forwards on some rows; its interval is over conversations, as answers of one are alike.

    Args: read: rows, read with the old head and with the new one.
    """
    if not read:
        return Compared(name, domain, 0, None, None, None, [None, None])
    conversations = grouped(read, lambda each: each[0].question).values()
    before = [sum(old.rounds for _, old, _ in rows) for rows in conversations]
    after = [sum(new.rounds for _, _, new in rows) for rows in conversations]
    ratio, interval = ratio_and_interval(before, after)
    lengths = (tokens_per_round([old for _, old, _ in read]), tokens_per_round([new for _, _, new in read]))
    return Compared(name, domain, len(before), *lengths, rounded(ratio), [rounded(end) for end in interval])


# The decision


def decide_between(compared: Sequence[Compared], *, head: str, new_head: str, adapter: str = "") -> Decision:
    """Decides between the old head and the new one.

    Args:
        compared: both heads on held-out new traffic and, if there are any, on held-out old rows.
        head, new_head, adapter: folders, for the commands.
    """
    whole = {part.traffic: part for part in compared if part.domain == ALL}
    new, old = whole["new"], whole.get("old")
    cautions: list[str] = []
    if new.ratio is None or new.conversations < LEAST_TIMED:
        few = f"{new.conversations} conversations could be compared, {LEAST_TIMED} are the least."
        return Decision(False, STAYS, [few], cautions)
    reasons = [f"On new traffic: {ratio_in_words(new)}."]
    low = new.interval[0] or 0.0
    is_better = low > LEAST_GAIN
    if not is_better:
        least = f", but not shown to be by the {100 * (LEAST_GAIN - 1):.0f} % that a new deployment is worth"
        reasons.append(f"That is better{least}." if low > 1 else "That is not shown to be better.")
    keeps = True
    if old is not None and old.ratio is not None:
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
    if not (is_better and keeps):
        return Decision(False, FORGETS if is_better else STAYS, reasons, cautions)
    under = f"--adapter {quote(adapter)} " if adapter else ""
    commands = [
        f"headstart eval --target TARGET {under}--drafter head:{quote(head)} --drafter head:{quote(new_head)} "
        "--prompts data/held_out.jsonl --output EVAL",
        f"headstart export {quote(new_head)} SERVED --to ENGINE --target TARGET",
    ]
    return Decision(True, "Deploy the new head", reasons, cautions, commands)


def ratio_in_words(compared: Compared) -> str:
    """`1.20 [1.15, 1.26] times the tokens per forward, 2.10 for 1.75, over 40 conversations`."""
    low, high = (f"{end:.3f}" if end is not None else "-" for end in compared.interval)
    lengths = f"{compared.after:.2f} for {compared.before:.2f}"
    return (
        f"{compared.ratio:.3f} [{low}, {high}] times the tokens per forward, {lengths}, over "
        f"{compared.conversations} conversations"
    )


def coverage_cautions(drift: Sequence[DriftPart]) -> list[str]:
    """A caution if the draft vocabulary covers too little of the new traffic. Args: drift: of a head that keeps it."""
    return [
        f"The head can draft {part.covered:.0%} of the tokens of new traffic, by its draft vocabulary: a head trained "
        "anew with a larger one (headstart auto) may gain more."
        for part in drift
        if (part.traffic, part.domain, part.week) == ("new", ALL, ALL)
        and part.covered is not None
        and part.covered < LEAST_COVERED
    ]
