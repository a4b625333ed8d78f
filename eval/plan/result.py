"""What `headstart plan` finds, and plan.json of it: docs/report_schema.md defines every key."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..measurement.step_times import StepTime
from .machine_profile import MachineProfile

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SettingAcceptance:
    """What the prompts' texts accept of a setting."""

    setting: str
    acceptance_length: float
    acceptance_rate: list[float | None]
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A setting at a batch size and context, and its speedup, predicted and perhaps measured."""

    setting: str
    tree: str
    num_draft_tokens: int
    num_drafted: int
    batch_size: int
    context: int
    load: str  # prompts: the texts, in batches whose rows are not replaced when they end; steady: all rows busy
    predicted_speedup: float
    measured_speedup: float | None = None
    measured_ci95: list[float | None] = field(default_factory=lambda: [None, None])

    @property
    def speedup(self) -> float:
        """The measured one where there is one."""
        return self.measured_speedup or self.predicted_speedup


@dataclass(frozen=True)
class Recommendation:
    """The cell to serve at its batch size, context and load; is_off: not even this one is faster than no drafts."""

    cell: Cell
    is_off: bool

    def to_json(self) -> dict[str, Any]:
        told = ("setting", "tree", "num_draft_tokens", "num_drafted", "predicted_speedup", "measured_speedup")
        cell = asdict(self.cell)
        condition = {key: cell[key] for key in ("batch_size", "context", "load")}
        return {**condition, "off": self.is_off, **{key: cell[key] for key in told}}


@dataclass(frozen=True)
class CheckSummary:
    """How far predictions lie from what was measured, relative to it."""

    num_cells: int
    median_error: float | None = None
    max_error: float | None = None


class ScheduleRange(NamedTuple):
    """K = num_draft_tokens from batch size `first` to `last`, both included; 0 is off."""

    first: int
    last: int
    num_draft_tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadPoint:
    """What users see when requests arrive at a rate. drafts: `none`, a setting or `schedule`."""

    served: str  # run or simulated
    requests_per_second: float
    share_of_capacity: float  # of what a full batch serves without drafts
    drafts: str
    tokens_per_second: float
    mean_batch_size: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    time_per_output_token_ms_p50: float
    time_per_output_token_ms_p90: float
    latency_ms_p50: float
    latency_ms_p90: float


@dataclass(kw_only=True)
class Plan:
    """The whole plan. machine: the profile's name, where it was not made for this machine."""

    drafter: str
    suite: str
    num_prompts: int
    max_new_tokens: int
    temperature: float
    machine: str | None
    acceptance: list[SettingAcceptance]
    step_times: list[StepTime]  # measured here; none for another machine
    cells: list[Cell]
    check: CheckSummary
    recommendation: list[Recommendation]
    load: list[LoadPoint]
    vllm_schedule: list[ScheduleRange]
    sglang_flags: str | None
    step_time_model: MachineProfile | None = None  # of this machine, fitted to step_times

    def to_json(self) -> dict[str, Any]:
        """plan.json but for what it has of environment and target."""
        document = {
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "step_times": [time.as_json() for time in self.step_times],
            "recommendation": [advice.to_json() for advice in self.recommendation],
        }
        if self.step_time_model is None:
            del document["step_time_model"]
        return document
