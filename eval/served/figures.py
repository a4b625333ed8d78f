"""The figures of a load, from the records of its blocks; docs/reference/report_schema.md defines them."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Any

from ...base.errors import BadInput
from ..figures.metrics import Ends, rounded, speedup_of
from ..figures.repetition import Repetition, WithoutLoops, text_repetition
from .load import Asked, AskedBlock, Load

Record = dict[str, Any]
# Times as long per token, at a rate, as an answer to a late arrival may take against one to an early one. A server that
# keeps the rate is slower than at its start by what its batch costs, mostly less than that; in a queue times grow for
# as long as questions arrive. Drafts that save time save 1.1 to 3 times, so a queue that doubles them hides all of it.
MOST_SLOWING = 2.0
FEWEST_EARLY = 8  # answers by which that is judged


@dataclass(frozen=True)
class Slo:
    """What counts as good service: seconds to the first token at most, and per further token. None: any."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def of(cls, spec: str) -> "Slo":
        """`ttft=500ms,tpot=50ms`; numbers without a unit are seconds. Raises BadInput."""
        values: dict[str, float] = {}
        for part in filter(None, spec.split(",")):
            name, _, text = part.strip().partition("=")
            unit, scale = ("ms", 1000) if text.endswith("ms") else ("s", 1)
            try:
                values[name] = float(text.removesuffix(unit)) / scale
            except ValueError:
                values[name] = inf
            if name not in ("ttft", "tpot") or not 0 < values[name] < inf:
                raise BadInput(f"--slo {spec}: expected ttft=SECONDS,tpot=SECONDS, such as ttft=0.5,tpot=50ms")
        return cls(**values)

    def holds(self, answer: "Answered") -> bool:
        is_fluent = self.tpot is None or answer.num_tokens < 2 or (answer.per_token or inf) <= self.tpot
        return is_fluent and (self.ttft is None or answer.wait <= self.ttft)


@dataclass(frozen=True)
class Answered:
    """An answer that came. sent, wait, whole: seconds; of its sending in its block, to its first token, to its last."""

    number: int
    sent: float
    wait: float
    whole: float
    num_tokens: int

    @property
    def per_token(self) -> float | None:
        """Seconds per token behind the first; None if there is none, or all came at once."""
        came_in_parts = self.num_tokens > 1 and self.whole > self.wait
        return (self.whole - self.wait) / (self.num_tokens - 1) if came_in_parts else None


@dataclass(frozen=True)
class Percentiles:
    """In milliseconds."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        if not seconds:
            return cls()
        ranked = sorted(seconds)
        return cls(
            *(round(1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3) for share in (0.5, 0.9, 0.99))
        )


@dataclass(frozen=True)
class SideFigures:
    """One side under a load, over all its blocks.

    tokens_per_second: output tokens of the machine while as many questions were in flight as the load says.
    user_tokens_per_second: tokens of an answer over its whole time, over all answers. goodput: questions per second
    answered as the SLO wants. client_late: by how much our own client was behind, which is in the times above."""

    num_answers: int
    num_failed: int
    num_repeated: int
    tokens_per_second: float | None
    user_tokens_per_second: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    goodput: float | None
    client_late_ms: Percentiles
    client_cpu: float
    failures: list[str] = field(default_factory=list)
    slowing: float | None = None  # at a rate: as of MOST_SLOWING
    most_in_flight: int = 0  # questions at once

    @property
    def keeps_up(self) -> bool:
        return self.slowing is None or self.slowing <= MOST_SLOWING


def record_of(block: AskedBlock) -> Record:
    """A block as JSON: an entry per answer, the different texts of each question, and the tokens that came while the
    load was full. arriving: seconds in which questions arrived."""
    answers = [
        [one.number, one.sent, one.answer.wait, one.answer.whole, one.answer.num_tokens]
        for one in block.asked
        if one.answer
    ]
    texts = dict[str, list[list[Any]]]()
    for one in block.asked:
        if one.answer and (told := [one.answer.ids, one.answer.text]) not in texts.setdefault(str(one.number), []):
            texts[str(one.number)].append(told)
    return {
        "answers": answers,
        "texts": texts,
        "failures": [f"question {one.number}: {one.failure}" for one in block.asked if not one.answer],
        "num_repeated": sum(one.num_attempts - 1 for one in block.asked),
        "full": block.full,
        "arriving": max(one.sent for one in block.asked),
        "tokens": sum(tokens_until(one, block.full) for one in block.asked),
        "late": [one.late for one in block.asked],
        "lags": sorted(block.lags)[-max(1, len(block.lags) // 50) :],  # its largest fiftieth holds the 99th percentile
        "num_lags": len(block.lags),
        "cpu": block.cpu,
    }


def tokens_until(asked: Asked, until: float) -> float:
    """Tokens of an answer that had come by then: its parts are taken to be of equal size."""
    if asked.answer is None:
        return 0.0
    came = sum(asked.sent + seconds <= until for seconds in asked.answer.seconds)
    return asked.answer.num_tokens * came / len(asked.answer.seconds)


def answers_in(record: Record) -> list[Answered]:
    return [Answered(*entry) for entry in record["answers"]]


def side_figures(records: Sequence[Record], load: Load, slo: Slo | None) -> SideFigures:
    """The figures of one side, from its blocks."""
    together = 0 if load.is_single or load.rate is not None else load.concurrency

    def told(first: int = 0, *, ended: bool = False) -> list[Answered]:
        """All answers of each block from one on, or those that ended while the load was full."""
        listed = [(answer, record["full"] + 1e-9) for record in records for answer in answers_in(record)[first:]]
        return [answer for answer, end in listed if not ended or answer.sent + answer.whole <= end]

    answers = told()
    within = told(ended=True) or answers  # beside fewer others than the load says they are not of this load
    later, settled = told(together) or answers, told(together, ended=True) or within  # places start in one prefill
    seconds = sum(record["full"] for record in records)
    # at a rate all answers are those of the arrivals, however long the last ones take
    counted = seconds if load.rate is None else sum(record["arriving"] for record in records)
    failures = [failure for record in records for failure in record["failures"]]
    good = fmean(slo is not None and slo.holds(answer) for answer in settled) * len(within)
    lags = [lag for record in records for lag in record["lags"]]
    padded = [0.0] * (sum(record["num_lags"] for record in records) - len(lags))
    return SideFigures(
        num_answers=len(answers),
        num_failed=len(failures),
        num_repeated=sum(record["num_repeated"] for record in records),
        tokens_per_second=rounded(sum(record["tokens"] for record in records) / seconds if seconds else None, 2),
        user_tokens_per_second=rounded(
            sum(answer.num_tokens for answer in within) / sum(answer.whole for answer in within) if within else None, 2
        ),
        ttft_ms=Percentiles.of([answer.wait for answer in later]),
        tpot_ms=Percentiles.of([per for answer in settled if (per := answer.per_token) is not None]),
        goodput=None if slo is None or not counted else round(good / counted, 4),
        client_late_ms=Percentiles.of([*padded, *lags, *(late for record in records for late in record["late"])]),
        client_cpu=round(max(record["cpu"] for record in records), 3),
        failures=failures[:20],
        slowing=None if load.rate is None else rounded(slowing(records), 2),
        most_in_flight=max(map(most_in_flight, records)),
    )


def most_in_flight(record: Record) -> int:
    moves = [move for one in answers_in(record) for move in ((one.sent, 1), (one.sent + one.whole, -1))]
    return max(accumulate(step for _, step in sorted(moves)), default=0)


def slowing(records: Sequence[Record]) -> float | None:
    """Seconds per token of the answers to the last quarter of a block's arrivals, over those to the first; None: they
    are too few, as drafts are accepted otherwise in each."""
    early, late = list[Answered](), list[Answered]()
    for record in records:
        answers = answers_in(record)
        early += answers[: len(answers) // 4]
        late += answers[len(answers) - len(answers) // 4 :]
    return seconds_per_token(late) / seconds_per_token(early) if len(early) >= FEWEST_EARLY else None


def speedup(
    load: Load, baseline: Sequence[Record], drafted: Sequence[Record], origins: Sequence[Hashable]
) -> tuple[float | None, Ends]:
    """How much faster the side with drafts is, and the 95 % interval.

    One question at a time: seconds per token of both sides, paired by what the questions come from; as a slow moment
    meets a whole block, the interval is at least that over pairs of blocks. More at a time: output tokens per second,
    paired by blocks that stand beside each other. At a rate: seconds per token of an answer, paired by blocks.

    Args: origins: by question; those of one origin, such as turns of one chat, are one observation.
    """
    if load.is_single:
        ratio, ends = speedup_of(by_origin(baseline, drafted, origins))
        _, over_blocks = speedup_of(pairs_of_blocks(per_token, baseline, drafted))
        return ratio, widened(ends, over_blocks)
    return speedup_of(pairs_of_blocks(machine_seconds if load.rate is None else per_token, baseline, drafted))


def repetition(
    load: Load, baseline: Sequence[Record], drafted: Sequence[Record], origins: Sequence[Hashable]
) -> Repetition:
    """How much the texts without drafts repeat themselves (by words where there are no ids), and the speedup of the
    questions whose texts do not loop: at every load of seconds per token, as a machine's tokens are those of all."""
    texts = dict[int, list[Any]]()
    for record in baseline:
        for number, told in record["texts"].items():
            texts.setdefault(int(number), []).extend(ids or text.split() for ids, text in told)
    found = [text_repetition(number, same) for number, same in sorted(texts.items())]
    looping = {one.prompt for one in found if one.is_looping}
    if not looping:
        return Repetition(found)
    plain, ours = ([without(record, looping) for record in side] for side in (baseline, drafted))
    pairs = pairs_of_blocks(per_token, plain, ours)
    ratio, ends = speedup(load, plain, ours, origins) if load.is_single else speedup_of(pairs)
    num_timed = len(by_origin(plain, ours, origins)) if load.is_single else len(pairs)
    return Repetition(found, WithoutLoops(num_timed, None, ratio, ends))


def without(record: Record, numbers: Collection[int]) -> Record:
    """A block's answers to all but these questions."""
    answers = [entry for entry in record["answers"] if entry[0] not in numbers]
    return {**record, "answers": answers, "tokens": sum(entry[-1] for entry in answers)}


def pairs_of_blocks(
    cost: Callable[[Record], float], baseline: Sequence[Record], drafted: Sequence[Record]
) -> list[tuple[float, float]]:
    """The cost of both sides, of blocks that stand beside each other and in which both answered."""
    pairs = zip(baseline, drafted, strict=False)
    return [(cost(a), cost(b)) for a, b in pairs if a["tokens"] and b["tokens"]]


def by_origin(
    baseline: Sequence[Record], drafted: Sequence[Record], origins: Sequence[Hashable]
) -> list[tuple[float, float]]:
    """Seconds of both sides for as many tokens, summed over the questions of one origin."""
    theirs, ours = by_question(baseline), by_question(drafted)
    found = dict[Hashable, tuple[float, float]]()
    for number in theirs.keys() & ours.keys():
        before, after = found.get(origins[number], (0.0, 0.0))
        num_tokens = ours[number][1]
        found[origins[number]] = before + theirs[number][0] * num_tokens, after + ours[number][0] * num_tokens
    return list(found.values())


def widened(ends: Ends, other: Ends) -> Ends:
    """The interval, wide enough to hold another one where that is known."""
    (low, high), (least, most) = ends, other
    if low is None or high is None or least is None or most is None:
        return ends
    return min(low, least), max(high, most)


def by_question(records: Sequence[Record]) -> dict[int, tuple[float, int]]:
    """Seconds per token of each question's answers, and the tokens of its first one."""
    found: dict[int, list[Answered]] = {}
    for record in records:
        for answer in answers_in(record):
            found.setdefault(answer.number, []).append(answer)
    return {
        number: (fmean(one.whole / one.num_tokens for one in same), same[0].num_tokens)
        for number, same in found.items()
    }


def machine_seconds(record: Record) -> float:
    return record["full"] / record["tokens"]


def per_token(record: Record) -> float:
    return seconds_per_token(answers_in(record))


def seconds_per_token(answers: Sequence[Answered]) -> float:
    return sum(answer.whole for answer in answers) / sum(answer.num_tokens for answer in answers)
