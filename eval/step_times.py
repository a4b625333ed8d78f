"""How long rounds take here, by batch, context and what is drafted: measured by decoding, and read in between."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..configs.errors import BadInput
from ..heads.base import Drafter
from ..heads.target import Target
from .engine import Engine
from .generate import decode
from .settings import Setting
from .stopping import Stop
from .verify import Sampling

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


@torch.no_grad()
def measure_step_times(
    target: Target,
    drafter: Drafter,
    settings: Sequence[Setting],
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    text: Sequence[int],
    sampling: Sampling | None = None,
    steps: str = "eager",
    lengths: dict[str, float] | None = None,
    on_cell: Callable[[], object] = lambda: None,
) -> list[StepTime]:
    """Time rounds of every setting, and baseline steps, at every batch size and context.

    Each pass over a cell is followed by baseline steps, and counts relative to these: where the machine's speed drifts,
    both drift. Then it is told in milliseconds of a usual baseline step.

    Args:
        contexts: tokens of the prompts. text: of the target's domain, to cut them from; repeated where it is short.
        lengths: acceptance_length of the settings where known: how far a timed round moves on, so that each cell has
            about NUM_ROUNDS rounds.

    Raises: BadInput where a context and its rounds exceed what the target reads.
    """
    check_room(target, contexts, settings)

    def engine(setting: Setting | None, size: int, context: int) -> Engine:
        return Engine(
            target,
            drafter if setting else None,
            batch_size=size,
            max_length=context + most_tokens(setting),
            num_draft_tokens=setting.num_draft_tokens if setting and not setting.tree else None,
            tree=setting.tree if setting else None,
            sampling=sampling,
            steps=steps,
            generator=torch.Generator(target.device).manual_seed(0) if sampling and sampling.temperature else None,
        )

    places = [(size, context) for size in batch_sizes for context in contexts]
    plain: dict[tuple[int, int], list[StepTime]] = {place: [] for place in places}
    drafted: dict[tuple[int, int, Setting], list[StepTime]] = {(*at, one): [] for at in places for one in settings}
    for number in range(NUM_PASSES):
        for size, context in places if number % 2 == 0 else places[::-1]:
            rows = [cut(text, row * context, context) for row in range(size)]
            baseline = engine(None, size, context)
            plain[size, context].append(one_pass(baseline, rows, None, length=1.0))
            for setting in settings if number % 2 == 0 else settings[::-1]:
                length = (lengths or {}).get(setting.name, 1.0)
                found = one_pass(engine(setting, size, context), rows, setting, length=length)
                plain[size, context].append(one_pass(baseline, rows, None, length=1.0))
                drafted[size, context, setting].append(found.scaled(1 / plain[size, context][-1].round_ms))
                on_cell()
    usual = {place: middle(passes) for place, passes in plain.items()}
    found = [middle(passes).scaled(usual[size, context].round_ms) for (size, context, _), passes in drafted.items()]
    return [*usual.values(), *found]


def most_tokens(setting: Setting | None) -> int:
    """New tokens that the timed rounds of a setting may commit."""
    return (NUM_ROUNDS + 2) * (1 + (setting.num_draft_tokens if setting else 0))


def check_room(target: Target, contexts: Iterable[int], settings: Sequence[Setting]) -> None:
    longest, most = max(contexts), max(map(most_tokens, settings), default=NUM_ROUNDS)
    if longest + most > target.max_positions:
        raise BadInput(
            f"context {longest}: with {most} tokens for timed rounds it exceeds the target's {target.max_positions}"
        )


def cut(text: Sequence[int], start: int, length: int) -> list[int]:
    """So many tokens of a text from a position on, round and round."""
    return [text[(start + i) % len(text)] for i in range(length)]


def one_pass(engine: Engine, rows: list[list[int]], setting: Setting | None, *, length: float) -> StepTime:
    """Some rounds behind these prompts; texts do not end."""
    new = 1 + round((NUM_ROUNDS + 1) * length)
    rounds = decode(engine, rows, max_new_tokens=new, stop=Stop(frozenset())).rounds
    timed = rounds[2:] or rounds[1:]
    draft, verify, whole = (
        1000 * statistics.median(getattr(one, name) for one in timed)
        for name in ("draft_seconds", "verify_seconds", "seconds")
    )
    return StepTime(
        setting=setting.name if setting else None,
        batch_size=len(rows),
        context=len(rows[0]),
        num_tokens=1 + (setting.num_drafted if setting else 0),
        num_draft_tokens=setting.num_draft_tokens if setting else 0,
        draft_ms=draft,
        verify_ms=verify,
        overhead_ms=max(whole - draft - verify, 0.0),
        reading_ms=max(1000 * rounds[1].seconds - whole, 0.0) if setting else 0.0,
        prefill_ms=1000 * rounds[0].seconds,
    )


def middle(passes: Sequence[StepTime]) -> StepTime:
    """The medians of several passes over one cell."""
    parts = {name: statistics.median(getattr(one, name) for one in passes) for name in PARTS}
    return replace(passes[0], **parts)


@dataclass(frozen=True)
class StepTable:
    """Measured step times, read linearly between what was measured, and beyond it along the outermost two."""

    times: tuple[StepTime, ...]

    def at(self, setting: Setting | None, *, batch_size: float, context: float) -> StepTime:
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
        self, known: Sequence[StepTime], name: str, setting: Setting | None, batch_size: float, context: float
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
