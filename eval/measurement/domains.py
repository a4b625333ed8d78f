"""Acceptance and speed apart for each domain of a suite: what its rows call their category."""

from collections.abc import Sequence
from typing import Any

from ..suites.prompts import Asked
from .metrics import Acceptance
from .summary import Side, rounded, speedup_of, timed_pairs

NO_DOMAIN = "(none)"  # rows without a category, where others of the suite have one


def by_domain(
    asked: Sequence[Sequence[Asked]], sides: Sequence[tuple[Side, Side]], *, num_draft_tokens: int
) -> dict[str, dict[str, Any]]:
    """A report's `by_domain`; empty where no row names a domain.

    Rounds are those of the first pass. A speedup is that of at least two prompts, at batch size > 1 of two batches
    that are wholly of the domain: rows of a mixed one have no time of their own.

    Args: asked: where the prompts of each batch came from. sides: speculation and baseline of the same batches.
    """
    names = [[one.domain for one in batch] for batch in asked]
    if not any(name for batch in names for name in batch):
        return {}
    counted: dict[str, Acceptance] = {}
    num_prompts: dict[str, int] = {}
    whole: dict[str, list[tuple[Side, Side]]] = {}
    for batch, pair in zip(names, sides, strict=True):
        domains = [name or NO_DOMAIN for name in batch]
        run = pair[0].runs[0]
        for row, name in enumerate(domains):
            one = counted.setdefault(name, Acceptance(0, 0, [0] * num_draft_tokens, [0] * num_draft_tokens))
            num_prompts[name] = num_prompts.get(name, 0) + 1
            for done in run.rounds[1:]:
                if done.num_committed[row] == 0:
                    break
                one.add(done.num_accepted[row], done.num_committed[row])
        if len(set(domains)) == 1:
            whole.setdefault(domains[0], []).append(pair)
    entries = {}
    for name, one in counted.items():
        timed = timed_pairs(whole.get(name, []))
        speedup, interval = speedup_of(timed if len(timed) > 1 else [])
        entries[name] = {
            "num_prompts": num_prompts[name],
            "num_rounds": one.num_rounds,
            "acceptance_length": rounded(one.length),
            "acceptance_rate": [rounded(rate) for rate in one.rate],
            "speedup": rounded(speedup),
            "speedup_ci95": [rounded(x) for x in interval],
        }
    return entries
