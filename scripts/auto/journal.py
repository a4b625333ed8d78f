"""The schema of auto.json: what a run of `headstart auto` found and decided, from which a killed run resumes.

`Journal` is the document; its fields are in the order in which the stages fill them in. A field whose stage has not run
is null, empty or 0.
"""

from dataclasses import dataclass, field

from ..unattended.session import StoredJournal
from ..unattended.steps import StepRecord
from .prediction import RoundCost

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Split:
    """How the prompts were divided."""

    held_out: int  # prompts kept for the evaluation
    asked: int  # prompts for the target to answer
    duplicates: int  # rows left out because another row has the same first question
    context: int  # tokens before a typical round: the median prompt and half of `max_new_tokens`
    prompt_tokens: int  # length of the longest held-out prompt, in tokens


@dataclass(frozen=True)
class Measured:
    """What was measured of a candidate before training. An excluded candidate may have `name` and `out` only."""

    name: str
    parameters: int = 0  # trained parameters
    costs: list[RoundCost] = field(default_factory=list)  # of rounds that draft 1 to K tokens
    bound: float = 0.0  # speedup if four in five drafts were accepted at every position
    bound_num_draft_tokens: int = 0  # the K of that speedup
    step_seconds: float = 0.0  # of an optimizer step
    token_seconds: float = 0.0  # of the target's forward in training, per token
    out: str = ""  # why the candidate is not trained; empty: it may be


@dataclass(frozen=True)
class Machine:
    """What was measured of the target on this machine before training."""

    baseline_ms: float  # milliseconds of a step without drafts, at `batch_size`
    batch_size: int  # rows served at a time: as given, or derived from the load
    dtype: str
    device: str
    start_seconds: float  # time that a command needs to start
    start_tokens: int  # supervised tokens that a fresh head is fitted on before its first step
    candidates: list[Measured]

    @property
    def able(self) -> list[Measured]:
        """The candidates that were not excluded."""
        return [candidate for candidate in self.candidates if not candidate.out]


@dataclass(frozen=True)
class Answers:
    """The training data."""

    written: int  # rows answered by the target in this run, greedily
    sampled: int  # further answers to the same prompts, sampled
    given: int  # rows of --chats that are learnt from
    validation: int  # rows of `written` that score candidates and are not trained on
    tokens: int  # in all answers of this run
    row_tokens: int  # in their rows, prompts included
    truncated: int  # of `written`, answers cut at the token limit
    looping: int  # of `written`, answers in which more than half of the 4-grams repeat earlier ones
    complete: bool  # whether all prompts were answered in time
    draft_vocab_size: int | None  # for candidates with a cut vocabulary; null: no cut is worthwhile
    coverage: float | None  # share of the answers' tokens in that draft vocabulary
    max_length: int  # of a training row, in tokens
    warnings: list[str]


@dataclass(frozen=True)
class Score:
    """A candidate's validation after training in a rung: acceptance by decoding, and the predicted speedup."""

    name: str
    steps: int  # optimizer steps since the start of training, over all rungs
    seconds: float  # duration of the training command in this rung
    acceptance_length: float
    acceptance_rate: list[float | None]  # by draft position; null: never reached
    num_draft_tokens: int  # the K with the highest predicted speedup
    predicted_speedup: float
    problem: str = ""  # why there is no score; the figures are then meaningless


@dataclass
class Rung:
    """One rung of successive halving."""

    plan: dict[str, int]  # by candidate, the step count up to which it is trained, if its time allows
    scores: list[Score] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # candidates of the next rung, best first


@dataclass
class Chosen:
    """The winner of successive halving. It is trained for the rest of the time, from its best checkpoint on."""

    name: str
    max_steps: int  # optimizer steps of the final training
    score: Score | None = None
    head: str = ""  # folder of the head; empty until it is trained


@dataclass
class Evaluation:
    """The measurement on held-out prompts."""

    num_prompts: int
    num_draft_tokens: int  # K of the head
    report: str = ""  # path of report.json; empty until it is written


@dataclass
class SizePlan:
    """The plan by batch size: the best K or tree of the chosen head for each batch size."""

    seconds: float  # kept for the plan, without the start of its command; it gets what is left of the budget
    plan: str = ""  # path of plan.json; empty until it is written
    problem: str = ""  # why there is no plan


@dataclass(frozen=True)
class Decision:
    """The result of the run."""

    deploy: bool
    headline: str
    reasons: list[str]
    cautions: list[str]
    drafter: str = ""  # what to deploy, as `headstart eval --drafter` takes it
    commands: list[str] = field(default_factory=list)  # command lines that serve it, or decode with it
    speedup: float | None = None
    speedup_ci95: list[float | None] = field(default_factory=lambda: [None, None])


@dataclass
class Journal(StoredJournal):
    """The document auto.json. `settings`, inherited, are the options of the run."""

    file_name = "auto.json"
    schema_version: int = SCHEMA_VERSION
    split: Split | None = None
    machine: Machine | None = None
    answers_until: float | None = None  # second of the budget at which answering ends
    answers: Answers | None = None
    learning_until: float | None = None  # second of the budget at which training ends
    rung_seconds: float = 0.0  # duration of each rung
    rungs: list[Rung] = field(default_factory=list)
    chosen: Chosen | None = None
    evaluation: Evaluation | None = None
    sizes: SizePlan | None = None  # null if there is no time for a plan
    exported: str = ""  # folder of the export; empty if there is none
    decision: Decision | None = None
    seconds: float = 0.0  # of the budget used, over all starts of the run
    steps: list[StepRecord] = field(default_factory=list)  # the commands that were run
