"""The typed entries of report.json's `results`; docs/report_schema.md defines every key."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ...configs.errors import BadInput
from ...configs.typed import read_json
from ...heads.targets.served_adapter import AdapterInfo
from ..suites.prompts import FailedPrompt
from .lossless import LosslessReport
from .metrics import AcceptancePart, Calibration, Conventions, Ends
from .repetition import Repetition, WithoutLoops
from .sampling_check import SamplingCheck

ENGINE = "headstart"  # the `engine` of results of our own decoding
LLAMA_CPP = "llama.cpp"  # of llama-server's decoding without drafts, compared with ours
SERVER = "llama-server"  # of results of a head in llama-server, compared with llama-server without it


@dataclass(frozen=True)
class Observation:
    """One prompt, or one batch, as the intervals count them: rounds, committed tokens, and the seconds of both sides
    for equal tokens, prefills left out. prompts: their numbers in the suite."""

    prompts: list[int]
    num_rounds: int
    num_committed: int
    baseline_seconds: float
    seconds: float


@dataclass(frozen=True)
class DomainPart:
    """Acceptance and speedup on the prompts of one domain, or of one turn."""

    num_prompts: int
    num_rounds: int
    acceptance_length: float | None
    acceptance_rate: list[float | None]
    speedup: float | None
    speedup_ci95: Ends


@dataclass(frozen=True)
class BeyondTraining:
    """Acceptance in contexts longer than any training row, and `within` the training length."""

    num_rounds: int
    acceptance_length: float | None
    acceptance_length_within: float | None


@dataclass(frozen=True)
class FixedTreeShape:
    """parents: for each node the index of the node before it, -1 for the last committed token."""

    parents: list[int]


@dataclass(frozen=True)
class TreeLimits:
    """The limits of a dynamic tree, whose shape changes in every round."""

    num_nodes: int
    depth: int
    top_k: int


@dataclass(frozen=True)
class VocabularyCoverage:
    """A head's cut vocabulary. coverage: the share of the measured texts' tokens that it can draft."""

    size: int
    coverage: float | None


@dataclass(frozen=True)
class Bandwidth:
    """The baseline's read bandwidth in GB/s (1e9 bytes per second), and as a share of the machine's copy bandwidth."""

    gigabytes_per_second: float | None = None
    share_of_copy: float | None = None


@dataclass(frozen=True)
class Timing:
    """Mean milliseconds of a round's parts and of a baseline step, and the speedup that they explain."""

    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None
    baseline_ms: float | None = None
    formula_speedup: float | None = None


@dataclass(frozen=True)
class StepMedians:
    """Median milliseconds of a round, of its verification, of a baseline step, and of that step's target forward; and
    the speedup that follows from these and the acceptance length."""

    LEAST_VERIFY: ClassVar[float] = 0.9  # least plausible time of verifying several tokens, in baseline steps

    round_ms: float | None = None
    verify_ms: float | None = None
    baseline_ms: float | None = None
    baseline_verify_ms: float | None = None
    speedup: float | None = None
    speedup_ci95: Ends = (None, None)

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


@dataclass(frozen=True)
class PromptEnding:
    """The tokens with which all prompts in training ended."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class AnswerSettings:
    """How the target sampled the answers that the head was trained on."""

    temperature: float
    top_p: float
    top_k: int
    thinking: bool | None


@dataclass(frozen=True)
class RecordedValidation(AcceptancePart):
    """The validation at the end of a head's training, teacher-forced. decoded: by decoding."""

    decoded: AcceptancePart | None = None


@dataclass(frozen=True)
class RecordedTraining:
    """A head's record of its own training (docs/run_folder.md); None: not known. raw: the record as it was read."""

    raw: dict[str, Any]
    max_length: int | None = None
    num_depths: int | None = None
    template_hash: str | None = None
    prompt_ending: PromptEnding | None = None
    target_dtype: str | None = None
    target_quantization: str | None = None
    answers: list[AnswerSettings] | None = None
    validation: RecordedValidation | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any], *, where: str = "training") -> "RecordedTraining":
        """Raises BadInput naming a key of the wrong type."""
        return read_json(cls, {**record, "raw": record}, where=where)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One drafter on one suite with one setting. Figures are None if there was nothing to measure."""

    engine: str
    drafter: str
    suite: str
    adapter: AdapterInfo | None = None  # of the target, merged into it; None: the target itself
    suite_version: int | None
    suite_digest: str
    system: str | None
    thinking: bool | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # that all chats share
    template_hash: str | None
    tree: str
    tree_shape: FixedTreeShape | TreeLimits | None = None
    num_drafted: int
    draft_vocabulary: VocabularyCoverage | None = None
    temperature: float
    top_k: int
    top_p: float
    accept: str
    typical_epsilon: float | None = None  # of `accept` typical, where it is not the default
    typical_delta: float | None = None
    steps: str
    batch_size: int
    num_draft_tokens: int
    verify_cost: float | None = None
    num_prompts: int
    num_chats: int | None = None  # rows that the prompts are turns of; None: not known
    num_timed: int | None = None  # entries that the speedup's interval is over: prompts, or batches; None: not known
    failed: list[FailedPrompt]
    max_new_tokens: int
    num_repeats: int
    num_tokens: int = 0
    num_rounds: int = 0
    num_committed: int = 0
    acceptance_length: float | None = None
    acceptance_length_ci95: Ends = (None, None)
    acceptance_rate: list[float | None] = field(default_factory=list)
    drafts_verified: float | None = None
    calibration: Calibration | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_ci95: Ends = (None, None)
    speedup_p10: float | None = None
    speedup_median: float | None = None
    speedup_p90: float | None = None
    observations: list[Observation] = field(default_factory=list)  # what the intervals are over; []: not known
    repetition: Repetition = field(default_factory=Repetition)
    without_loops: WithoutLoops | None = None  # None: no text loops
    conventions: Conventions = field(default_factory=Conventions)
    end_to_end_speedup: float | None = None
    ttft_ms: float | None = None
    baseline_ttft_ms: float | None = None
    time_per_output_token_ms: float | None = None
    baseline_time_per_output_token_ms: float | None = None
    baseline_bandwidth: Bandwidth = field(default_factory=Bandwidth)
    timing: Timing = field(default_factory=Timing)
    step_medians: StepMedians = field(default_factory=StepMedians)
    disturbance: Disturbance = field(default_factory=Disturbance)
    by_segment: dict[str, AcceptancePart] = field(default_factory=dict)
    by_context: dict[str, AcceptancePart] = field(default_factory=dict)
    by_domain: dict[str, DomainPart] = field(default_factory=dict)
    by_turn: dict[str, DomainPart] = field(default_factory=dict)  # empty: no chat has several
    teacher_forced_acceptance_length: float | None = None
    lossless: LosslessReport = field(default_factory=LosslessReport)
    sampling_check: SamplingCheck | None = None
    trained: RecordedTraining | None = None
    beyond_training: BeyondTraining | None = None
    asked_as_trained: float | None = None
    # OF_OTHER_ENGINES alone
    ours_tokens_per_second: float | None = None
    ours_over_theirs: float | None = None
    ours_over_theirs_ci95: Ends = (None, None)

    @property
    def is_beside(self) -> bool:
        """Whether it is of another engine compared with ours, rather than with itself without drafts."""
        return self.engine not in (ENGINE, SERVER)

    def to_json(self) -> dict[str, Any]:
        """The entry of report.json, as the file gives it back: its lists are lists."""
        entry = json.loads(json.dumps(asdict(self) | {"trained": self.trained.raw if self.trained else None}))
        left_out = {key for key in IF_CHANGED if entry[key] is None}
        left_out |= set() if self.is_beside else OF_OTHER_ENGINES
        return {key: value for key, value in entry.items() if key not in left_out}

    @classmethod
    def from_json(cls, entry: dict[str, Any], *, where: str = "result") -> "Result":
        """The result of an entry. A key with a default may be missing, as in reports of older versions; one that it
        does not know is left out. Raises BadInput naming a key that is missing or of the wrong type."""
        if not isinstance(entry, dict):
            raise BadInput(f"{where}: expected an object, got {entry!r:.60}")
        trained = entry.get("trained")
        raw = {**trained, "raw": trained} if isinstance(trained, dict) else trained
        return read_json(cls, {**entry, "trained": raw}, where=where)


IF_CHANGED = {"typical_epsilon", "typical_delta"}  # keys that the report has where they are not None
OF_OTHER_ENGINES = {"ours_tokens_per_second", "ours_over_theirs", "ours_over_theirs_ci95"}
