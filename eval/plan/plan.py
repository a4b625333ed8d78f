"""What to plan (`PlanConfig`), and the plan as plan.json has it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..measurement.step_times import StepTime
from ..proof.config import MeasureConfig, check_length
from .engine_settings import ScheduleRange
from .prediction import Accepted, Cell, CheckSummary, RecommendedCell

SCHEMA_VERSION = 3
DEFAULT_TREES = ("dynamic:8", "dynamic:16")


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
