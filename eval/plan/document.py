"""What to plan (`PlanConfig`), and the plan as plan.json has it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...configs.errors import BadInput
from ..measurement.config import MeasureConfig
from ..measurement.step_times import StepTime
from .budget import Spent
from .engine_settings import ScheduleRange
from .machine_profile import MachineProfile
from .prediction import Accepted, Cell, CheckSummary, RecommendedCell
from .scheduling import ScheduledLoad

SCHEMA_VERSION = 2
CHECKS = ("advice", "all", "none")
DEFAULT_TREES = ("static:4", "static:8", "static:16", "dynamic:16")


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

    @property
    def num_shapes(self) -> int:
        """Shapes of rounds that are run, about."""
        trees = DEFAULT_TREES if self.trees is None else self.trees
        return len(self.batch_sizes) * (1 + len(self.lengths) + len(trees))


@dataclass(kw_only=True)
class Plan:
    """What `headstart plan` finds. docs/report_schema.md defines every key of plan.json."""

    drafter: str
    suite: str
    num_prompts: int
    max_new_tokens: int
    temperature: float
    machine: str | None  # the profile's name, of a plan for another machine
    engine: str = "headstart"  # whose rounds were timed; or llama-server
    acceptance: list[Accepted]
    step_times: list[StepTime]  # measured here; none for another machine
    cells: list[Cell]
    check: CheckSummary
    recommendation: list[RecommendedCell]
    vllm_schedule: list[ScheduleRange]
    schedules: list[ScheduledLoad]  # verifying by confidence, against the best fixed K
    sglang_flags: str | None
    llamacpp_flags: str | None
    budget: Spent
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
            "schedules": [load.to_json() for load in self.schedules],
            "recommendation": [advice.to_json() for advice in self.recommendation],
            "budget": asdict(self.budget),
            "step_time_model": asdict(self.step_time_model) if self.step_time_model else None,
        }
        return {key: value for key, value in document.items() if key != "step_time_model" or value}
