"""The plan of a deployment: what to draft at which batch size, predicted, checked, and as serving engines take it.

The texts are decoded once per setting for what is accepted, and a few rounds are timed per setting, batch size and
context; together they give every cell's speedup. Some cells, or all, are then measured by decoding them in earnest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...configs.errors import BadInput
from ...heads.drafter import Drafter
from ...heads.target import Target
from ..measurement.config import DraftSetting, chains
from ..measurement.measure import MeasureConfig, measure
from ..measurement.step_times import NUM_PASSES, StepTable, StepTime, measure_step_times, most_tokens
from ..sampling import Sampling
from ..suites.prompts import Suite
from .engine_settings import for_sglang, measured_lengths, schedule
from .load import NUM_SERVED, NUM_SIMULATED, load_curve, simulated_servers
from .machine_profile import Machine, times_on
from .prediction import (
    Accepted,
    StepTimes,
    Workload,
    accepted_by,
    errors,
    named_trees,
    predict,
    recommend,
    shortlist,
    with_setting,
)
from .server import LiveServer

SCHEMA_VERSION = 1
CHECKS = ("advice", "all", "none")
DEFAULT_TREES = ("static:4", "static:8", "static:16", "dynamic:16")
FURTHEST = 256  # batch size up to which a profile is read; a table measured here only as far as it was measured


def no_bar(total: int, what: str) -> Callable[[], object]:
    """A progress bar that shows nothing: ticks, and one more tick to close it."""
    return lambda: None


@dataclass(kw_only=True)
class PlanConfig:
    """What to consider. measure: how texts are decoded. trees: NAME:NODES; None: DEFAULT_TREES, where the drafter
    drafts trees. contexts: tokens, besides the prompts' own.

    check: which cells to measure besides predicting them: `advice`, the shortlist of each batch size, to choose from
    it; `all`; `none`. machine: whose step times to plan with, and nothing is measured; None: those of this machine.
    """

    measure: MeasureConfig
    lengths: Sequence[int] = tuple(range(1, 9))
    trees: Sequence[str] | None = None
    batch_sizes: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = ()
    check: str = "advice"
    machine: Machine | None = None

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise BadInput(f"check {self.check}: expected one of {', '.join(CHECKS)}")


@dataclass
class Planner:
    """One drafter on one suite. bar: makes a progress bar of so many ticks, see `no_bar`."""

    target: Target
    drafter: Drafter
    suite: Suite
    config: PlanConfig
    name: str
    bar: Callable[[int, str], Callable[[], object]] = no_bar

    def plan(self) -> tuple[dict[str, Any], list[StepTime]]:
        """The figures of plan.json, as docs/report_schema.md describes them, and the step times measured for them.

        Raises: BadInput on settings that the drafter cannot draft, and on contexts beyond the target's.
        """
        config, machine = self.config, self.config.machine
        settings = self.settings()
        accepted = self.accept(settings)
        measured = [] if machine else self.time(accepted)
        times: StepTimes = StepTable(tuple(measured))
        if machine:
            times = times_on(machine, self.target, self.drafter, settings)
        cells = predict(accepted, self.workload, times, batch_sizes=config.batch_sizes, contexts=config.contexts)
        if machine is None:
            self.check(accepted, cells)
        advice = recommend(cells)
        furthest = FURTHEST if machine else max(config.batch_sizes)
        ranges = schedule(
            accepted,
            times,
            max_batch_size=furthest,
            context=self.workload.context,
            measured=measured_lengths(cells),
        )
        document = {
            "schema_version": SCHEMA_VERSION,
            "drafter": self.name,
            "suite": self.suite.name,
            "num_prompts": len(self.suite.prompts),
            "max_new_tokens": config.measure.max_new_tokens,
            "temperature": config.measure.temperature,
            "machine": machine.name if machine else None,
            "acceptance": [one.as_json() for one in accepted],
            "step_times": [one.as_json() for one in measured],
            "cells": cells,
            "check": errors(cells),
            "recommendation": advice,
            "load": self.load(accepted, times, advice[0]["setting"], ranges, furthest),
            "vllm_schedule": ranges,
            "sglang_flags": for_sglang(accepted, cells, getattr(getattr(self.drafter, "config", None), "type", "")),
        }
        return document, measured

    @property
    def workload(self) -> Workload:
        return Workload([len(prompt) for prompt in self.suite.prompts], self.config.measure.max_new_tokens)

    @property
    def sampling(self) -> Sampling:
        how = self.config.measure
        return Sampling(temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)

    def settings(self) -> list[DraftSetting]:
        """Chains and trees to consider."""
        names = self.config.trees
        if names is None:
            names = DEFAULT_TREES if self.drafter.drafts_trees else ()
        new = self.config.measure.max_new_tokens
        shaped = named_trees(names, self.target, self.drafter, self.suite.prompts, max_new_tokens=new)
        return [*chains(self.drafter, self.config.lengths), *shaped]

    def accept(self, settings: Sequence[DraftSetting]) -> list[Accepted]:
        """What the texts accept of each setting."""
        tick = self.bar(len(settings), f"what {self.suite.name} accepts of {self.name}")
        config = replace(self.config.measure, batch_size=max(self.config.batch_sizes))
        found = accepted_by(self.target, self.drafter, self.suite.prompts, settings, config, on_setting=tick)
        tick()
        return found

    def time(self, accepted: Sequence[Accepted]) -> list[StepTime]:
        """Step times of this machine. Chains between the measured ones are left to the table."""
        settings = [one.setting for one in accepted]
        timed = [*spread([one for one in settings if one.tree is None]), *(one for one in settings if one.tree)]
        sizes = {min(size, len(self.suite.prompts)) for size in self.config.batch_sizes}
        sizes |= {len(self.suite.prompts) % size for size in sizes} - {0}  # a last batch that is not full
        spans = [span for size in sizes for span in self.workload.spans(size, accepted[0].tokens)]
        first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
        room = self.target.max_positions - max(map(most_tokens, timed))
        contexts = {min(first, room), min(last, room)}
        contexts |= set(self.config.contexts)
        how = self.config.measure
        tick = self.bar(NUM_PASSES * len(sizes) * len(contexts) * len(timed), f"timing rounds of {self.name}")
        found = measure_step_times(
            self.target,
            self.drafter,
            timed,
            batch_sizes=sorted(sizes),
            contexts=sorted(contexts),
            text=[token for prompt in self.suite.prompts for token in prompt],
            sampling=self.sampling,
            steps=how.steps,
            on_cell=tick,
        )
        tick()
        return found

    def check(self, accepted: Sequence[Accepted], cells: Sequence[dict[str, Any]]) -> None:
        """Decode cells in earnest, interleaved with the baseline, and enter what was measured."""
        settings = {one.setting.name: one.setting for one in accepted}
        every = [cell for cell in cells if cell["load"] == "prompts"]
        chosen = {"all": every, "advice": shortlist(cells), "none": []}[self.config.check]
        tick = self.bar(len(chosen), f"measuring {self.name}")
        for cell in chosen:
            how = with_setting(replace(self.config.measure, batch_size=cell["batch_size"]), settings[cell["setting"]])
            entry, _ = measure(self.target, self.drafter, self.suite, how, name=self.name)
            cell |= {"measured_speedup": entry["speedup"], "measured_ci95": entry["speedup_ci95"]}
            tick()
        tick()

    def load(
        self, accepted: Sequence[Accepted], times: StepTimes, fixed: str, ranges: Sequence[Sequence[int]], most: int
    ) -> list[dict[str, Any]]:
        """What users see of no drafts, of one setting and of the schedule: simulated; of the first two also run."""
        simulated = simulated_servers(accepted, self.workload, times, fixed=fixed, schedule=ranges, max_batch_size=most)
        num_prompts, how = len(self.suite.prompts), self.config.measure
        found = load_curve(simulated, num_prompts, served="simulated", num_requests=NUM_SIMULATED)
        if self.config.machine is not None or self.config.check == "none":
            return found
        setting = next(one.setting for one in accepted if one.setting.name == fixed)
        live = {
            name: LiveServer(
                self.target,
                self.drafter,
                drafted,
                self.suite.prompts,
                max_new_tokens=how.max_new_tokens,
                max_batch_size=most,
                sampling=self.sampling,
                steps=how.steps,
            )
            for name, drafted in (("none", None), (fixed, setting))
        }
        tick = self.bar(1, f"requests at a rate, {self.name}")
        found += load_curve(live, num_prompts, served="run", num_requests=NUM_SERVED)
        tick()
        tick()
        return found


def spread(lengths: Sequence[DraftSetting]) -> list[DraftSetting]:
    """Of chains the shortest, the longest, and one at every doubling between them."""
    ends = {one.num_draft_tokens for one in (*lengths[:1], *lengths[-1:])}
    return [one for one in lengths if one.num_draft_tokens in ends or one.num_draft_tokens.bit_count() == 1]
