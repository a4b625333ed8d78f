"""The plan of a deployment: what to draft at which batch size, predicted, measured, and in the form of serving engines.

The texts are decoded once per setting to count what is accepted, and a few rounds are timed per setting, batch size and
context; both together predict the speedup of every cell (a setting at a batch size). The most promising cells are then
measured by decoding. How much is decoded and timed is chosen once, at the start, to fit the budget.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...base.doing import doing
from ...engines.vllm import VLLM
from ...heads.base import DraftHead
from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import chains, drafts_tree
from ..figures.metrics import LEAST_TIMED
from ..measurement.measure import measure_all
from ..measurement.step_times import (
    NUM_PASSES,
    StepTable,
    StepTime,
    measure_step_times,
    most_new_tokens,
    relative_verify_cost,
)
from ..proof.config import MeasureConfig, check_length
from ..proof.runner import Contender
from ..report.results.drafter_words import drafter_words
from ..suites.prompts import Suite
from .accepting import accepted_by, evenly, named_trees
from .budget import FEWEST_ROUNDS, SAFETY, Budget, Costs, Scope, at_doublings, fit_scope, probe
from .engine_settings import ScheduleRange, for_llamacpp, for_sglang, measured_lengths, schedule_for_vllm
from .prediction import (
    Accepted,
    Cell,
    CheckSummary,
    RecommendedCell,
    Workload,
    errors,
    predict_cells,
    recommend_cells,
    shortlist,
)

SCHEMA_VERSION = 3
DEFAULT_TREES = ("dynamic:8", "dynamic:16")
TIMING_SHARE = 0.3  # of the seconds that are left: within it further passes of step times begin


@dataclass(kw_only=True)
class PlanConfig:
    """What to consider."""

    measure: MeasureConfig  # how texts are decoded
    lengths: Sequence[int] = tuple(range(1, 9))  # K of chains
    trees: Sequence[str] | None = None  # dynamic:NODES; None: DEFAULT_TREES, where the drafter drafts trees
    batch_sizes: Sequence[int] = (1, 4, 16)

    def __post_init__(self) -> None:
        for length in self.lengths:
            check_length(length, self.measure.max_new_tokens)

    @property
    def num_shapes(self) -> int:
        """Shapes of rounds that are run, about."""
        trees = DEFAULT_TREES if self.trees is None else self.trees
        return len(self.batch_sizes) * (1 + len(self.lengths) + len(trees))


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The time of a plan, and what was left out to keep to it, as plan.json has both."""

    seconds: float  # that it had
    seconds_used: float
    seconds_loading: float  # the target, which is not counted
    num_prompts_given: int
    max_new_tokens_given: int
    left_out: list[str]


@dataclass(kw_only=True)
class Plan:
    """What `headstart plan` finds. docs/reference/report_schema.md defines every key of plan.json."""

    drafter: str
    suite: str
    num_prompts: int
    max_new_tokens: int
    temperature: float
    acceptance: list[Accepted]
    step_times: list[StepTime]
    cells: list[Cell]
    check: CheckSummary
    recommendation: list[RecommendedCell]
    vllm_schedule: list[ScheduleRange]
    sglang_flags: str | None
    llamacpp_flags: str | None
    budget: Spent

    def to_json(self) -> dict[str, Any]:
        """plan.json, but for environment and target."""
        return {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "acceptance": [accepted.to_json() for accepted in self.acceptance],
            "step_times": [time.as_json() for time in self.step_times],
            "cells": [cell.to_json() for cell in self.cells],
            "check": asdict(self.check),
            "recommendation": [advice.to_json() for advice in self.recommendation],
            "budget": asdict(self.budget),
        }


@dataclass
class Planner:
    """One drafter on one suite."""

    target: Target
    drafter: Drafter
    suite: Suite
    config: PlanConfig
    name: str  # of the drafter
    budget: Budget

    def __post_init__(self) -> None:
        self.drafter.leave_out(self.suite.prompts, self.suite.questions)

    def plan(self) -> Plan:
        """Raises BadInput on settings that the drafter cannot draft."""
        measure, budget, num_given = self.config.measure, self.budget, len(self.suite.prompts)
        default_trees = DEFAULT_TREES if drafts_tree(self.target, self.drafter, "dynamic") else ()
        asked = chains(self.drafter, self.config.lengths)
        longest, many = max(self.suite.prompts, key=len), max(self.config.batch_sizes)
        costs = probe(self.target, self.drafter, asked[-1], longest, budget, measure, many=many)
        whole = Scope(
            num_prompts=num_given,
            tokens=measure.max_new_tokens,
            lengths=tuple(setting.num_draft_tokens for setting in asked),
            trees=tuple(default_trees if self.config.trees is None else self.config.trees),
            batch_sizes=tuple(sorted(self.config.batch_sizes)),
        )
        scope = fit_scope(whole, costs, budget)
        suite = self.suite.subset(evenly(num_given, scope.num_prompts))
        workload = Workload([len(prompt) for prompt in suite.prompts], scope.tokens)
        accepted = self.accept(suite, scope)
        measured = self.time(accepted, suite, scope, workload)
        times = StepTable(tuple(measured))
        cells = self.check(predict_cells(accepted, workload, times, batch_sizes=scope.batch_sizes), times, scope, costs)
        head = self.drafter if isinstance(self.drafter, DraftHead) else None
        method = self.name.partition(":")[0] if head is None else head.method
        sizes, lengths = scope.batch_sizes, measured_lengths(cells)
        schedule = schedule_for_vllm(accepted, times, batch_sizes=sizes, context=workload.context, measured=lengths)
        return Plan(
            drafter=self.name,
            suite=suite.name,
            num_prompts=len(suite.prompts),
            max_new_tokens=scope.tokens,
            temperature=measure.temperature,
            acceptance=accepted,
            step_times=measured,
            cells=cells,
            check=errors(cells),
            recommendation=recommend_cells(cells),
            budget=Spent(
                seconds=budget.seconds,
                seconds_used=round(budget.used, 2),
                seconds_loading=round(budget.loading, 2),
                num_prompts_given=num_given,
                max_new_tokens_given=measure.max_new_tokens,
                left_out=budget.left_out,
            ),
            vllm_schedule=schedule if method in (*VLLM.names, "ngram", "draft-model") else [],
            sglang_flags=for_sglang(cells, head),
            llamacpp_flags=for_llamacpp(cells, head),
        )

    def accept(self, suite: Suite, scope: Scope) -> list[Accepted]:
        settings = [*chains(self.drafter, scope.lengths), *named_trees(scope.trees, self.target, self.drafter)]
        rows = min(max(scope.batch_sizes), len(suite.prompts))
        how = replace(self.config.measure, max_new_tokens=scope.tokens, batch_size=rows)
        with doing(f"decoding {suite.name}, for what it accepts of {drafter_words(self.name)}", len(settings)) as tick:
            return accepted_by(self.target, self.drafter, suite.prompts, settings, how, on_setting=tick)

    def time(self, accepted: Sequence[Accepted], suite: Suite, scope: Scope, workload: Workload) -> list[StepTime]:
        """Step times of this machine. Chains between the measured ones are left to the table."""
        timed = chains(self.drafter, at_doublings(scope.lengths))
        timed += [one.setting for one in accepted if one.setting.tree]
        spans = [span for size in scope.batch_sizes for span in workload.spans(size, accepted[0].tokens)]
        first, last = min(start for _, start, _, _ in spans), max(end for _, _, end, _ in spans)
        room = self.target.num_positions - max(map(most_new_tokens, timed))
        contexts = sorted({min(last, room)} if scope.is_quick else {min(first, room), min(last, room)})
        cells = len(scope.batch_sizes) * len(contexts)
        with doing(f"timing rounds of {drafter_words(self.name)}", NUM_PASSES * cells * len(timed)) as tick:
            return measure_step_times(
                self.target,
                self.drafter,
                timed,
                self.config.measure,
                batch_sizes=scope.batch_sizes,
                contexts=contexts,
                text=[token for prompt in suite.prompts for token in prompt],
                on_cell=tick,
                num_rounds=FEWEST_ROUNDS if scope.is_quick else None,
                seconds=TIMING_SHARE * self.budget.left,
            )

    def check(self, cells: Sequence[Cell], times: StepTable, scope: Scope, costs: Costs) -> list[Cell]:
        """The cells, with what was measured of the most promising of each batch size; and of the longest chain,
        verified by confidence, where the drafter estimates what is accepted."""
        chosen, measured = shortlist(cells), list[Cell]()
        num_choices = len({cell.setting for cell in cells}) + self.drafter.estimates
        with doing(f"measuring {drafter_words(self.name)}", len(scope.batch_sizes)) as tick:
            for number, size in enumerate(scope.batch_sizes):
                here = [cell for cell in chosen if cell.batch_size == size]
                if self.drafter.estimates:
                    here.insert(1, self.by_confidence(here[0], times, scope))
                seconds = self.budget.left / (len(scope.batch_sizes) - number)
                measured += self.measured(here, scope, costs, seconds=seconds, num_choices=num_choices)
                tick()
        found = {(cell.setting, cell.batch_size): cell for cell in measured}
        return [found.pop((cell.setting, cell.batch_size), cell) for cell in cells] + list(found.values())

    def by_confidence(self, like: Cell, times: StepTable, scope: Scope) -> Cell:
        """A cell in which each row verifies the drafts that pay by its estimates; nothing is predicted of it."""
        longest = chains(self.drafter, scope.lengths)[-1]
        cost = relative_verify_cost(times, longest, batch_size=like.batch_size, context=like.context)
        return Cell(replace(longest, verify_cost=cost), like.batch_size, like.context, predicted_speedup=None)

    def measured(
        self, chosen: Sequence[Cell], scope: Scope, costs: Costs, *, seconds: float, num_choices: int
    ) -> list[Cell]:
        """Those of the cells of one batch size that there is time for, the first ones first, decoded in earnest beside
        one baseline: in at least the batches that an interval needs, then on as many prompts as fit.

        Args: num_choices: settings from which the cells were chosen, by what these same prompts accept."""
        size, config = chosen[0].batch_size, self.config.measure
        batches = -(-len(self.suite.prompts) // size)
        one = costs.answering(size, scope.tokens, drafts=False)
        for number in range(len(chosen), 0, -1):
            sides = 1 + number
            left = SAFETY * seconds - sides * (costs.setup + one)  # every side warms up on one batch
            fits = left / (sides * one)
            if fits >= min(LEAST_TIMED, batches):
                break
        else:
            self.budget.left_out.append(f"measuring at batch size {size}")
            return []
        names = [cell.title for cell in chosen[number:]]
        self.budget.left_out += [f"measuring {name} at batch size {size}" for name in names]
        repeats = config.num_repeats if fits >= batches * config.num_repeats else 1
        suite, batches = self.suite, int(min(batches, fits / repeats))
        if batches * size < len(suite.prompts):
            suite = suite.subset(evenly(len(suite.prompts), batches * size))
        how = replace(config, batch_size=size, num_repeats=repeats, max_new_tokens=scope.tokens)
        contenders = [Contender(self.name, self.drafter, cell.setting) for cell in chosen[:number]]
        results = measure_all(self.target, contenders, suite.filled(size), how)
        pairs = zip(chosen[:number], results, strict=True)
        return [cell.measured(result, num_choices=num_choices) for cell, (result, _) in pairs]
