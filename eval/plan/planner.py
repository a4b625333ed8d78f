"""The plan of a deployment: what to draft at which batch size, predicted, checked, and as serving engines take it.

The texts are decoded once per setting for what is accepted, and a few rounds are timed per setting, batch size and
context; together they give every cell's speedup. Some cells, or all, are then measured by decoding them in earnest.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...configs.errors import BadInput
from ...heads.base import DraftHead
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..measurement.config import DraftSetting, MeasureConfig, chains
from ..measurement.measure import measure
from ..measurement.step_times import NUM_PASSES, StepTable, StepTime, measure_step_times, most_tokens
from ..measurement.tree_search import SHAPED_TREES, drafts_tree, hold_out
from ..suites.prompts import Suite
from .engine_settings import ScheduleRange, for_llamacpp, for_sglang, measured_lengths, schedule
from .load import NUM_SERVED, NUM_SIMULATED, LoadPoint, load_curve, simulated_servers
from .machine_profile import MachineProfile, times_on
from .prediction import (
    Accepted,
    Cell,
    CheckSummary,
    Recommendation,
    StepTimes,
    Workload,
    accepted_by,
    errors,
    named_trees,
    predict,
    recommend,
    shortlist,
)
from .server import LiveServer

SCHEMA_VERSION = 1
CHECKS = ("advice", "all", "none")
DEFAULT_TREES = ("static:4", "static:8", "static:16", "dynamic:16")
LARGEST_PROFILED = 256  # batch size up to which a profile is read; a table measured here only as far as it was measured


def no_bar(total: int, what: str) -> Callable[[], object]:
    """A progress bar that shows nothing: ticks, and one more tick to close it."""
    return lambda: None


@dataclass(kw_only=True)
class PlanConfig:
    """What to consider."""

    measure: MeasureConfig  # how texts are decoded
    lengths: Sequence[int] = tuple(range(1, 9))  # K of chains
    trees: Sequence[str] | None = None  # NAME:NODES; None: DEFAULT_TREES, where the drafter drafts trees
    batch_sizes: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = ()  # tokens, besides the prompts' own
    # which cells to measure besides predicting them: advice, the shortlist of each batch size, to choose from it; all;
    # none
    check: str = "advice"
    machine: MachineProfile | None = None  # whose step times to plan with, and nothing is measured; None: this machine

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise BadInput(f"check {self.check}: expected one of {', '.join(CHECKS)}")


@dataclass(kw_only=True)
class Plan:
    """What `headstart plan` finds. docs/report_schema.md defines every key of plan.json."""

    drafter: str
    suite: str
    num_prompts: int
    max_new_tokens: int
    temperature: float
    machine: str | None  # the profile's name, of a plan for another machine
    acceptance: list[Accepted]
    step_times: list[StepTime]  # measured here; none for another machine
    cells: list[Cell]
    check: CheckSummary
    recommendation: list[Recommendation]
    load: list[LoadPoint]
    vllm_schedule: list[ScheduleRange]
    sglang_flags: str | None
    llamacpp_flags: str | None
    step_time_model: MachineProfile | None = None  # of this machine, fitted to step_times

    def to_json(self) -> dict[str, Any]:
        """plan.json, but for environment and target."""
        document = {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "acceptance": [accepted.to_json() for accepted in self.acceptance],
            "step_times": [time.as_json() for time in self.step_times],
            "cells": [cell.to_json() for cell in self.cells],
            "check": asdict(self.check),
            "recommendation": [advice.to_json() for advice in self.recommendation],
            "load": [asdict(point) for point in self.load],
            "step_time_model": asdict(self.step_time_model) if self.step_time_model else None,
        }
        return {key: value for key, value in document.items() if key != "step_time_model" or value}


@dataclass
class Planner:
    """One drafter on one suite."""

    target: Target
    drafter: Drafter
    suite: Suite
    config: PlanConfig
    name: str  # of the drafter
    bar: Callable[[int, str], Callable[[], object]] = no_bar  # makes a progress bar of so many ticks

    def __post_init__(self) -> None:
        """Raises BadInput where trees are to be shaped and there is a single prompt."""
        if not self.suite.calibration and any(map(is_shaped, self.trees)):
            self.suite = hold_out(self.suite)
        self.drafter.leave_out(self.suite.prompts)

    def plan(self) -> Plan:
        """Raises BadInput on settings that the drafter cannot draft, and on contexts beyond the target's."""
        config, machine = self.config, self.config.machine
        settings = self.settings()
        accepted = self.accept(settings)
        measured = [] if machine else self.time(accepted)
        times: StepTimes = StepTable(tuple(measured))
        if machine:
            times = times_on(machine, self.target, self.drafter, settings)
        cells = predict(accepted, self.workload, times, batch_sizes=config.batch_sizes, contexts=config.contexts)
        if machine is None:
            cells = self.check(cells)
        advice = recommend(cells)
        most, context = LARGEST_PROFILED if machine else max(config.batch_sizes), self.workload.context
        ranges = schedule(accepted, times, max_batch_size=most, context=context, measured=measured_lengths(cells))
        return Plan(
            drafter=self.name,
            suite=self.suite.name,
            num_prompts=len(self.suite.prompts),
            max_new_tokens=config.measure.max_new_tokens,
            temperature=config.measure.temperature,
            machine=machine.name if machine else None,
            acceptance=accepted,
            step_times=measured,
            cells=cells,
            check=errors(cells),
            recommendation=advice,
            load=self.load(accepted, times, advice[0].cell.setting, ranges, most),
            vllm_schedule=ranges,
            sglang_flags=for_sglang(cells, self.method),
            llamacpp_flags=for_llamacpp(cells, self.method),
        )

    @property
    def workload(self) -> Workload:
        return Workload([len(prompt) for prompt in self.suite.prompts], self.config.measure.max_new_tokens)

    @property
    def method(self) -> str:
        """What engines call the head's way of drafting; empty for other drafters."""
        return self.drafter.method if isinstance(self.drafter, DraftHead) else ""

    @property
    def trees(self) -> Sequence[str]:
        """By name: those asked for, or what can be shaped and drafted."""
        if self.config.trees is not None:
            return self.config.trees
        known = [name for name in DEFAULT_TREES if drafts_tree(self.drafter, name.partition(":")[0])]
        can_shape = self.suite.calibration or len(self.suite.prompts) > 1
        return [name for name in known if can_shape or not is_shaped(name)]

    def settings(self) -> list[DraftSetting]:
        """Chains and trees to consider."""
        new = self.config.measure.max_new_tokens
        trees = named_trees(self.trees, self.target, self.drafter, self.suite.calibration, max_new_tokens=new)
        return [*chains(self.drafter, self.config.lengths), *trees]

    def accept(self, settings: Sequence[DraftSetting]) -> list[Accepted]:
        """What the texts accept of each setting."""
        tick = self.bar(len(settings), f"what {self.suite.name} accepts of {self.name}")
        config = replace(self.config.measure, batch_size=max(self.config.batch_sizes))
        accepted = accepted_by(self.target, self.drafter, self.suite.prompts, settings, config, on_setting=tick)
        tick()
        return accepted

    def time(self, accepted: Sequence[Accepted]) -> list[StepTime]:
        """Step times of this machine. Chains between the measured ones are left to the table."""
        settings = [each.setting for each in accepted]
        timed = spread([setting for setting in settings if setting.tree is None])
        timed += [setting for setting in settings if setting.tree]
        sizes = set(self.config.batch_sizes)
        spans = [span for size in sizes for span in self.workload.spans(size, accepted[0].tokens)]
        first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
        room = self.target.max_positions - max(map(most_tokens, timed))
        contexts = {min(first, room), min(last, room), *self.config.contexts}
        tick = self.bar(NUM_PASSES * len(sizes) * len(contexts) * len(timed), f"timing rounds of {self.name}")
        times = measure_step_times(
            self.target,
            self.drafter,
            timed,
            batch_sizes=sorted(sizes),
            contexts=sorted(contexts),
            text=[token for prompt in self.suite.prompts for token in prompt],
            sampling=self.config.measure.sampling,
            steps=self.config.measure.steps,
            on_cell=tick,
        )
        tick()
        return times

    def check(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells, those that are chosen decoded in earnest, interleaved with the baseline."""
        decoded = [cell for cell in cells if cell.load == "prompts"]
        chosen = {"all": decoded, "advice": shortlist(cells), "none": []}[self.config.check]
        tick = self.bar(len(chosen), f"measuring {self.name}")
        checked = []
        for cell in cells:
            if cell in chosen:
                config = replace(self.config.measure, batch_size=cell.batch_size, setting=cell.setting)
                suite = self.suite.filled(cell.batch_size)
                result, _ = measure(self.target, self.drafter, suite, config, name=self.name)
                cell = replace(
                    cell,
                    measured_speedup=result.speedup,
                    measured_ci95=result.speedup_ci95,
                    num_timed=result.num_timed,
                )
                tick()
            checked.append(cell)
        tick()
        return checked

    def load(
        self, accepted: list[Accepted], times: StepTimes, fixed: DraftSetting, ranges: list[ScheduleRange], most: int
    ) -> list[LoadPoint]:
        """What users see of no drafts, of one setting and of the schedule: simulated; of the first two also run."""
        num_prompts, config = len(self.suite.prompts), self.config.measure
        simulated = simulated_servers(accepted, self.workload, times, fixed=fixed, schedule=ranges, max_batch_size=most)
        points = load_curve(simulated, num_prompts, served="simulated", num_requests=NUM_SIMULATED)
        if self.config.machine is not None or self.config.check == "none":
            return points
        live = {
            name: LiveServer(self.target, self.drafter, drafted, self.suite.prompts, config, max_batch_size=most)
            for name, drafted in (("none", None), (fixed.name, fixed))
        }
        tick = self.bar(1, f"requests at a rate, {self.name}")
        points += load_curve(live, num_prompts, served="run", num_requests=NUM_SERVED)
        tick()
        tick()
        return points


def is_shaped(tree: str) -> bool:
    """Whether texts shape a tree of that name, `static:16`."""
    return tree.partition(":")[0] in SHAPED_TREES


def spread(chains: Sequence[DraftSetting]) -> list[DraftSetting]:
    """Of chains the shortest, the longest, and one at every doubling between them."""
    ends = {chain.num_draft_tokens for chain in (*chains[:1], *chains[-1:])}
    return [chain for chain in chains if chain.num_draft_tokens in ends or chain.num_draft_tokens.bit_count() == 1]
