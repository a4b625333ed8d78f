"""auto.json: the findings and decisions of a run, with the figures behind them. A killed run resumes from it."""

from dataclasses import dataclass, field

from ..unattended.session import StoredJournal
from ..unattended.steps import StepRecord
from .prediction import RoundCost

SCHEMA_VERSION = 1
NAME = "auto.json"


@dataclass(frozen=True)
class Split:
    """How many prompts are held out and asked. duplicates: rows that repeat another's first question, left out."""

    held_out: int
    asked: int
    duplicates: int
    context: int  # tokens: the median prompt and half of the longest answer
    prompt_tokens: int  # of the longest prompt


@dataclass(frozen=True)
class Measured:
    """A candidate on this machine. costs: of rounds that draft with it. bound: the speedup, were a generous share of
    its drafts accepted. out: why it is not trained; empty where it may be."""

    name: str
    parameters: int = 0
    costs: list[RoundCost] = field(default_factory=list)
    bound: float = 0.0
    bound_num_draft_tokens: int = 0
    step_seconds: float = 0.0  # an optimizer step
    out: str = ""


@dataclass(frozen=True)
class Machine:
    """What was measured before anything was trained. start_seconds: what a command takes before it does anything."""

    baseline_ms: float  # a step of the target without drafts, at that batch size
    batch_size: int
    dtype: str
    device: str
    start_seconds: float
    candidates: list[Measured]

    @property
    def able(self) -> list[Measured]:
        """The candidates that may pay."""
        return [each for each in self.candidates if not each.out]


@dataclass(frozen=True)
class Answers:
    """What there is to learn from. given: rows that came with answers. complete: all prompts were answered in time."""

    written: int
    given: int
    validation: int  # rows kept for scores
    tokens: int  # of the answers
    truncated: int
    looping: int
    complete: bool
    draft_vocab_size: int | None  # for candidates that draft a part of the vocabulary
    coverage: float | None  # of the answers, by it
    max_length: int  # tokens of the longest row, at most
    warnings: list[str]


@dataclass(frozen=True)
class Score:
    """A candidate after a visit: decoded acceptance, and what that predicts here."""

    name: str
    steps: int  # optimizer steps done in all
    seconds: float  # of the visit
    acceptance_length: float
    acceptance_rate: list[float | None]
    num_draft_tokens: int
    predicted_speedup: float
    problem: str = ""  # why there is no score


@dataclass
class Rung:
    """One round of halving. plan: optimizer steps up to which each candidate learns."""

    plan: dict[str, int]
    scores: list[Score] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass
class Chosen:
    """The candidate that learns for the rest of the time. max_steps: of its own run, which starts from its best."""

    name: str
    max_steps: int
    score: Score | None = None
    head: str = ""  # its folder


@dataclass
class Evaluation:
    """What is measured on held-out prompts. report: has the figures; empty until they are there."""

    num_prompts: int
    num_draft_tokens: int
    report: str = ""


@dataclass
class SizePlan:
    """The head's K or tree by batch size. plan: has it; empty until it is there. problem: why there is none."""

    seconds: float
    plan: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do. commands: that serve it, or decode with it. drafter: as `headstart eval --drafter` takes it."""

    deploy: bool
    headline: str
    reasons: list[str]
    cautions: list[str]
    drafter: str = ""
    commands: list[str] = field(default_factory=list)
    speedup: float | None = None
    speedup_ci95: list[float | None] = field(default_factory=lambda: [None, None])


@dataclass
class Journal(StoredJournal):
    """Everything, in the order in which it comes about; what is not known yet is null or empty."""

    file_name = NAME
    schema_version: int = SCHEMA_VERSION
    split: Split | None = None
    machine: Machine | None = None
    answers_until: float | None = None  # seconds of the budget
    answers: Answers | None = None
    learning_until: float | None = None
    rung_seconds: float = 0.0  # of each rung
    rungs: list[Rung] = field(default_factory=list)
    chosen: Chosen | None = None
    evaluation: Evaluation | None = None
    sizes: SizePlan | None = None
    exported: str = ""  # folder
    decision: Decision | None = None
    seconds: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
