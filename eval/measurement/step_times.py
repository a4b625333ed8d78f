"""How long rounds take here, by batch, context and what is drafted: measured by decoding, and read in between."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..engine import Engine, build_engine
from ..generate import Stopwatch, Texts, prefill, run_round
from ..sampling import Sampling
from ..stopping import Stop
from .config import DraftSetting

NUM_ROUNDS = 8  # timed per cell and pass
NUM_PASSES = 4  # over all cells, in alternating order: a cell's passes lie apart in time

PARTS = ("draft_ms", "verify_ms", "overhead_ms", "reading_ms", "prefill_ms")


@dataclass(frozen=True)
class StepTime:
    """A round's parts in milliseconds, medians. setting: None for the baseline. num_tokens: the target reads per row.

    prefill_ms: what the target takes to read the prompts, and reading_ms the drafter, once per batch of texts.
    """

    setting: str | None
    batch_size: int
    context: int
    num_tokens: int
    num_draft_tokens: int
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    reading_ms: float = 0.0
    prefill_ms: float = 0.0

    @property
    def round_ms(self) -> float:
        return self.draft_ms + self.verify_ms + self.overhead_ms

    def scaled(self, factor: float) -> "StepTime":
        """All its times so much longer."""
        return replace(self, **{name: getattr(self, name) * factor for name in PARTS})

    def as_json(self) -> dict[str, Any]:
        """An entry of plan.json's `step_times`."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def measure_step_times(
    target: Target,
    drafter: Drafter,
    settings: Sequence[DraftSetting],
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    text: Sequence[int],
    sampling: Sampling | None = None,
    steps: str = "eager",
    on_cell: Callable[[], object] = lambda: None,
) -> list[StepTime]:
    """Time rounds of every setting, and baseline steps, at every batch size and context.

    Args:
        contexts: tokens of the prompts. text: of the target's domain, to cut them from; repeated where it is short.

    Raises: BadInput where a context and its rounds exceed what the target reads.
    """
    check_room(target, contexts, settings)
    places = [
        Place(target, drafter, settings, batch_size=size, context=context, text=text, sampling=sampling, steps=steps)
        for size in batch_sizes
        for context in contexts
    ]
    for number in range(NUM_PASSES):
        for place in places if number % 2 == 0 else places[::-1]:
            place.run(on_setting=on_cell)
            place.rest()
    return [*(place.usual for place in places), *(one for place in places for one in place.found)]


class Place:
    """Rounds of every setting, and baseline steps, at one batch size and context, timed in passes.

    Each pass over a setting is followed by baseline steps, and counts relative to these: where the machine's speed
    drifts, both drift. Then it is told in milliseconds of a usual baseline step.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: Sequence[DraftSetting],
        *,
        batch_size: int,
        context: int,
        text: Sequence[int],
        sampling: Sampling | None = None,
        steps: str = "eager",
    ):
        """Args: as those of `measure_step_times`. drafter: None without settings."""
        self.target, self.drafter, self.settings = target, drafter, list(settings)
        self.sampling, self.steps = sampling, steps
        self.rows = [cut(text, row * context, context) for row in range(batch_size)]
        self.max_length = context + max(map(most_tokens, (None, *settings)))  # of all engines: caches of one size
        self.plain: list[StepTime] = []  # passes of the baseline, one before the settings and one after each
        self.drafted: dict[DraftSetting, list[StepTime]] = {
            one: [] for one in settings
        }  # in baseline steps beside them
        self.decodings: dict[DraftSetting | None, Decoding] = {}

    @torch.no_grad()
    def run(self, *, on_setting: Callable[[], object] = lambda: None, reads_again: bool = False) -> None:
        """One pass over everything, the settings in turns from either end. Engines are kept for the next one.

        Args: reads_again: also read the prompts anew where they were read by an earlier pass.
        """
        forth = self.settings if len(self.plain) % (2 * (len(self.settings) + 1)) == 0 else self.settings[::-1]
        if reads_again:
            for one in self.decodings.values():
                one.read()
        self.plain.append(self._decoding(None).time())
        for setting in forth:
            found = self._decoding(setting).time()
            self.plain.append(self._decoding(None).time())
            self.drafted[setting].append(found.scaled(1 / self.plain[-1].round_ms))
            on_setting()

    def rest(self) -> None:
        """Give back the memory of the engines."""
        self.decodings.clear()

    @property
    def usual(self) -> StepTime:
        """A baseline step."""
        return middle(self.plain)

    @property
    def found(self) -> list[StepTime]:
        """A round of each setting."""
        return [middle(passes).scaled(self.usual.round_ms) for passes in self.drafted.values()]

    def _decoding(self, setting: DraftSetting | None) -> "Decoding":
        if setting not in self.decodings:
            self.decodings[setting] = Decoding(self._engine(setting), self.rows, setting)
        return self.decodings[setting]

    def _engine(self, setting: DraftSetting | None) -> Engine:
        warm = self.sampling is not None and self.sampling.temperature > 0
        return build_engine(
            self.target,
            self.drafter,
            setting,
            batch_size=len(self.rows),
            max_length=self.max_length,
            sampling=self.sampling,
            steps=self.steps,
            generator=torch.Generator(self.target.device).manual_seed(0) if warm else None,
        )


class Decoding:
    """An engine behind prompts that it has read; its rounds can be run from there again and again.

    But for drafters on the host, which remember what they read: `read` comes first there.
    """

    def __init__(self, engine: Engine, rows: list[list[int]], setting: DraftSetting | None):
        """Args: rows: prompts of one length, one per row of the engine."""
        self.engine, self.rows, self.setting = engine, rows, setting
        self.watch = Stopwatch(engine.target.device)
        self.read()

    def read(self) -> None:
        """The prompts, timed."""
        texts = self._texts()
        first, self.state, self.reading_seconds = prefill(self.engine, texts, self.watch)
        self.first_tokens, self.prefill_seconds = texts.new, first.seconds

    def time(self) -> StepTime:
        """Medians over NUM_ROUNDS rounds, behind a first one that does not count; texts do not end."""
        texts, setting = self._texts(), self.setting
        texts.new = [list(row) for row in self.first_tokens]
        state, rounds = self.state, []
        for _ in range(NUM_ROUNDS + 1):
            done, state = run_round(self.engine, texts, state, self.watch)
            rounds.append(done)
        draft, verify, whole = (
            1000 * statistics.median(getattr(one, name) for one in rounds[1:])
            for name in ("draft_seconds", "verify_seconds", "seconds")
        )
        reading_ms = 1000 * (self.reading_seconds + rounds[0].seconds) - whole  # some drafters read in the first round
        return StepTime(
            setting=setting.name if setting else None,
            batch_size=len(self.rows),
            context=len(self.rows[0]),
            num_tokens=1 + (setting.num_drafted if setting else 0),
            num_draft_tokens=setting.num_draft_tokens if setting else 0,
            draft_ms=draft,
            verify_ms=verify,
            overhead_ms=max(whole - draft - verify, 0.0),
            reading_ms=max(reading_ms, 0.0) if setting else 0.0,
            prefill_ms=1000 * self.prefill_seconds,
        )

    def _texts(self) -> Texts:
        return Texts(self.rows, most_tokens(self.setting), Stop(frozenset()))


def most_tokens(setting: DraftSetting | None) -> int:
    """New tokens that the timed rounds of a setting may commit."""
    return (NUM_ROUNDS + 2) * (1 + (setting.num_draft_tokens if setting else 0))


def check_room(target: Target, contexts: Iterable[int], settings: Sequence[DraftSetting]) -> None:
    longest, most = max(contexts), max(map(most_tokens, settings), default=NUM_ROUNDS)
    if longest + most > target.max_positions:
        raise BadInput(
            f"context {longest}: with {most} tokens for timed rounds it exceeds the target's {target.max_positions}"
        )


def cut(text: Sequence[int], start: int, length: int) -> list[int]:
    """So many tokens of a text from a position on, round and round."""
    return [text[(start + i) % len(text)] for i in range(length)]


def middle(passes: Sequence[StepTime]) -> StepTime:
    """The medians of several passes over one cell."""
    parts = {name: statistics.median(getattr(one, name) for one in passes) for name in PARTS}
    return replace(passes[0], **parts)


@dataclass(frozen=True)
class StepTable:
    """Measured step times, read linearly between what was measured, and beyond it along the outermost two."""

    times: tuple[StepTime, ...]

    def at(self, setting: DraftSetting | None, *, batch_size: float, context: float) -> StepTime:
        """A round of a setting, or a baseline step. A chain that was not measured lies between those that were."""
        known = [one for one in self.times if one.setting == (setting.name if setting else None)]
        if not known and setting is not None and setting.tree is None:
            known = [one for one in self.times if one.setting and one.num_tokens == one.num_draft_tokens + 1]
        if not known:
            raise BadInput(f"{setting.name if setting else 'baseline'}: no step time was measured")
        parts = {name: self._read(known, name, setting, batch_size, context) for name in PARTS}
        num_tokens = 1 + (setting.num_drafted if setting else 0)
        num_draft = setting.num_draft_tokens if setting else 0
        name = setting.name if setting else None
        return StepTime(name, round(batch_size), round(context), num_tokens, num_draft, **parts)

    def _read(
        self, known: Sequence[StepTime], name: str, setting: DraftSetting | None, batch_size: float, context: float
    ) -> float:
        def over(rows: Sequence[StepTime], key: str, at: float, then: Callable[[Sequence[StepTime]], float]) -> float:
            values = sorted({getattr(one, key) for one in rows})
            points = [(value, then([one for one in rows if getattr(one, key) == value])) for value in values]
            return interpolate(points, at)

        length = setting.num_draft_tokens if setting else 0

        def by_length(rows: Sequence[StepTime]) -> float:
            return over(rows, "num_draft_tokens", length, lambda same: getattr(same[0], name))

        def by_context(rows: Sequence[StepTime]) -> float:
            return over(rows, "context", context, by_length)

        return max(over(known, "batch_size", batch_size, by_context), 0.0)


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between measured points, and beyond the ends along the outermost two."""
    if len(points) == 1:
        return points[0][1]
    pairs = list(zip(points, points[1:], strict=False))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
