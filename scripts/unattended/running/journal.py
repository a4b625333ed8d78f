"""The schemas of auto.json and refit.json: what a run found and decided, from which a killed run resumes.

`AutoJournal` and `RefitJournal` are the documents; their fields are in the order in which the stages fill them in. A
field whose stage has not run is null, empty or 0. Of a refit, "new" rows are those of --traffic, "old" rows those of
--replay; "the old head" is the one that is deployed now, "the new head" the one that the run trains.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from ....base.errors import BadInput
from ....base.files import write_json
from ....configs.loader import build
from .steps import StepRecord

SCHEMA_VERSION = 3
LAST = ("decision", "seconds", "steps")  # keys of both documents that follow their own
T = TypeVar("T")


def known(value: T | None) -> T:
    """The value of a field whose stage has run."""
    assert value is not None
    return value


@dataclass(frozen=True)
class Decision:
    """The result of a run."""

    deploy: bool
    headline: str
    reasons: list[str]
    cautions: list[str]
    commands: list[str] = field(default_factory=list)  # command lines that carry it out
    drafter: str = ""  # of auto: what to deploy, as `headstart eval --drafter` takes it
    speedup: float | None = None
    speedup_ci95: list[float | None] = field(default_factory=lambda: [None, None])


@dataclass
class Journal:
    """What both documents have; a JSON file in the run's folder."""

    file_name: ClassVar[str]
    timed: ClassVar[tuple[str, ...]]  # keys of what depends on the machine
    settings: dict[str, Any]  # the options of the run, the same as in the folder's marker file
    schema_version: int = SCHEMA_VERSION
    ran_on: str = ""  # the machine of the last start: device, threads, version
    decision: Decision | None = None
    seconds: float = 0.0  # of the budget used, over all starts of the run
    steps: list[StepRecord] = field(default_factory=list)  # the commands that were run

    def write(self, folder: Path) -> None:
        document = asdict(self)
        last = {key: document.pop(key) for key in LAST}
        write_json(folder / self.file_name, document | last)

    @classmethod
    def read(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """The journal in a folder, or a new one with these settings. Raises BadInput on a damaged file."""
        path = folder / cls.file_name
        if not path.exists():
            return cls(settings)
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read; give a new folder") from error
        return build(cls, document, where=str(path))


# headstart auto


@dataclass(frozen=True)
class RoundCost:
    """Measured cost of a round that drafts a chain."""

    num_draft_tokens: int
    steps: float  # duration of the round, in baseline steps


@dataclass(frozen=True)
class Split:
    """How the prompts were divided."""

    held_out: int  # prompts kept for the evaluation
    asked: int  # prompts for the target to answer


@dataclass(frozen=True)
class Measured:
    """What was measured of a candidate before training. An excluded candidate may have `name` and `out` only."""

    name: str
    parameters: int = 0  # trained parameters
    costs: list[RoundCost] = field(default_factory=list)  # of rounds that draft 1 to K tokens
    bound: float = 0.0  # speedup if four in five drafts were accepted at every position
    bound_num_draft_tokens: int = 0  # the K of that speedup
    usual_speedup: float = 1.0  # at the candidate's `usual_acceptance`
    step_seconds: float = 0.0  # of an optimizer step
    token_seconds: float = 0.0  # of the target's forward in training, per token
    out: str = ""  # why the candidate is not trained; empty: it may be


@dataclass(frozen=True)
class Machine:
    """What was measured of the target on this machine before training."""

    baseline_ms: float  # milliseconds of a step without drafts, at `batch_size`
    dtype: str
    start_seconds: float  # time that a command needs to start
    start_tokens: int  # supervised tokens that a fresh head is fitted on before its first step
    candidates: list[Measured]
    load_seconds: float = 0.0  # time in which the target is loaded; none where a server has its layers
    prefill_ms: float = 0.0  # in which the target reads a prompt of each row, without a server

    @property
    def begin_seconds(self) -> float:
        """Until a command that needs the target computes."""
        return self.start_seconds + self.load_seconds

    @property
    def able(self) -> list[Measured]:
        """The candidates that were not excluded."""
        return [candidate for candidate in self.candidates if not candidate.out]


@dataclass(frozen=True)
class AnswerCounts:
    """The training data."""

    written: int  # rows answered by the target in this run, greedily
    sampled: int  # further answers to the same prompts, sampled
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
    steps: int = 0  # optimizer steps since the start of training, over all rungs
    seconds: float = 0.0  # duration of the training command in this rung
    acceptance_length: float = 0.0
    acceptance_rate: list[float | None] = field(default_factory=list)  # by draft position; null: never reached
    num_draft_tokens: int = 0  # the K with the highest predicted speedup
    predicted_speedup: float = 0.0
    problem: str = ""  # why there is no score; the figures are then meaningless


@dataclass
class Rung:
    """One rung of successive halving."""

    plan: dict[str, int]  # by candidate, the step count up to which it is trained, if its time allows
    scores: list[Score] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # candidates of the next rung, best first


@dataclass(frozen=True)
class Chosen:
    """The winner of successive halving. It is trained for the rest of the time, from its best checkpoint on."""

    name: str
    max_steps: int  # optimizer steps of the final training
    score: Score | None = None  # of its last rung


@dataclass(frozen=True)
class Trained:
    """The head that is trained: by the final training, or the best of the rungs where that is better."""

    head: str  # folder
    score: Score | None


@dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out prompts."""

    num_prompts: int
    num_draft_tokens: int  # K of the head
    has_look_ups: bool = True  # look-ups are measured too; not where the server takes too long for both


@dataclass(frozen=True)
class ServerTrial:
    """The engine's server without drafts, tried before training. Where there is a problem, our own engine answers and
    measures."""

    problem: str = ""  # why it does not; empty: it does
    start_seconds: float = 0.0  # until it answers
    tokens_per_second: list[float] = field(default_factory=list)  # at each of `concurrency`


@dataclass
class AutoJournal(Journal):
    """The document auto.json."""

    file_name, timed = "auto.json", ("serving", "machine")
    split: Split | None = None
    machine: Machine | None = None
    least_budget: float = 0.0  # seconds; the smallest that makes sense; 0 if nothing is to be trained
    serving: ServerTrial | None = None  # of the engine that will serve; null: it is ours
    answers_until: float | None = None  # second of the budget at which answering ends
    stateless: str = ""  # why the server gives no states to trainings; empty: it may
    answers: AnswerCounts | None = None
    learning_until: float | None = None  # second of the budget at which training ends
    rung_seconds: float = 0.0  # duration of each rung
    rungs: list[Rung] = field(default_factory=list)
    chosen: Chosen | None = None
    trained: Trained | None = None
    evaluation: Evaluation | None = None
    report: str = ""  # path of the evaluation's report.json
    exported: str = ""  # folder of the export; empty if there is none

    def scores_of(self, name: str) -> list[Score]:
        """A candidate's scores in its rungs, in order."""
        return [score for rung in self.rungs for score in rung.scores if score.name == name and not score.problem]


# headstart refit


@dataclass(frozen=True)
class Found:
    """The rows of the files."""

    new: int  # answered conversations in --traffic
    old: int  # and in --replay
    held_out_new: int  # of these, held out for the comparison
    held_out_old: int
    repeated: int  # rows of --traffic left out because another row has the same conversation, or a longer version of it
    unread: dict[str, int]  # rows of --traffic that could not be read, by reason


@dataclass(frozen=True)
class TrainingPlan:
    """The training of the new head."""

    max_steps: int  # optimizer steps
    step_seconds: float  # of one of them
    new: int  # training rows
    old: int
    until: float  # second of the budget at which training ends
    draft_vocab_size: int | None  # of the new head; null: all tokens
    row_seconds: float  # in which both heads read a row
    dtype: str  # of the target


@dataclass(frozen=True)
class Compared:
    """The old head against the new one on the same held-out answers."""

    traffic: str  # `new` or `old`
    domain: str  # `all`: every domain
    conversations: int
    before: float | None  # acceptance length of the old head
    after: float | None  # acceptance length of the new head
    ratio: float | None  # target forwards with the old head over those with the new one; above 1: the new is better
    interval: list[float | None]  # 95 % confidence interval of the ratio, over conversations


@dataclass
class RefitJournal(Journal):
    """The document refit.json."""

    file_name, timed = "refit.json", ("serving", "plan")
    found: Found | None = None
    serving: ServerTrial | None = None  # of the engine that serves; null: none was named
    stateless: str = ""  # as of AutoJournal
    plan: TrainingPlan | None = None
    trained: str = ""  # folder of the new head; empty until it is trained
    compared: list[Compared] = field(default_factory=list)
    report: str = ""  # path of report.json of both heads in the engine's server; empty: there is none
