"""The time budget of a plan: seconds divided between its stages, and how much work fits, estimated from a few steps."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

import torch

from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting
from ..decoding.loop import Texts, prefill, run_round
from ..decoding.replay import Stopwatch
from ..decoding.stopping import Stop
from ..measurement import step_times
from ..measurement.config import MeasureConfig
from ..measurement.disturbance import MOST_AGAIN, SHARE_AGAIN
from ..measurement.metrics import LEAST_TIMED
from ..measurement.runner import build_engine
from .prediction import Cell

# the share of the seconds at which each stage must end; unused time goes to later stages
ENDS = {"texts": 0.15, "trees": 0.22, "acceptance": 0.45, "schedules": 0.52, "step times": 0.68, "check": 0.95}
SAFETY = 0.8  # share of the available time that estimates may fill
ENOUGH_TOKENS, FEWEST_TOKENS = 32, 8  # per answer: settings are dropped before going below the first; least number
FAR_PROBE = 0.02  # share of the seconds: if probing one row takes longer, many rows are extrapolated
COMPILING = 5.0  # seconds for one shape of a target's layers on a GPU, about
COMPILING_SHARE = 0.4  # of the seconds


@dataclass
class Budget:
    """Seconds from now on. math.inf: as much as there is to do."""

    seconds: float = math.inf
    loading: float = 0.0  # seconds before, which do not count
    left_out: list[str] = field(default_factory=list)  # what there was no time for
    began: float = field(default_factory=lambda: time.perf_counter())

    @property
    def used(self) -> float:
        return time.perf_counter() - self.began

    def room(self, stage: str) -> float:
        """Seconds that a stage has from now on."""
        return max(ENDS[stage] * self.seconds - self.used, 0.0)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a plan cost and stands on, as plan.json has it."""

    seconds: float | None  # that it had; None: no limit
    seconds_used: float
    seconds_loading: float  # the target, which is not counted
    num_prompts_given: int
    max_new_tokens_given: int
    left_out: list[str]


@contextmanager
def compiled_within(budget: Budget, target: Target, *, num_shapes: int) -> Iterator[None]:
    """A context in which joined layers are compiled only if there is time for this many shapes."""
    decoder = target.decoder
    if decoder is None or not decoder.compiles or COMPILING * num_shapes <= COMPILING_SHARE * budget.seconds:
        yield
        return
    budget.left_out.append("compiling the target's layers")
    decoder.compiles = False
    try:
        yield
    finally:
        decoder.compiles = True


@dataclass(frozen=True)
class Costs:
    """Estimated seconds for one row and for `many` rows, linear in between: reading a prompt, a baseline step, a round
    of the longest chain. setup: extra seconds of an engine's first round."""

    many: int = 1
    prefills: tuple[float, float] = (0.0, 0.0)
    steps: tuple[float, float] = (0.0, 0.0)
    rounds: tuple[float, float] = (0.0, 0.0)
    setup: float = 0.0

    def of(self, ends: tuple[float, float], rows: int) -> float:
        """Linear interpolation between one row and `many`."""
        return ends[0] + (ends[1] - ends[0]) * (rows - 1) / max(self.many - 1, 1)

    def prefill(self, rows: int) -> float:
        return self.of(self.prefills, rows)

    def step(self, rows: int) -> float:
        return self.of(self.steps, rows)

    def round(self, rows: int) -> float:
        return self.of(self.rounds, rows)

    def decoding(self, rows: int, tokens: int) -> float:
        """A batch with drafts, none of them accepted."""
        return self.setup + self.prefill(rows) + tokens * self.round(rows)


@torch.no_grad()
def probe(
    target: Target,
    drafter: Drafter | None,
    setting: DraftSetting | None,
    prompt: list[int],
    budget: Budget,
    config: MeasureConfig,
    *,
    many: int,
) -> Costs:
    """Time a few steps with one row and, if there is time, with `many`; returns zeros if the budget is unlimited."""
    if math.isinf(budget.seconds):
        return Costs()
    room = len(prompt) + 4 * (2 + (setting.num_draft_tokens if setting else 0))
    prompt = prompt[: len(prompt) - max(room - target.max_positions, 0)]

    def timed(rows: int, drafts: DraftSetting | None) -> tuple[float, float, float]:
        watch = Stopwatch(target.device)
        engine = build_engine(target, drafter, drafts, config, batch_size=rows, max_length=room)
        texts = Texts([prompt] * rows, room, Stop(frozenset()))
        marks = [watch.now()]
        state = prefill(engine, texts, watch).state
        for _ in range(3):
            marks.append(watch.now())
            _, state = run_round(engine, texts, state, watch)
        marks.append(watch.now())
        read, first, *others = (after - before for before, after in zip(marks, marks[1:], strict=False))
        return read, min(others), max(first - min(others), 0.0)

    tried, before = list[tuple[float, float, float, float]](), budget.used
    for rows in sorted({1, many}):
        if rows > 1 and budget.used - before > FAR_PROBE * budget.seconds:
            one = tried[0]
            tried.append((rows * one[0], rows * one[1], rows * one[2], one[3]))
            continue
        plain = timed(rows, None)
        drafted = timed(rows, setting) if setting else plain
        tried.append((drafted[0], plain[1], drafted[1], max(plain[2], drafted[2])))
    reads, baseline, rounds, setups = zip(tried[0], tried[-1], strict=True)
    return Costs(many, reads, baseline, rounds, max(setups))


def by_importance(settings: Sequence[DraftSetting]) -> list[DraftSetting]:
    """The longest chain, the shortest, the first tree, the chains at doublings between, the other trees, the others."""
    chains = [setting for setting in settings if setting.tree is None]
    trees = [setting for setting in settings if setting.tree is not None]
    doubled = [chain for chain in chains[::-1] if chain.num_draft_tokens.bit_count() == 1]
    return list(dict.fromkeys([*chains[-1:], *chains[:1], *trees[:1], *doubled, *trees, *chains]))


@dataclass(frozen=True)
class DecodedSample:
    """What is decoded of each setting, `rows` prompts at a time."""

    settings: list[DraftSetting]
    tokens: int  # of an answer, at most
    rows: int


def fit_sample(
    settings: Sequence[DraftSetting], costs: Costs, *, seconds: float, tokens: int, rows: int
) -> DecodedSample:
    """As much of these settings, tokens and rows as fits: one batch at least, of the most important setting at least.

    Settings go first, down to half of them, then tokens, then more settings; and rows, as they are judged last.
    """
    ranked = by_importance(settings)
    fewest = min(FEWEST_TOKENS, tokens)

    def fits(number: int, rows: int, tokens: int) -> bool:
        return number * costs.decoding(rows, tokens) <= SAFETY * seconds

    lengths = sorted({tokens, *(length for length in (64, ENOUGH_TOKENS, 16, fewest) if length < tokens)}, reverse=True)
    longer = [length for length in lengths if length >= ENOUGH_TOKENS] or lengths[:1]
    half = (len(ranked) + 1) // 2
    choices = [*product(range(len(ranked), half - 1, -1), longer), *product(range(half, 0, -1), lengths)]
    number, tokens = next((choice for choice in choices if fits(choice[0], 1, choice[1])), (1, fewest))
    affordable = set(ranked[:number])
    while rows > 1 and not fits(number, rows, tokens):
        rows = (rows + 1) // 2
    return DecodedSample([setting for setting in settings if setting in affordable], tokens, rows)


@dataclass(frozen=True)
class TimingPlan:
    """Where rounds are timed, and how many in a pass."""

    batch_sizes: list[int]
    contexts: list[int]
    num_rounds: int


def fit_timing(
    batch_sizes: Sequence[int], contexts: Sequence[int], num_settings: int, costs: Costs, *, seconds: float, read: int
) -> TimingPlan:
    """As much as fits once: first fewer rounds, then the longest context only, then the middle batch sizes left out,
    then the largest. Args: read: tokens of the prompt that was probed."""

    def one_pass(timing: TimingPlan) -> float:
        runs = [num_settings * costs.round(size) + (num_settings + 1) * costs.step(size) for size in timing.batch_sizes]
        cells = sum(runs) * len(timing.contexts) * (timing.num_rounds + 1)
        longer = sum(max(context / read, 1.0) for context in timing.contexts)
        reading = sum(costs.setup + longer * costs.prefill(size) for size in timing.batch_sizes)
        return cells + (num_settings + 1) * reading

    sizes, ends = list(batch_sizes), sorted({batch_sizes[0], batch_sizes[-1]})
    places = [(sizes, list(contexts)), (sizes, list(contexts[-1:])), (ends, list(contexts[-1:]))]
    places.append((sizes[:1], list(contexts[-1:])))
    most = step_times.NUM_ROUNDS
    numbers = sorted({most, min(4, most), min(2, most)}, reverse=True)
    choices = [TimingPlan(*place, number) for place in places for number in numbers]
    return next((timing for timing in choices if one_pass(timing) <= SAFETY * seconds), choices[-1])


def fit_texts(number: int, costs: Costs, *, seconds: float, tokens: int) -> tuple[int, int]:
    """Of so many prompts how many can be answered one by one, and in how many tokens: at least one prompt."""
    per_text = costs.setup + costs.prefill(1) + min(tokens, ENOUGH_TOKENS) * costs.step(1)
    number = max(1, int(min(number, seconds / per_text))) if per_text else number
    spare = seconds / number - costs.setup - costs.prefill(1)
    return number, max(min(FEWEST_TOKENS, tokens), int(min(tokens, spare / costs.step(1)))) if per_text else tokens


@dataclass(frozen=True)
class Check:
    """What is measured of cells of one batch size."""

    cells: list[Cell]  # none: there is no time
    num_repeats: int
    num_batches: int


def fit_check(cells: Sequence[Cell], costs: Costs, *, seconds: float, tokens: int, repeats: int, batches: int) -> Check:
    """The most promising cells, as many and in as many repeats and batches as fit.

    Repeats go first, then cells, down to the LEAST_TIMED batches that an interval needs; then batches.
    """
    ranked = sorted(cells, key=lambda cell: -cell.predicted_speedup)
    size = ranked[0].batch_size

    def takes(check: Check) -> float:
        least = 1.0 if size > 1 else 0.0  # a batch lasts until its slowest row ends, which may gain nothing
        sides = 1 + sum(max(1 / max(cell.predicted_speedup, 0.1), least) for cell in check.cells)
        one = sides * tokens * costs.step(size) + (1 + 2 * len(check.cells)) * costs.prefill(size)
        again = MOST_AGAIN * max(1, check.num_batches // SHARE_AGAIN)
        return (1 + len(check.cells)) * costs.setup + one * (1 + check.num_repeats * (check.num_batches + again))

    for least in (min(LEAST_TIMED, batches), 1):
        for number in range(len(ranked), 0, -1):
            for repeated in dict.fromkeys((repeats, 1)):
                for count in range(batches, least - 1, -1):
                    check = Check(ranked[:number], repeated, count)
                    if takes(check) <= SAFETY * seconds:
                        return check
    return Check([], repeats, 0)
