"""Batches of prompts with both sides' generations, and which of them are observations of a speedup."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

from ..decoding.loop import Generation, Round
from ..figures.metrics import row_seconds
from ..suites.prompts import Suite


@dataclass
class Side:
    """Everything one side (speculation or baseline) did with one batch of prompts, a generation per repeat."""

    runs: list[Generation] = field(default_factory=list)
    others: list[float | None] = field(default_factory=list)  # of each, the other processes' share of the processor

    @property
    def recorded(self) -> list[Any]:
        """Token ids and rounds of each run, the fields of a round in their order."""
        return [[run.token_ids, [astuple(round_) for round_ in run.rounds]] for run in self.runs]

    @classmethod
    def of(cls, recorded: list[Any], others: list[float | None]) -> "Side":
        """The side of which this was `recorded`."""
        return cls([Generation(ids, [Round(*one) for one in rounds]) for ids, rounds in recorded], others)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all runs, without the prefills."""
        return self.rounds_of(len(self.runs))

    def rounds_of(self, num_runs: int) -> list[Round]:
        """The rounds of the first runs, without the prefills."""
        return [round_ for run in self.runs[:num_runs] for round_ in run.rounds[1:]]

    @property
    def prefill_seconds(self) -> float:
        return sum(run.rounds[0].seconds for run in self.runs)

    @property
    def decode_seconds(self) -> float:
        """From each row's first token to its last, averaged over the rows; see `row_seconds`."""
        return sum(map(row_seconds, self.rounds))

    @property
    def decode_tokens(self) -> int:
        """Emitted tokens, without the first of each row, which the prefill gives."""
        return sum(sum(round_.num_emitted) for round_ in self.rounds)

    @property
    def texts(self) -> list[list[list[int]]]:
        """The new tokens of each row, in all repeats."""
        return [list(texts) for texts in zip(*(run.token_ids for run in self.runs), strict=True)]


@dataclass(frozen=True)
class MeasuredBatch:
    """One batch of prompts, and both sides' generations."""

    number: int
    suite: Suite  # with only these prompts
    drafted: Side
    baseline: Side
    num_again: int = 0  # times that it was measured again, because passes were disturbed

    @property
    def numbers(self) -> list[int]:
        """The numbers of its prompts in the suite, each once."""
        return sorted({source.number for source in self.suite.sources})

    @property
    def chats(self) -> set[int]:
        """The numbers of the first turns of its chats."""
        return {source.first for source in self.suite.sources}

    @property
    def seconds(self) -> tuple[float, float]:
        """Baseline and speculative decoding time, for the number of tokens that speculation emitted; no prefills."""
        per_token = self.baseline.decode_seconds / max(1, self.baseline.decode_tokens)
        return per_token * self.drafted.decode_tokens, self.drafted.decode_seconds


def timed_batches(batches: Iterable[MeasuredBatch]) -> list[MeasuredBatch]:
    """The batches in which something was timed, that is, not all answers ended with their first token.

    A batch that earlier prompts filled is no observation of its own, and left out unless it is the only one."""
    timed, seen = list[MeasuredBatch](), set[int]()
    for batch in batches:
        numbers = set(batch.numbers)
        if all(batch.seconds) and not numbers & seen:
            timed.append(batch)
        seen |= numbers
    return timed


def timed_units(batches: Iterable[MeasuredBatch]) -> list[list[MeasuredBatch]]:
    """The timed batches, each an observation. Neighbours that share a chat are one together, as a chat's turns are
    alike, and so are those of the same prompts, which a file may have twice: they say no more of other traffic."""
    units: dict[frozenset[tuple[int, ...]], list[MeasuredBatch]] = {}
    neighbours = list[list[MeasuredBatch]]()
    firsts: dict[int, tuple[int, ...]] = {}  # the first prompt of each chat, by the number of its first turn
    for batch in timed_batches(batches):
        for source, prompt in zip(batch.suite.sources, batch.suite.prompts, strict=True):
            firsts.setdefault(source.first, tuple(prompt))
        if neighbours and batch.chats & neighbours[-1][-1].chats:
            neighbours[-1].append(batch)
        else:
            neighbours.append([batch])
    for unit in neighbours:
        units.setdefault(frozenset(firsts[chat] for batch in unit for chat in batch.chats), []).extend(unit)
    return list(units.values())


def summed_seconds(unit: Iterable[MeasuredBatch]) -> tuple[float, float]:
    """The sum of the batches' `seconds`."""
    baseline, drafted = zip(*(batch.seconds for batch in unit), strict=True)
    return sum(baseline), sum(drafted)


def timed_seconds(batches: Iterable[MeasuredBatch]) -> list[tuple[float, float]]:
    """`seconds` of each of `timed_units`."""
    return [summed_seconds(unit) for unit in timed_units(batches)]
