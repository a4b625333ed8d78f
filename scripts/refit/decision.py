"""Whether the new head is offered: it must be better on held-out new traffic and no worse on old rows."""

from collections.abc import Sequence
from shlex import quote

from .data import LEAST_HELD_OUT
from .drift import ALL
from .journal import Compared, Decision, DriftPart

LEAST_GAIN = 1.02  # on new traffic the interval of the ratio must lie above this for the new head to be offered
MOST_LOSS = 0.99  # smallest ratio on old rows for which it is offered
LEAST_COVERED = 0.95  # share of the tokens in the draft vocabulary below which a head should be trained anew
STAYS = "Nothing is to be won: the old head stays"
FORGETS = "The old head stays: the new one drafts new traffic better, but old traffic worse"


def decide(compared: Sequence[Compared], *, head: str, new_head: str) -> Decision:
    """Decides between the old head and the new one.

    Args:
        compared: both heads on held-out new traffic and, if there are any, on held-out old rows.
        head, new_head: folders, for the commands.
    """
    whole = {each.traffic: each for each in compared if each.domain == ALL}
    new, old = whole["new"], whole.get("old")
    cautions: list[str] = []
    if new.ratio is None or new.conversations < LEAST_HELD_OUT:
        few = f"{new.conversations} conversations could be compared, {LEAST_HELD_OUT} are the least."
        return Decision(False, STAYS, [few], cautions)
    reasons = [f"On new traffic: {described(new)}."]
    low = new.interval[0] or 0.0
    is_better = low > LEAST_GAIN
    if not is_better:
        least = f", but not shown to be by the {100 * (LEAST_GAIN - 1):.0f} % that a new deployment is worth"
        reasons.append(f"That is better{least}." if low > 1 else "That is not shown to be better.")
    keeps = True
    if old is not None and old.ratio is not None:
        keeps = old.ratio >= MOST_LOSS
        reasons.append(f"On old traffic: {described(old)}" + ("." if keeps else ", a loss of more than 1 %."))
        if keeps and (old.interval[0] is None or old.interval[0] < MOST_LOSS):
            cautions.append("A loss of more than 1 % on old traffic is not ruled out: its interval goes further.")
    else:
        cautions.append("No old rows were given with --replay: what the new head loses on them is not known.")
    cautions += [
        f"Worse on {each.traffic} traffic of {each.domain}: {described(each)}."
        for each in compared
        if each.domain != ALL and each.interval[1] is not None and each.interval[1] < 1
    ]
    if not (is_better and keeps):
        return Decision(False, FORGETS if is_better else STAYS, reasons, cautions)
    commands = [
        f"headstart eval --target TARGET --drafter head:{quote(head)} --drafter head:{quote(new_head)} "
        "--prompts data/held_out.jsonl --output EVAL",
        f"headstart export {quote(new_head)} SERVED --to ENGINE --target TARGET",
    ]
    return Decision(True, "Deploy the new head", reasons, cautions, commands)


def described(compared: Compared) -> str:
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
