"""Disturbances of timed passes, and medians of steps, which single slow steps do not affect."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from ..figures.metrics import rounded
from .batches import MeasuredBatch, Side
from .result import Disturbance, StepMedians

OTHERS = "other processes"
UNEVEN = "uneven steps"
IMPOSSIBLE = "verifying faster than a baseline step"
MOST_OTHERS = 0.1  # largest share of the processor that other processes may use
MOST_LOST = 0.1  # largest share of a pass that slow steps may lose: their time beyond FAR medians
FAR = 2.0
LEAST_STEPS = 8  # fewer steps in a pass do not give a useful median
LEAST_SECONDS = 0.5  # shorter passes are too short for the system's clock ticks (1/100 s)
MOST_AGAIN = 2  # how often a batch may be measured again
SHARE_AGAIN = 4  # one in this many batches of a suite may be measured again, at least one


class ProcessorMeter:
    """Measures the share of the processor that other processes use during its `with` blocks; only on Linux."""

    def __init__(self):
        self.seconds = 0.0
        self.used: list[float] | None = [0.0, 0.0, 0.0]  # `processor_seconds` summed over the blocks; None: unknown

    def __enter__(self) -> "ProcessorMeter":
        self.started, self.before = time.perf_counter(), processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        now = processor_seconds()
        self.seconds += time.perf_counter() - self.started
        if now is None or self.before is None or self.used is None:
            self.used = None
        else:
            readings = zip(self.used, now, self.before, strict=True)
            self.used = [used + after - before for used, after, before in readings]

    def others(self) -> float | None:
        """The other processes' share of all cores, 0 to 1; None if unknown or the time was too short."""
        if self.used is None or self.seconds < LEAST_SECONDS:
            return None
        busy, whole, own = self.used
        return min(max(busy - own, 0.0) / whole, 1.0) if whole > 0 else None


def processor_seconds() -> tuple[float, float, float] | None:
    """Seconds summed over all cores since boot: busy and total; and busy seconds of this process with its threads. Time
    taken by a hypervisor counts as busy. None if unknown."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    name, *ticks = stat.read_text().splitlines()[0].split()
    if name != "cpu" or len(ticks) < 8:
        return None
    user, nice, system, idle, waiting, *rest = (int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks[:8])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting, time.process_time()


def passes_disturbed(drafted: Side, baseline: Side) -> list[tuple[str, ...]]:
    """For each pass of a batch (speculative, baseline, speculative, ...), the reasons why it counts as disturbed."""
    by_pass = []
    for repeat, (fast, plain) in enumerate(zip(drafted.runs, baseline.runs, strict=True)):
        is_faster = False
        if min(len(fast.rounds), len(plain.rounds)) > LEAST_STEPS:
            verify, step = (statistics.median(one.verify_seconds for one in run.rounds[1:]) for run in (fast, plain))
            is_faster = verify < StepMedians.LEAST_VERIFY * step
        for side, run in ((drafted, fast), (baseline, plain)):
            others = side.others[repeat] if side.others else None
            reasons = {
                OTHERS: others is not None and others > MOST_OTHERS,
                UNEVEN: is_uneven([one.seconds for one in run.rounds[1:]]),
                IMPOSSIBLE: is_faster and side is drafted,
            }
            by_pass.append(tuple(reason for reason, holds in reasons.items() if holds))
    return by_pass


def is_uneven(seconds: Sequence[float]) -> bool:
    """Whether steps far slower than the median cost a pass much of its time. The first may read the prompt: ignored."""
    steps = seconds[1:]
    if len(steps) < LEAST_STEPS:
        return False
    limit = FAR * statistics.median(steps)
    return sum(max(step - limit, 0.0) for step in steps) > MOST_LOST * sum(steps)


def disturbance(batches: Sequence[MeasuredBatch]) -> Disturbance:
    """What remained disturbed, over all batches."""
    by_pass = [reasons for batch in batches for reasons in passes_disturbed(batch.drafted, batch.baseline)]
    sides = [side for batch in batches for side in (batch.drafted, batch.baseline)]
    shares = [share for side in sides for share in side.others if share is not None]
    return Disturbance(
        num_passes=len(by_pass),
        num_disturbed=sum(map(bool, by_pass)),
        num_again=sum(batch.num_again for batch in batches),
        reasons=[name for name in (OTHERS, UNEVEN, IMPOSSIBLE) if any(name in reasons for reasons in by_pass)],
        others_share=rounded(statistics.fmean(shares)) if shares else None,
    )


def step_medians(batches: Sequence[MeasuredBatch]) -> StepMedians:
    """Median milliseconds of each kind of step."""
    rounds = [round_ for batch in batches for round_ in batch.drafted.rounds]
    steps = [round_ for batch in batches for round_ in batch.baseline.rounds]
    if not rounds or not steps:
        return StepMedians()

    def median_ms(seconds: list[float]) -> float:
        return round(1000 * statistics.median(seconds), 4)

    return StepMedians(
        round_ms=median_ms([round_.seconds for round_ in rounds]),
        verify_ms=median_ms([round_.verify_seconds for round_ in rounds]),
        baseline_ms=median_ms([round_.seconds for round_ in steps]),
        baseline_verify_ms=median_ms([round_.verify_seconds for round_ in steps]),
    )
