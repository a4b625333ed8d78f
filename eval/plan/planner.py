"""The plan of a deployment: what to draft at which batch size, predicted, checked, and in the form of serving engines.

The texts are decoded once per setting to count what is accepted, and a few rounds are timed per setting, batch size and
context; both together predict the speedup of every cell (setting, batch size, context). Some cells, or all, are then
measured by decoding. Each stage does as much as fits into the budget.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...heads.base import DraftHead
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting, chains
from ..measurement.measure import measure_all
from ..measurement.runner import Contender
from ..measurement.step_times import NUM_PASSES, StepTable, StepTime, measure_step_times, most_new_tokens
from ..measurement.tree_search import NUM_CALIBRATION, SHAPED_TREES, drafts_tree, hold_out
from ..suites.prompts import Suite
from .accepting import accepted_within, evenly, named_trees
from .budget import FEWEST_TOKENS, SAFETY, Budget, Costs, Spent, fit_check, fit_sample, fit_timing, probe
from .document import DEFAULT_TREES, Plan, PlanConfig
from .engine_settings import for_llamacpp, for_sglang, is_scheduled_by_vllm, measured_lengths, schedule_for_vllm
from .machine_profile import times_on
from .prediction import (
    Accepted,
    Cell,
    StepTimes,
    Workload,
    errors,
    predict_cells,
    recommend_cells,
    shortlist,
)
from .scheduling import WatchedText, schedule_loads, watch_texts

LARGEST_PROFILED = 256  # largest batch size of a schedule made from a profile


def no_bar(total: int, what: str) -> Callable[[], object]:
    """A progress bar that shows nothing: ticks, and one more tick to close it."""
    return lambda: None


@dataclass(frozen=True)
class Scope:
    """What there is time for. config: its tokens per answer and batch sizes are the ones planned with."""

    suite: Suite
    config: PlanConfig
    costs: Costs

    @property
    def workload(self) -> Workload:
        return Workload([len(prompt) for prompt in self.suite.prompts], self.config.measure.max_new_tokens)


@dataclass
class Planner:
    """One drafter on one suite. A stage gets the scope that the one before left, and may leave a narrower one."""

    target: Target
    drafter: Drafter
    suite: Suite
    config: PlanConfig
    name: str  # of the drafter
    bar: Callable[[int, str], Callable[[], object]] = no_bar  # makes a progress bar of so many ticks
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        """Raises BadInput if trees are to be shaped and there is a single prompt."""
        self.num_given = len(self.suite.prompts)
        if not self.suite.calibration and any(map(is_shaped, self.trees)):
            self.suite = hold_out(self.suite)
        self.drafter.leave_out(self.suite.prompts, self.suite.questions)

    def plan(self) -> Plan:
        """Raises BadInput on settings that the drafter cannot draft, and on contexts beyond the target's."""
        costs = probe(
            self.target,
            self.drafter,
            chains(self.drafter, self.config.lengths)[-1],
            max(self.suite.prompts, key=len),
            self.budget,
            self.config.measure,
            many=max(self.config.batch_sizes),
        )
        accepted, scope = self.accept(self.settings(costs), Scope(self.suite, self.config, costs))
        watched = self.watch(accepted, scope)
        machine, measured = self.config.machine, list[StepTime]()
        if machine is None:
            measured, scope = self.time(accepted, scope)
            times: StepTimes = StepTable(tuple(measured))
        else:
            times = times_on(machine, self.target, self.drafter, [one.setting for one in accepted])
        config, workload = scope.config, scope.workload
        cells = predict_cells(accepted, workload, times, batch_sizes=config.batch_sizes, contexts=config.contexts)
        if machine is None:
            cells = self.check(cells, scope)
        advice = recommend_cells(cells)
        budget, head = self.budget, self.drafter if isinstance(self.drafter, DraftHead) else None
        most, context = LARGEST_PROFILED if machine else max(config.batch_sizes), workload.context
        ranges = schedule_for_vllm(
            accepted, times, max_batch_size=most, context=context, measured=measured_lengths(cells)
        )
        return Plan(
            drafter=self.name,
            suite=scope.suite.name,
            num_prompts=len(scope.suite.prompts),
            max_new_tokens=config.measure.max_new_tokens,
            temperature=config.measure.temperature,
            machine=machine.name if machine else None,
            acceptance=accepted,
            step_times=measured,
            cells=cells,
            check=errors(cells),
            recommendation=advice,
            budget=Spent(
                seconds=None if math.isinf(budget.seconds) else budget.seconds,
                seconds_used=round(budget.used, 2),
                seconds_loading=round(budget.loading, 2),
                num_prompts_given=self.num_given,
                max_new_tokens_given=self.config.measure.max_new_tokens,
                left_out=budget.left_out,
            ),
            vllm_schedule=ranges,
            schedules=schedule_loads(
                watched,
                times,
                [one.setting.num_draft_tokens for one in accepted if one.setting.tree is None],
                batch_sizes=config.batch_sizes,
                context=workload.context,
                engines=("vllm", "headstart") if is_scheduled_by_vllm(head) else ("headstart",),
            ),
            sglang_flags=for_sglang(cells, head),
            llamacpp_flags=for_llamacpp(cells, head),
        )

    @property
    def trees(self) -> Sequence[str]:
        """By name: those asked for, or what can be shaped and drafted."""
        if self.config.trees is not None:
            return self.config.trees
        known = [name for name in DEFAULT_TREES if drafts_tree(self.target, self.drafter, name.partition(":")[0])]
        can_shape = self.suite.calibration or len(self.suite.prompts) > 1
        return [name for name in known if can_shape or not is_shaped(name)]

    def settings(self, costs: Costs) -> list[DraftSetting]:
        """Chains and trees to consider."""
        new, names, prompts = self.config.measure.max_new_tokens, self.trees, self.suite.calibration[:NUM_CALIBRATION]

        def reached(rows: int) -> float:
            """Tokens of texts that can shape trees in the time."""
            left = SAFETY * self.budget.room("trees") - costs.setup - (2 + len(names)) * costs.prefill(rows)
            return left / costs.step(rows) if costs.step(rows) else math.inf

        if any(map(is_shaped, names)):
            if reached(len(prompts)) < min(new, FEWEST_TOKENS):
                prompts = prompts[:1]
            if reached(len(prompts)) < min(new, FEWEST_TOKENS):
                self.budget.left_out += [name for name in names if is_shaped(name)]
                names = [name for name in names if not is_shaped(name)]
            else:
                new = int(min(new, reached(len(prompts))))
        trees = named_trees(names, self.target, self.drafter, prompts, max_new_tokens=new)
        return [*chains(self.drafter, self.config.lengths), *trees]

    def accept(self, settings: Sequence[DraftSetting], scope: Scope) -> tuple[list[Accepted], Scope]:
        """What the texts accept of each setting, of as many settings, prompts and tokens as there is time for."""
        suite, measure, most = scope.suite, scope.config.measure, max(scope.config.batch_sizes)
        room, rows = self.budget.room("acceptance"), min(most, len(suite.prompts))
        sample = fit_sample(settings, scope.costs, seconds=room, tokens=measure.max_new_tokens, rows=rows)
        self.budget.left_out += [setting.name for setting in settings if setting not in sample.settings]
        measure = replace(measure, max_new_tokens=sample.tokens)
        tick = self.bar(len(sample.settings), f"what {suite.name} accepts of {self.name}")
        chosen, accepted = accepted_within(
            self.target,
            self.drafter,
            suite.prompts,
            sample.settings,
            replace(measure, batch_size=most if sample.rows == rows else sample.rows),
            seconds=room,
            batch_seconds=len(sample.settings) * scope.costs.decoding(sample.rows, sample.tokens),
            on_setting=tick,
        )
        tick()
        return accepted, replace(scope, suite=suite.subset(chosen), config=replace(scope.config, measure=measure))

    def watch(self, accepted: Sequence[Accepted], scope: Scope) -> list[WatchedText]:
        """What the longest chain's drafts are estimated at, and what is accepted of them, at each position of as many
        texts as there is time for; none of a drafter without estimates, and if there is no time for a batch."""
        lengths = [one.setting.num_draft_tokens for one in accepted if one.setting.tree is None]
        if not self.drafter.estimates or not lengths:
            return []
        measure, prompts = scope.config.measure, scope.suite.prompts
        rows = min(max(scope.config.batch_sizes), len(prompts))
        seconds = scope.costs.decoding(rows, measure.max_new_tokens)
        room = SAFETY * self.budget.room("schedules")
        num_batches = int(min(room / seconds if seconds else math.inf, -(-len(prompts) // rows)))
        if num_batches < 1:
            self.budget.left_out.append("schedules by confidence")
            return []
        chosen = [prompts[i] for i in evenly(len(prompts), num_batches * rows)]
        how = replace(measure, batch_size=rows)
        return watch_texts(self.target, self.drafter, chosen, how, num_draft_tokens=max(lengths))

    def time(self, accepted: Sequence[Accepted], scope: Scope) -> tuple[list[StepTime], Scope]:
        """Step times of this machine. Chains between the measured ones are left to the table."""
        config, workload = scope.config, scope.workload
        settings = [one.setting for one in accepted]
        timed = at_doublings([setting for setting in settings if setting.tree is None])
        timed += [setting for setting in settings if setting.tree]
        sizes = sorted(config.batch_sizes)
        spans = [span for size in sizes for span in workload.spans(size, accepted[0].tokens)]
        first, last = min(start for _, start, _, _ in spans), max(end for _, _, end, _ in spans)
        room = self.target.max_positions - max(map(most_new_tokens, timed))
        contexts = sorted({min(first, room), min(last, room), *config.contexts})
        left, read = self.budget.room("step times"), max(workload.prompt_lengths)
        timing = fit_timing(sizes, contexts, len(timed), scope.costs, seconds=left, read=read)
        if len(timing.batch_sizes) == 1 < len(sizes):  # nothing to draw a line through
            self.budget.left_out += [f"batch size {size}" for size in sizes[1:]]
            scope = replace(scope, config=replace(config, batch_sizes=timing.batch_sizes))
        cells = len(timing.batch_sizes) * len(timing.contexts)
        tick = self.bar(NUM_PASSES * cells * len(timed), f"timing rounds of {self.name}")
        times = measure_step_times(
            self.target,
            self.drafter,
            timed,
            config.measure,
            batch_sizes=timing.batch_sizes,
            contexts=timing.contexts,
            text=[token for prompt in scope.suite.prompts for token in prompt],
            on_cell=tick,
            num_rounds=timing.num_rounds,
            seconds=left,
        )
        tick()
        return times, scope

    def check(self, cells: Sequence[Cell], scope: Scope) -> list[Cell]:
        """The cells, with what was measured of those that are chosen."""
        decoded = [cell for cell in cells if cell.load == "prompts"]
        chosen = {"all": decoded, "advice": shortlist(cells), "none": []}[scope.config.check]
        num = len({cell.setting for cell in decoded})
        measured = self.measured(chosen, scope, num_choices=num)
        by_place = {(cell.setting, cell.batch_size, cell.load): cell for cell in measured}
        return [by_place.get((cell.setting, cell.batch_size, cell.load), cell) for cell in cells]

    def measured(self, chosen: Sequence[Cell], scope: Scope, *, num_choices: int) -> list[Cell]:
        """Those of the cells that there is time for, decoded in earnest, those of a batch size beside one baseline.

        Args: num_choices: settings from which the cells were chosen, by what these same prompts accept."""
        config, suite, measured = scope.config.measure, scope.suite, list[Cell]()
        tick = self.bar(len(chosen), f"measuring {self.name}")
        sizes = sorted({cell.batch_size for cell in chosen})
        for number, size in enumerate(sizes):
            here, full = [cell for cell in chosen if cell.batch_size == size], suite.filled(size)
            check = fit_check(
                here,
                scope.costs,
                seconds=self.budget.room("check") / (len(sizes) - number),
                tokens=config.max_new_tokens,
                repeats=config.num_repeats,
                batches=len(full.prompts) // size,
            )
            missed = [cell.setting.name for cell in here if cell not in check.cells]
            self.budget.left_out += [f"measuring {name} at batch size {size}" for name in missed]
            if check.cells:
                count = check.num_batches * size
                part = full if count == len(full.prompts) else suite.subset(evenly(len(suite.prompts), count))
                how = replace(config, batch_size=size, num_repeats=check.num_repeats)
                contenders = [Contender(self.name, self.drafter, cell.setting) for cell in check.cells]
                results = measure_all(self.target, contenders, part, how)
                pairs = zip(check.cells, results, strict=True)
                measured += [cell.measured(result, num_choices=num_choices) for cell, (result, _) in pairs]
            for _ in here:
                tick()
        tick()
        return measured


def is_shaped(tree: str) -> bool:
    """Whether texts shape a tree of that name, `static:16`."""
    return tree.partition(":")[0] in SHAPED_TREES


def at_doublings(chains: Sequence[DraftSetting]) -> list[DraftSetting]:
    """Of chains the shortest, the longest, and one at every doubling between them."""
    ends = {chain.num_draft_tokens for chain in (*chains[:1], *chains[-1:])}
    return [chain for chain in chains if chain.num_draft_tokens in ends or chain.num_draft_tokens.bit_count() == 1]
