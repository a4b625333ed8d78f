"""The time budget of a plan: from a few timed steps, the largest scope whose estimated seconds fit."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import DraftSetting
from ..decoding.loop import Texts, prefill, run_round
from ..decoding.replay import Stopwatch
from ..decoding.stopping import Stop
from ..figures.metrics import LEAST_TIMED
from ..measurement import step_times
from ..proof.config import MeasureConfig
from ..proof.runner import build_engine
from .prediction import MOST_FINALISTS

SAFETY = 0.8  # share of the available time that estimates may fill
FEWEST_TOKENS, FEW_TOKENS = 8, 32  # of an answer
FEWEST_ROUNDS = 2  # timed per cell and pass, at a single context
FAR_PROBE = 0.02  # share of the seconds: if probing one row takes longer, many rows are extrapolated
COMPILING = 5.0  # seconds for one shape of a target's layers on a GPU, about
COMPILING_SHARE = 0.4  # of the seconds


@dataclass
class Budget:
    """Seconds from now on."""

    seconds: float
    loading: float = 0.0  # seconds before, which do not count
    left_out: list[str] = field(default_factory=list)  # what there was no time for
    began: float = field(default_factory=lambda: time.perf_counter())

    @property
    def used(self) -> float:
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        return max(self.seconds - self.used, 0.0)


def compile_within(budget: Budget, target: Target, *, num_shapes: int) -> None:
    """From now on the target's layers are compiled only if there is time for this many shapes."""
    decoder = target.decoder
    if decoder is not None and decoder.compiles and COMPILING * num_shapes > COMPILING_SHARE * budget.seconds:
        budget.left_out.append("compiling the target's layers")
        decoder.compiles = False


@dataclass(frozen=True)
class Costs:
    """Estimated seconds for one row and for `many` rows, linear in between: reading a prompt, a baseline step, a round
    of the longest chain. setup: extra seconds of an engine's first round."""

    many: int
    prefills: tuple[float, float]
    steps: tuple[float, float]
    rounds: tuple[float, float]
    setup: float = 0.0

    def of(self, ends: tuple[float, float], rows: int) -> float:
        """One of the costs for so many rows."""
        return ends[0] + (ends[1] - ends[0]) * (rows - 1) / max(self.many - 1, 1)

    def answering(self, rows: int, tokens: int, *, drafts: bool) -> float:
        """A batch of answers, no draft of which is accepted."""
        return self.of(self.prefills, rows) + tokens * self.of(self.rounds if drafts else self.steps, rows)

    def timing(self, rows: int, num_rounds: int) -> float:
        """A pass over one setting and the baseline beside it, both read anew."""
        pair = self.of(self.rounds, rows) + self.of(self.steps, rows)
        return self.setup + 2 * self.of(self.prefills, rows) + (num_rounds + 1) * pair


@torch.no_grad()
def probe(
    target: Target,
    drafter: Drafter,
    setting: DraftSetting,
    prompt: list[int],
    budget: Budget,
    config: MeasureConfig,
    *,
    many: int,
) -> Costs:
    """Time a few steps with one row and, if there is time, with `many`."""
    room = len(prompt) + 4 * (2 + setting.num_draft_tokens)
    prompt = prompt[: len(prompt) - max(room - target.num_positions, 0)]

    def timed(rows: int, drafts: DraftSetting | None) -> tuple[float, float, float]:
        """Seconds of the prefill, of a round, and of what the first round takes beyond it."""
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

    def both(rows: int) -> tuple[float, float, float, float]:
        plain, drafted = timed(rows, None), timed(rows, setting)
        return drafted[0], plain[1], drafted[1], max(plain[2], drafted[2])

    before, one = budget.used, both(1)
    if many == 1:
        far = one
    elif budget.used - before > FAR_PROBE * budget.seconds:
        far = (*(many * part for part in one[:3]), one[3])
    else:
        far = both(many)
    reads, baseline, rounds, setups = zip(one, far, strict=True)
    return Costs(many, reads, baseline, rounds, max(setups))


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is decoded and timed."""

    num_prompts: int
    tokens: int  # of an answer, at most
    lengths: tuple[int, ...]  # of chains
    trees: tuple[str, ...]  # by name and number of nodes
    batch_sizes: tuple[int, ...]
    is_quick: bool = False  # whether only FEWEST_ROUNDS are timed, behind one length of text instead of two

    def seconds(self, costs: Costs) -> float:
        """An estimate of everything: what is accepted, step times, and the least that is measured."""
        rows, num_settings = min(max(self.batch_sizes), self.num_prompts), len(self.lengths) + len(self.trees)
        batches = -(-self.num_prompts // rows)
        accepting = num_settings * (costs.setup + batches * costs.answering(rows, self.tokens, drafts=True))
        timed = len(at_doublings(self.lengths)) + len(self.trees)
        num_rounds, contexts = (FEWEST_ROUNDS, 1) if self.is_quick else (step_times.NUM_ROUNDS, 2)
        timing = sum(costs.timing(size, num_rounds) for size in self.batch_sizes) * timed * contexts
        sides, checking = 1 + min(MOST_FINALISTS, num_settings), 0.0
        for size in self.batch_sizes:
            least = min(LEAST_TIMED, -(-self.num_prompts // size))
            checking += sides * (costs.setup + (1 + least) * costs.answering(size, self.tokens, drafts=False))
        return accepting + timing + checking

    def narrower(self) -> Iterator["Scope"]:
        """Itself, and then what is left of it, one cut after the other: prompts, tokens, trees and chains between the
        doublings, larger batch sizes, and at last all but one round of one chain."""
        yield self
        scope, fewest = self, min(self.num_prompts, LEAST_TIMED)
        while scope.num_prompts > fewest:
            scope = replace(scope, num_prompts=max(fewest, scope.num_prompts // 2))
            yield scope
        while scope.tokens > FEW_TOKENS:
            scope = replace(scope, tokens=max(FEW_TOKENS, scope.tokens // 2))
            yield scope
        scope = replace(scope, trees=(), lengths=at_doublings(self.lengths))
        yield scope
        while len(scope.batch_sizes) > 1:
            scope = replace(scope, batch_sizes=scope.batch_sizes[:-1])
            yield scope
        scope = replace(scope, lengths=scope.lengths[-1:], tokens=min(scope.tokens, FEWEST_TOKENS))
        yield scope
        yield replace(scope, num_prompts=1, is_quick=True)


def fit_scope(whole: Scope, costs: Costs, budget: Budget) -> Scope:
    """The largest scope that fits into what is left of the budget, at least the smallest; notes what is left out."""
    scopes = list(whole.narrower())
    scope = next((scope for scope in scopes if scope.seconds(costs) <= SAFETY * budget.left), scopes[-1])
    if scope.tokens < whole.tokens:
        budget.left_out.append(f"answers beyond {scope.tokens} of {whole.tokens} tokens")
    if scope.num_prompts < whole.num_prompts:
        budget.left_out.append(f"prompts beyond {scope.num_prompts} of {whole.num_prompts}")
    budget.left_out += [f"K {length}" for length in whole.lengths if length not in scope.lengths]
    budget.left_out += [name for name in whole.trees if name not in scope.trees]
    budget.left_out += [f"batch size {size}" for size in whole.batch_sizes if size not in scope.batch_sizes]
    return scope


def at_doublings(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Keeps the shortest of ascending lengths, the longest, and one at every doubling between them."""
    ends = {*lengths[:1], *lengths[-1:]}
    return tuple(length for length in lengths if length in ends or length.bit_count() == 1)
