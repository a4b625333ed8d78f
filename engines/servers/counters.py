"""What a server has counted since its start: rounds, tokens drafted, tokens accepted, by draft position."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite

STARTED = "process_start_time_seconds"  # Prometheus's own, of the process that answers; SGLang has none
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*?)\})?[ \t]+(\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Counters:
    """num_rounds: verifications, one per request and forward. accepted_at: by draft position; empty: not counted so.
    started: when the process was that has counted them; None: not known, or they are of several reads."""

    num_rounds: int = 0
    num_drafted: int | None = None
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    started: float | None = None

    def __sub__(self, before: "Counters") -> "Counters | None":
        """None: another process has counted these, as behind a load balancer."""
        return self._with(before, -1) if self.started == before.started else None

    def __add__(self, other: "Counters") -> "Counters":
        return self._with(other, 1)

    def _with(self, other: "Counters", sign: int) -> "Counters":
        drafted = None
        if self.num_drafted is not None and other.num_drafted is not None:
            drafted = self.num_drafted + sign * other.num_drafted
        at = [one + sign * more for one, more in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]
        accepted = self.num_accepted + sign * other.num_accepted
        return Counters(self.num_rounds + sign * other.num_rounds, drafted, accepted, at)

    @property
    def is_possible(self) -> bool:
        """Whether it can be a difference of counts: a server that was started anew counts from 0."""
        return min(self.num_rounds, self.num_accepted, *self.accepted_at, 0) >= 0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per forward of the target, bonus token included; None: no round was counted."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_rate(self) -> list[float | None]:
        """By draft position: accepted, given that all before it were."""
        reached = [self.num_rounds, *self.accepted_at]
        return [now / then if then else None for now, then in zip(self.accepted_at, reached, strict=False)]


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Names, labels and values in Prometheus's text format, those that are numbers. A counter's name may end in _total:
    it is left out."""
    found = list[tuple[str, dict[str, str], float]]()
    for name, labels, value in SAMPLE.findall(text):
        with suppress(ValueError):
            found.append((name.removesuffix("_total"), dict(LABEL.findall(labels)), float(value)))
    return [one for one in found if isfinite(one[2])]


def started_in(found: list[tuple[str, dict[str, str], float]]) -> float | None:
    """When the process was started that says so; None: it does not."""
    return next((value for name, _, value in found if name == STARTED), None)


def total(found: list[tuple[str, dict[str, str], float]], name: str) -> int | None:
    """The sum of a counter over its labels; None: there is no such counter."""
    values = [value for other, _, value in found if other == name]
    return int(sum(values)) if values else None
