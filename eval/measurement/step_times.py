"""Durations of rounds on this machine by batch size, context and setting: measured, and interpolated in between."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...base.errors import BadInput
from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import DraftSetting
from ..decoding.engine import Engine
from ..decoding.loop import Texts, prefill, run_round
from ..decoding.replay import Stopwatch
from ..decoding.stopping import Stop
from ..decoding.verify import ACCEPT_RULES
from ..proof.config import MeasureConfig
from ..proof.runner import build_engine

NUM_ROUNDS = 8  # timed per cell and pass
NUM_PASSES = 4  # over all cells, in alternating order, so that a cell's passes are spread in time

PARTS = ("draft_ms", "verify_ms", "overhead_ms", "reading_ms", "prefill_ms")


@dataclass(frozen=True)
class StepTime:
    """A round's parts in milliseconds, medians."""

    setting: str | None  # None: the baseline
    batch_size: int
    context: int
    num_tokens: int  # that the target reads per row
    num_draft_tokens: int
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    reading_ms: float = 0.0  # the drafter's time for reading the prompts, once per batch
    prefill_ms: float = 0.0  # the target's time for reading the prompts, once per batch
    num_timed: int = 0  # number of rounds behind the medians
    spread: float | None = None  # over passes: (slowest - fastest) / median round, relative to baseline steps

    @classmethod
    def of(
        cls, setting: DraftSetting | None, *, batch_size: float, context: float, num_timed: float = 0, **parts: float
    ) -> "StepTime":
        """The time of a round of a setting, or of a baseline step. Args: parts: PARTS by name, 0 where they are left
        out."""
        name, drafted, length = (
            (setting.name, setting.num_drafted, setting.num_draft_tokens) if setting else (None, 0, 0)
        )
        return cls(name, round(batch_size), round(context), 1 + drafted, length, num_timed=round(num_timed), **parts)

    @property
    def round_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.overhead_ms

    def scaled(self, factor: float) -> "StepTime":
        """All times multiplied by a factor."""
        return replace(self, **{name: getattr(self, name) * factor for name in PARTS})

    def as_json(self) -> dict[str, Any]:
        """An entry of plan.json's `step_times`."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def measure_step_times(
    target: Target,
    drafter: Drafter,
    settings: Sequence[DraftSetting],
    config: MeasureConfig,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    text: Sequence[int],
    on_cell: Callable[[], object] = lambda: None,
    num_rounds: int | None = None,
    seconds: float = math.inf,
) -> list[StepTime]:
    """Time rounds of every setting, and baseline steps, at every batch size and context.

    Args:
        config: how tokens are sampled, and how steps run.
        contexts: tokens of the prompts. text: of the target's domain, to cut them from; repeated where it is short.
        num_rounds: per cell and pass; None: NUM_ROUNDS. seconds: no second pass is begun that would end later.

    Raises: BadInput if a context and its rounds exceed what the target reads.
    """
    check_room(target, contexts, settings)
    cells = [
        TimedCell(target, drafter, settings, config, batch_size=size, context=context, text=text, num_rounds=num_rounds)
        for size in batch_sizes
        for context in contexts
    ]
    began = time.perf_counter()
    for number in range(NUM_PASSES):
        if number and (time.perf_counter() - began) * (1 + 1 / number) > seconds:
            break
        for cell in cells if number % 2 == 0 else cells[::-1]:
            cell.run(on_setting=on_cell)
            cell.release()
    return [*(cell.baseline for cell in cells), *(time for cell in cells for time in cell.rounds)]


class TimedCell:
    """Rounds of every setting, and baseline steps, at one batch size and context, timed in passes.

    Each pass over a setting is followed by baseline steps and measured relative to them, so that drifts of the
    machine's speed cancel. The result is converted to milliseconds with the median baseline step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: Sequence[DraftSetting],
        config: MeasureConfig,
        *,
        batch_size: int,
        context: int,
        text: Sequence[int],
        num_rounds: int | None = None,
        on_round: Callable[[], object] = lambda: None,
    ):
        """Args: as those of `measure_step_times`. drafter: None without settings. on_round: called before each round;
        it may raise."""
        self.target, self.drafter, self.settings = target, drafter, list(settings)
        self.config, self.num_rounds = replace(config, accept=ACCEPT_RULES["exact"]), num_rounds or NUM_ROUNDS
        self.on_round = on_round
        self.rows = [repeated_text(text, row * context, context) for row in range(batch_size)]
        self.max_length = context + max(map(most_new_tokens, (None, *settings)))  # of all engines: caches of one size
        self.plain: list[StepTime] = []  # passes of the baseline, one before the settings and one after each
        # passes of each setting, in baseline steps beside them
        self.drafted: dict[DraftSetting, list[StepTime]] = {setting: [] for setting in settings}
        self.decodings: dict[DraftSetting | None, TimedRounds] = {}

    @torch.no_grad()
    def run(self, *, on_setting: Callable[[], object] = lambda: None, reads_again: bool = False) -> None:
        """One pass over all settings, in alternating order. Engines are kept for the next pass.

        Args: reads_again: also time reading the prompts again.
        """
        forth = self.settings if len(self.plain) % (2 * (len(self.settings) + 1)) == 0 else self.settings[::-1]
        if reads_again:
            for decoding in self.decodings.values():
                decoding.read()
        self.plain.append(self._timed(None))
        for setting in forth:
            time = self._timed(setting)
            self.plain.append(self._timed(None))
            self.drafted[setting].append(time.scaled(1 / self.plain[-1].round_ms))
            on_setting()

    def release(self) -> None:
        """Give back the memory of the engines."""
        self.decodings.clear()

    @property
    def baseline(self) -> StepTime:
        """A baseline step."""
        return median_of(self.plain)

    @property
    def rounds(self) -> list[StepTime]:
        """A round of each setting."""
        return [median_of(passes).scaled(self.baseline.round_ms) for passes in self.drafted.values()]

    def _timed(self, setting: DraftSetting | None) -> StepTime:
        if setting not in self.decodings:
            engine = build_engine(
                self.target, self.drafter, setting, self.config, batch_size=len(self.rows), max_length=self.max_length
            )
            self.decodings[setting] = TimedRounds(engine, self.rows, setting)
        return self.decodings[setting].time(self.num_rounds, on_round=self.on_round)


class TimedRounds:
    """An engine that has read prompts, and whose rounds can be timed repeatedly from that state.

    Drafters on the host keep the texts of earlier rounds: call `read` before timing them again. A target with recurrent
    layers, whose states have moved on, reads the prompts again by itself.
    """

    def __init__(self, engine: Engine, rows: list[list[int]], setting: DraftSetting | None):
        """Args: rows: prompts of one length, one per row of the engine."""
        self.engine, self.rows, self.setting = engine, rows, setting
        self.watch = Stopwatch(engine.target.device)
        self.is_timed = False  # before: the rounds have moved the states on
        self.read()

    def read(self) -> None:
        """The prompts, timed."""
        texts = self._texts()
        first, self.state, self.reading_seconds = prefill(self.engine, texts, self.watch)
        self.first_tokens, self.prefill_seconds = texts.new, first.seconds

    def time(self, num_rounds: int, *, on_round: Callable[[], object] = lambda: None) -> StepTime:
        """Medians over num_rounds rounds after a warm-up round; texts do not end. on_round: called before each."""
        if self.is_timed and self.engine.target.has_states:
            self.read()
        self.is_timed = True
        texts, state, rounds = self._texts(), self.state, []
        texts.new = [list(row) for row in self.first_tokens]
        for _ in range(num_rounds + 1):
            on_round()
            round_, state = run_round(self.engine, texts, state, self.watch)
            rounds.append(round_)
        draft = 1000 * statistics.median(round_.draft_seconds for round_ in rounds[1:])
        verify = 1000 * statistics.median(round_.verify_seconds for round_ in rounds[1:])
        whole = 1000 * statistics.median(round_.seconds for round_ in rounds[1:])
        reading = 1000 * (self.reading_seconds + rounds[0].seconds) - whole  # some drafters read in the first round
        return StepTime.of(
            self.setting,
            batch_size=len(self.rows),
            context=len(self.rows[0]),
            draft_ms=draft,
            verify_ms=verify,
            overhead_ms=max(whole - draft - verify, 0.0),
            reading_ms=max(reading, 0.0) if self.setting else 0.0,
            prefill_ms=1000 * self.prefill_seconds,
            num_timed=num_rounds,
        )

    def _texts(self) -> Texts:
        return Texts(self.rows, most_new_tokens(self.setting), Stop(frozenset()))


def most_new_tokens(setting: DraftSetting | None) -> int:
    """New tokens that the timed rounds of a setting may commit."""
    return (NUM_ROUNDS + 2) * (1 + (setting.num_draft_tokens if setting else 0))


def check_room(target: Target, contexts: Iterable[int], settings: Sequence[DraftSetting]) -> None:
    """Raises BadInput if the longest context and its timed rounds exceed what the target reads."""
    longest, most = max(contexts), max(map(most_new_tokens, settings), default=NUM_ROUNDS)
    if longest + most > target.num_positions:
        raise BadInput(
            f"context {longest}: with {most} tokens for timed rounds it exceeds the target's {target.num_positions}"
        )


def repeated_text(text: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens of a text from a position on, repeating the text from its start."""
    return [text[(start + i) % len(text)] for i in range(length)]


def median_of(passes: Sequence[StepTime]) -> StepTime:
    """The medians of several passes over one cell."""
    parts = {name: statistics.median(getattr(time, name) for time in passes) for name in PARTS}
    rounds = [time.round_ms for time in passes]
    spread = (max(rounds) - min(rounds)) / statistics.median(rounds) if len(rounds) > 1 else None
    return replace(passes[0], **parts, num_timed=sum(time.num_timed for time in passes), spread=spread)


@dataclass(frozen=True)
class StepTable:
    """Measured step times with linear interpolation, and linear extrapolation from the outermost two points."""

    times: tuple[StepTime, ...]

    def at(self, setting: DraftSetting | None, *, batch_size: float, context: float) -> StepTime:
        """A round of a setting, or a baseline step; chains that were not measured are interpolated. Raises BadInput."""
        known = [time for time in self.times if time.setting == (setting.name if setting else None)]
        if not known and setting is not None and setting.tree is None:
            known = [time for time in self.times if time.setting and time.num_tokens == time.num_draft_tokens + 1]
        if not known:
            raise BadInput(f"{setting.name if setting else 'baseline'}: no step time was measured")
        length = setting.num_draft_tokens if setting else 0
        axes = (("batch_size", batch_size), ("context", context), ("num_draft_tokens", length))
        parts = {name: max(interpolated(known, name, axes), 0.0) for name in PARTS}
        return StepTime.of(setting, batch_size=batch_size, context=context, **parts)


def relative_verify_cost(times: StepTable, setting: DraftSetting, *, batch_size: float, context: float) -> float:
    """The time of verifying one more token of each row, in rounds that draft a chain and verify none of it:
    (verification of all drafts - baseline step) / length, over the time of such a round."""
    plain = times.at(None, batch_size=batch_size, context=context)
    drafted = times.at(setting, batch_size=batch_size, context=context)
    more = max(drafted.verify_ms - plain.verify_ms, 0.0)
    return more / setting.num_draft_tokens / (drafted.round_ms - more)


def verify_cost(
    target: Target,
    drafter: Drafter,
    setting: DraftSetting,
    text: Sequence[int],
    config: MeasureConfig,
    *,
    context: int,
) -> float:
    """`relative_verify_cost`, measured at the config's batch size and sampling: above temperature 0, verifying takes
    longer per token."""
    size, context = config.batch_size, min(context, target.num_positions - most_new_tokens(setting))
    times = measure_step_times(target, drafter, [setting], config, batch_sizes=[size], contexts=[context], text=text)
    return relative_verify_cost(StepTable(tuple(times)), setting, batch_size=size, context=context)


def interpolated(times: Sequence[StepTime], part: str, axes: Sequence[tuple[str, float]]) -> float:
    """A part of the times at a point given by (axis, value) pairs, linear along each axis (a field of StepTime)."""
    if not axes:
        return getattr(times[0], part)
    (axis, at), *others = axes
    values = sorted({getattr(time, axis) for time in times})
    rows = ([time for time in times if getattr(time, axis) == value] for value in values)
    return interpolate([(value, interpolated(row, part, others)) for value, row in zip(values, rows, strict=True)], at)


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between measured points, and beyond the ends along the outermost two."""
    if len(points) == 1:
        return points[0][1]
    pairs = list(zip(points, points[1:], strict=False))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
