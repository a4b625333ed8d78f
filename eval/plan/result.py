"""The whole of a plan, and plan.json of it: docs/report_schema.md defines every key."""

from dataclasses import asdict, dataclass
from typing import Any

from ..measurement.config import DraftSetting
from ..measurement.step_times import StepTime
from .engine_settings import ScheduleRange
from .load import LoadPoint
from .machine_profile import MachineProfile
from .prediction import Accepted, Cell, CheckSummary, Recommendation

SCHEMA_VERSION = 1


@dataclass(kw_only=True)
class Plan:
    """What `headstart plan` finds."""

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
    step_time_model: MachineProfile | None = None  # of this machine, fitted to step_times

    def to_json(self) -> dict[str, Any]:
        """plan.json, but for environment and target."""
        document = {
            "schema_version": SCHEMA_VERSION,
            **vars(self),
            "acceptance": [acceptance_json(accepted) for accepted in self.acceptance],
            "step_times": [time.as_json() for time in self.step_times],
            "cells": [cell_json(cell) for cell in self.cells],
            "check": asdict(self.check),
            "recommendation": [recommendation_json(advice) for advice in self.recommendation],
            "load": [asdict(point) for point in self.load],
        }
        del document["step_time_model"]
        return document | ({"step_time_model": asdict(self.step_time_model)} if self.step_time_model else {})


def acceptance_json(accepted: Accepted) -> dict[str, Any]:
    return {
        "setting": accepted.setting.name,
        "acceptance_length": round(accepted.length, 4),
        "acceptance_rate": [None if rate is None else round(rate, 4) for rate in accepted.counted.rate],
        "num_rounds": accepted.counted.num_rounds,
    }


def cell_json(cell: Cell) -> dict[str, Any]:
    return {**setting_json(cell.setting), **{key: value for key, value in vars(cell).items() if key != "setting"}}


def recommendation_json(advice: Recommendation) -> dict[str, Any]:
    cell = advice.cell
    condition = {"batch_size": cell.batch_size, "context": cell.context, "load": cell.load, "off": advice.is_off}
    speedups = {"predicted_speedup": cell.predicted_speedup, "measured_speedup": cell.measured_speedup}
    return condition | setting_json(cell.setting) | speedups


def setting_json(setting: DraftSetting) -> dict[str, Any]:
    return {
        "setting": setting.name,
        "tree": setting.tree_name,
        "num_draft_tokens": setting.num_draft_tokens,
        "num_drafted": setting.num_drafted,
    }
