"""The decoding passes of a measurement: all drafters and their common baseline take turns on each batch of prompts, and
finished batches are stored, so that an interrupted measurement can resume."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from ...base.errors import BadInput, first_line
from ...targets.target import Target
from ..decoding.loop import Decoding
from ..proof.baseline import check_baseline
from ..proof.config import MeasureConfig
from ..proof.runner import Contender, Runner
from ..suites.prompts import FailedPrompt, Suite
from .batches import MeasuredBatch, Side
from .disturbance import MOST_AGAIN, SHARE_AGAIN, ProcessorMeter, passes_disturbed
from .resume import BatchStore, Record, identity, settings_key

PORTION = 32  # new tokens per row that a side decodes in one turn
Measured = tuple[list[MeasuredBatch], list[FailedPrompt]]  # decoded batches, and the prompts of failed ones


def measure_batches(
    target: Target,
    contenders: Sequence[Contender],
    suite: Suite,
    config: MeasureConfig,
    *,
    on_batch: Callable[[], object],
    store: BatchStore | None,
) -> list[Measured]:
    """For each contender its batches, with the common baseline, and the prompts of batches that failed.

    Raises: BadInput on wrong settings, and before anything is timed if the engine decodes the target wrongly.
    """
    key = ""
    if store is not None:
        drafts = [[one.name, identity(one.drafter), asdict(one.setting)] for one in contenders]
        key = settings_key(target, suite, {**asdict(config), "drafts": drafts})
    sides = Sides(target, contenders, suite, config)
    measured: list[Measured] = [([], []) for _ in contenders]
    is_warmed_up = False
    for number, batch in enumerate(sides.batches):
        record = None if store is None else store.get(key, number)
        if record is None:
            try:
                if not is_warmed_up:
                    sides.warm_up(batch)
                is_warmed_up = True
                record = sides.decode(number, batch)
            except BadInput:  # wrong settings, as the prompts have been checked
                raise
            except Exception as error:  # out of memory, or a bug: go on with the other batches
                for _, failures in measured:
                    failures += failures_of(batch, reason_of(error))
                on_batch()
                continue
            if store is not None and not any(record["failed"]):
                store.add(key, number, record)
        plain, *drafted = sides_in(record)
        assert plain is not None  # or the whole batch failed
        for side, reason, (batches, failures) in zip(drafted, record["failed"][1:], measured, strict=True):
            if side is None:
                failures += failures_of(batch, reason)
            else:
                batches.append(MeasuredBatch(number, batch, side, plain, record["num_again"]))
        on_batch()
    return measured


class Sides:
    """The baseline, which comes first, and every contender, on the batches of a suite."""

    def __init__(self, target: Target, contenders: Sequence[Contender], suite: Suite, config: MeasureConfig):
        self.config = config
        self.runners = [Runner(target, None, suite.prompts, config)]
        self.runners += [one.runner(target, suite.prompts, config) for one in contenders]
        rows = range(len(suite.prompts))
        self.batches = [suite.subset(rows[start : start + config.batch_size]) for start in rows[:: config.batch_size]]
        self.most_again = max(1, len(self.batches) // SHARE_AGAIN)  # batches that may still be measured again

    def warm_up(self, batch: Suite) -> None:
        """Raises: BadInput if the engine decodes the target wrongly; the baseline's exception."""
        check_baseline(self.runners[0], self.batches)
        baseline, *_ = decode_by_turns(self.runners, batch.prompts, self.config.seed)
        if baseline.error is not None:
            raise baseline.error

    def decode(self, number: int, batch: Suite) -> Record:
        """Of each side on a batch its runs and what others took of the processor meanwhile, or why it failed."""
        once = partial(self.decode_once, number, batch)
        sides, num_again = least_disturbed(once, most_again=MOST_AGAIN if self.most_again else 0)
        self.most_again -= num_again > 0
        return {
            "sides": [None if isinstance(side, Exception) else side.recorded for side in sides],
            "others": [None if isinstance(side, Exception) else side.others for side in sides],
            "num_again": num_again,
            "failed": [reason_of(side) if isinstance(side, Exception) else "" for side in sides],
        }

    def decode_once(self, number: int, batch: Suite) -> list[Side | Exception]:
        """All repeats of each side on a batch; its exception if it failed. Raises: the baseline's exception."""
        sides = [Side() for _ in self.runners]
        errors: dict[int, Exception] = {}
        for repeat in range(self.config.num_repeats):
            seed, first = pass_seed(self.config.seed, number, repeat), (number + repeat) % len(sides)
            for i, turn in enumerate(decode_by_turns(self.runners, batch.prompts, seed, first=first)):
                if turn.error is not None or turn.decoding is None:
                    errors.setdefault(i, turn.error or RuntimeError("nothing was decoded"))
                    continue
                sides[i].runs.append(turn.decoding.generation)
                sides[i].others.append(turn.meter.others())
        if 0 in errors:
            raise errors[0]
        return [errors.get(i, side) for i, side in enumerate(sides)]


def sides_in(record: Record) -> list[Side | None]:
    """The sides in a record that `Sides.decode` made; None where a side failed."""
    runs_and_others = zip(record["sides"], record["others"], strict=True)
    return [None if runs is None else Side.of(runs, others) for runs, others in runs_and_others]


def failures_of(batch: Suite, reason: str) -> list[FailedPrompt]:
    """All prompts of a batch."""
    return [FailedPrompt(source.number, source.row, reason) for source in batch.sources]


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


class Turn:
    """One side's pass over a batch, in portions. An exception ends it: it is kept, and the engine is dropped."""

    def __init__(self, runner: Runner, prompts: list[list[int]], seed: int):
        self.runner, self.prompts, self.seed = runner, prompts, seed
        self.meter = ProcessorMeter()
        self.decoding: Decoding | None = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or (self.decoding is not None and self.decoding.is_done)

    def decode(self, num_new: int) -> None:
        """Decode until each row has num_new new tokens or has ended. Raises BadInput on wrong settings."""
        if self.is_done:
            return
        try:
            with self.meter:
                decoding = self.decoding = self.decoding or self.runner.begin(self.prompts, self.seed)
                while not decoding.is_done and decoding.num_new < num_new:
                    decoding.advance()
        except BadInput:
            raise
        except Exception as error:  # out of memory, or a fault in a drafter
            self.error, self.decoding = error, None
            self.runner.drop(len(self.prompts))


def decode_by_turns(runners: Sequence[Runner], prompts: list[list[int]], seed: int, *, first: int = 0) -> list[Turn]:
    """One pass of every side over a batch, in turns of PORTION tokens, so that drifts of the machine affect all sides.

    Args: first: the side that begins; the order is reversed after every turn."""
    turns = [Turn(runner, prompts, seed) for runner in runners]
    order = turns[first:] + turns[:first]
    num_new = 0
    while not all(turn.is_done for turn in turns):
        num_new += PORTION
        for turn in order:
            turn.decode(num_new)
        order.reverse()
    return turns


def least_disturbed(
    once: Callable[[], Sequence[Side | Exception]], *, most_again: int
) -> tuple[Sequence[Side | Exception], int]:
    """A batch's passes, measured again up to most_again times while any is disturbed. Returns the (first) attempt with
    the fewest disturbed passes, and how often the batch was measured again. Where more fails than did at first, the
    attempts before stay."""
    attempts = [once()]
    counts = [num_disturbed(attempts[0])]
    while counts[-1] and len(attempts) <= most_again:
        try:
            again = once()
        except BadInput:
            raise
        except Exception:
            break
        if num_failed(again) > num_failed(attempts[0]):
            break
        attempts.append(again)
        counts.append(num_disturbed(again))
    return attempts[counts.index(min(counts))], len(attempts) - 1


def num_failed(sides: Sequence[Side | Exception]) -> int:
    """How many sides of a batch failed."""
    return sum(isinstance(side, Exception) for side in sides)


def num_disturbed(sides: Sequence[Side | Exception]) -> int:
    """How many passes of a batch were disturbed; the baseline's count once per contender."""
    plain, *drafted = (side for side in sides if isinstance(side, Side))
    return sum(sum(map(bool, passes_disturbed(side, plain))) for side in drafted)


def pass_seed(seed: int, batch: int, repeat: int) -> int:
    """The sampling seed of a pass: different for each batch and repeat, the same in every measurement."""
    return int(np.random.SeedSequence([seed, batch, repeat]).generate_state(1)[0])
