"""How well the head drafts the traffic, by domain and week, and how two heads compare on the same answers."""

from collections.abc import Mapping, Sequence

from ...data_pipelines.traffic import Served
from ...eval.measurement.metrics import ratio_and_interval, rounded
from .data import Keyed
from .journal import Compared, DriftPart
from .reading import Reading

ALL = "all"


def drift_of(name: str, rows: Keyed, readings: Mapping[str, Reading]) -> list[DriftPart]:
    """Acceptance of the old head on all rows that were read, then by domain and week for rows that name one.

    Args: name: NEW or OLD. readings: by key, with the old head.
    """
    read = [(row, readings[key]) for key, row in rows.items() if key in readings]
    groups: dict[tuple[str, str], list[Reading]] = {(ALL, ALL): [reading for _, reading in read]}
    for row, reading in read:
        if row.domain or row.week:
            groups.setdefault((row.domain or ALL, row.week or ALL), []).append(reading)
    ordered = sorted(groups.items(), key=lambda item: (item[0] != (ALL, ALL), item[0]))
    return [part_of(name, domain, week, found) for (domain, week), found in ordered if found]


def part_of(name: str, domain: str, week: str, found: Sequence[Reading]) -> DriftPart:
    """The journal's entry for a group of rows."""
    rounds, tokens = sum(each.rounds for each in found), sum(each.tokens for each in found)
    length = rounded(sum(each.committed for each in found) / rounds) if rounds else None
    covered = rounded(sum(each.covered for each in found) / tokens) if tokens else None
    return DriftPart(name, domain, week, len(found), tokens, length, covered)


def compare(name: str, rows: Keyed, before: Mapping[str, Reading], after: Mapping[str, Reading]) -> list[Compared]:
    """Compares two heads on the rows that were read with both: on all of them, then by domain.

    Args: name: NEW or OLD. before, after: readings by key, with the old head and with the new one.
    """
    both = [key for key in rows if key in before and key in after and before[key].rounds and after[key].rounds]
    domains = sorted({domain for key in both if (domain := rows[key].domain)})
    found = [compared(name, ALL, rows, both, before, after)]
    for domain in domains:
        of_domain = [key for key in both if rows[key].domain == domain]
        found.append(compared(name, domain, rows, of_domain, before, after))
    return found


def compared(
    name: str,
    domain: str,
    rows: Mapping[str, Served],
    keys: Sequence[str],
    before: Mapping[str, Reading],
    after: Mapping[str, Reading],
) -> Compared:
    """The ratio of target forwards on some rows; its interval is over conversations, as answers of one are alike."""
    needed: dict[str, list[int]] = {}  # by conversation: forwards with the old head and with the new one
    for key in keys:
        forwards = needed.setdefault(rows[key].question, [0, 0])
        forwards[0] += before[key].rounds
        forwards[1] += after[key].rounds
    if not needed:
        return Compared(name, domain, 0, None, None, None, [None, None])
    ratio, interval = ratio_and_interval(*zip(*needed.values(), strict=True))
    lengths = [
        rounded(sum(side[key].committed for key in keys) / sum(side[key].rounds for key in keys))
        for side in (before, after)
    ]
    ends = [rounded(end) for end in interval]
    return Compared(name, domain, len(needed), lengths[0], lengths[1], rounded(ratio), ends)
