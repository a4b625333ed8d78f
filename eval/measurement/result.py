"""The typed entries of report.json's `results`; docs/reference/report_schema.md defines every key."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ...base.errors import BadInput
from ...base.typed import read_json
from ...targets.weights.served_adapter import AdapterInfo
from ..figures.bandwidth import Bandwidth
from ..figures.metrics import AcceptancePart, Calibration, Ends, Observation, ratio_and_interval
from ..figures.recorded_training import RecordedTraining
from ..figures.repetition import Repetition
from ..proof.lossless import LosslessReport
from ..proof.sampling_check import SamplingCheck
from ..suites.prompts import FailedPrompt


@dataclass(frozen=True)
class DomainPart:
    """Acceptance and speedup on the prompts of one domain."""

    num_prompts: int
    num_rounds: int
    acceptance_length: float | None
    acceptance_rate: list[float | None]
    speedup: float | None
    speedup_ci95: Ends


@dataclass(frozen=True)
class RenderedChats:
    """How chats became prompts: the system prompt that was put in front, the variables that all chats told the template
    alike, and the hash of the template, None where no prompt went through one."""

    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    template_hash: str | None = None

    @property
    def thinking(self) -> bool | None:
        """What the template was told as `enable_thinking`; None: nothing, or not the same by all chats."""
        told = self.variables.get("enable_thinking")
        return told if isinstance(told, bool) else None


@dataclass(frozen=True)
class LikeTraining:
    """How many of the prompts are as those of the head's training, as shares; None: not known. learnt: are prompts of
    its rows. asked: end with the tokens with which all its prompts ended."""

    learnt: float | None = None
    asked: float | None = None


@dataclass(frozen=True)
class VocabularyCoverage:
    """A head's cut vocabulary. coverage: the share of the measured texts' tokens that it can draft."""

    size: int
    coverage: float | None


@dataclass(frozen=True)
class Timing:
    """Mean milliseconds of a round's parts and of a baseline step, and the speedup that they explain; the median
    milliseconds to the first token, with drafts and without, and the speedup of whole answers, their prefill included.
    """

    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None
    baseline_ms: float | None = None
    formula_speedup: float | None = None
    ttft_ms: float | None = None
    baseline_ttft_ms: float | None = None
    end_to_end_speedup: float | None = None


@dataclass(frozen=True)
class StepMedians:
    """Median milliseconds of a round, of its verification, of a baseline step, and of that step's target
    forward."""

    LEAST_VERIFY: ClassVar[float] = 0.9  # least plausible time of verifying several tokens, in baseline steps

    round_ms: float | None = None
    verify_ms: float | None = None
    baseline_ms: float | None = None
    baseline_verify_ms: float | None = None

    @property
    def is_impossible(self) -> bool:
        """Whether verifying several tokens was measured to be faster than reading one."""
        if self.verify_ms is None or self.baseline_verify_ms is None:
            return False
        return self.verify_ms < self.LEAST_VERIFY * self.baseline_verify_ms


@dataclass(frozen=True)
class Disturbance:
    """Numbers of timed and of disturbed passes with the reasons, how often a batch was measured again, and the mean
    share of the processor that other processes used; None: not known."""

    num_passes: int = 0
    num_disturbed: int = 0
    num_again: int = 0
    reasons: list[str] = field(default_factory=list)
    others_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One drafter on one suite with one setting. Figures are None if there was nothing to measure."""

    drafter: str
    suite: str
    adapter: AdapterInfo | None = None  # of the target, merged into it; None: the target itself
    suite_digest: str
    rendering: RenderedChats = field(default_factory=RenderedChats)
    tree: str
    num_drafted: int
    draft_vocabulary: VocabularyCoverage | None = None
    temperature: float
    top_k: int
    top_p: float
    accept: str
    steps: str
    batch_size: int
    num_draft_tokens: int
    verify_cost: float | None = None
    num_prompts: int
    num_chats: int | None = None  # rows that the prompts are turns of; None: not known
    num_timed: int | None = None  # entries that the speedup's interval is over: prompts, or batches; None: not known
    failed: list[FailedPrompt]
    max_new_tokens: int
    num_tokens: int = 0
    num_rounds: int = 0
    acceptance_length: float | None = None
    acceptance_rate: list[float | None] = field(default_factory=list)
    calibration: Calibration | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_ci95: Ends = (None, None)
    observations: list[Observation] = field(default_factory=list)  # what the intervals are over; []: not known
    repetition: Repetition = field(default_factory=Repetition)
    baseline_bandwidth: Bandwidth = field(default_factory=Bandwidth)
    timing: Timing = field(default_factory=Timing)
    step_medians: StepMedians = field(default_factory=StepMedians)
    disturbance: Disturbance = field(default_factory=Disturbance)
    by_segment: dict[str, AcceptancePart] = field(default_factory=dict)
    by_context: dict[str, AcceptancePart] = field(default_factory=dict)
    by_domain: dict[str, DomainPart] = field(default_factory=dict)
    by_turn: dict[str, DomainPart] = field(default_factory=dict)
    teacher_forced_acceptance_length: float | None = None
    lossless: LosslessReport = field(default_factory=LosslessReport)
    sampling_check: SamplingCheck | None = None
    trained: RecordedTraining | None = None
    like_training: LikeTraining = field(default_factory=LikeTraining)

    @property
    def spread(self) -> tuple[float | None, float | None, float | None]:
        """The 10th, 50th and 90th percentile of the observations' speedups, interpolated linearly; None: not known."""
        ratios = [seen.baseline_seconds / seen.seconds for seen in self.observations]
        low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist() if ratios else [None] * 3
        return low, middle, high

    @property
    def num_committed(self) -> int:
        """Tokens committed by the rounds: accepted drafts and bonus tokens."""
        return round((self.acceptance_length or 0.0) * self.num_rounds)

    @property
    def acceptance_length_ci95(self) -> Ends:
        """The 95 % interval of the acceptance length over the observations, by the method of `speedup_ci95`."""
        if not self.observations:
            return None, None
        sums = [seen.num_committed for seen in self.observations], [seen.num_rounds for seen in self.observations]
        return ratio_and_interval(*sums)[1]

    @property
    def has_turns(self) -> bool:
        """Whether prompts are turns of the same chats."""
        return (self.num_chats or self.num_prompts) < self.num_prompts

    def with_share(self, copy_gigabytes_per_second: float) -> "Result":
        """The result with the share of the machine's copy bandwidth filled in."""
        reached = self.baseline_bandwidth.gigabytes_per_second
        share = None if reached is None else round(reached / copy_gigabytes_per_second, 4)
        return replace(self, baseline_bandwidth=Bandwidth(reached, share))

    def to_json(self) -> dict[str, Any]:
        """The entry of report.json, as the file gives it back: its lists are lists."""
        raw = {key: value for key, value in self.trained.raw.items() if key != "prompts"} if self.trained else None
        return json.loads(json.dumps(asdict(self) | {"trained": raw}))

    @classmethod
    def from_json(cls, entry: dict[str, Any], *, where: str = "result") -> "Result":
        """The result of an entry. A key with a default may be missing, as in reports of older versions; one that it
        does not know is left out. Raises BadInput naming a key that is missing or of the wrong type."""
        if not isinstance(entry, dict):
            raise BadInput(f"{where}: expected an object, got {entry!r:.60}")
        trained = entry.get("trained")
        raw = {**trained, "raw": trained} if isinstance(trained, dict) else trained
        return read_json(cls, {**entry, "trained": raw}, where=where)
