"""The schema of refit.json: what a run of `headstart refit` found and decided, from which a killed run resumes.

`Journal` is the document; its fields are in the order in which the stages fill them in. A field whose stage has not run
is null, empty or 0. "New" rows are those of --traffic, "old" rows those of --replay. "The old head" is the one that is
deployed now, "the new head" the one that this run trains.
"""

from dataclasses import dataclass, field

from ..unattended.session import StoredJournal
from ..unattended.steps import StepRecord
from .foreign import OwnAnswers

SCHEMA_VERSION = 1


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
class Foreign:
    """The answers of --traffic that the target did not write, found by their typicality (foreign.py)."""

    served: float | None  # temperature assumed for answers whose rows do not name one; null: all do
    thresholds: dict[str, float]  # lowest typicality of an own answer, by temperature of the target's own answers
    own: list[OwnAnswers]  # the target's own answers behind the thresholds
    read: int  # rows that were tested
    late: int  # rows that were not, because the time for reading was up
    refused: dict[str, int]  # rows that the target cannot be given, by reason
    origins: list[str]  # file and line of each foreign answer


@dataclass(frozen=True)
class DriftPart:
    """How well the old head drafts a group of rows."""

    traffic: str  # `new` or `old`
    domain: str  # `all`: every domain
    week: str  # ISO week such as 2026-W07; `all`: every week
    rows: int
    tokens: int  # of the answers
    acceptance_length: float | None
    covered: float | None  # share of the answers' tokens that the head's draft vocabulary contains


@dataclass(frozen=True)
class Plan:
    """The training of the new head."""

    max_steps: int  # optimizer steps
    step_seconds: float  # of one of them
    new: int  # training rows
    old: int
    until: float  # second of the budget at which training ends
    draft_vocab_size: int | None  # of the new head; null: all tokens
    more_tokens: int  # of these, how many the old head cannot draft


@dataclass(frozen=True)
class Share:
    """A head whose weights are between the old head's and the trained one's, on validation rows."""

    share: float  # of the way: 0 is the old head, 1 the trained one
    new: float | None  # acceptance length on rows of the new traffic
    old: float | None  # acceptance length on old rows; null: there are none


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


@dataclass(frozen=True)
class Decision:
    """The result of the run."""

    deploy: bool  # whether to deploy the new head
    headline: str
    reasons: list[str]
    cautions: list[str]
    commands: list[str] = field(default_factory=list)  # command lines that time the new head and export it


@dataclass
class Journal(StoredJournal):
    """The document refit.json. `settings`, inherited, are the options of the run."""

    file_name = "refit.json"
    schema_version: int = SCHEMA_VERSION
    found: Found | None = None
    reading_until: float | None = None  # second of the budget at which reading ends
    own: list[OwnAnswers] = field(default_factory=list)  # typicality of answers that the target wrote in this run
    row_seconds: float = 0.0  # seconds in which target and head read a row
    head_seconds: float = 0.0  # of these, the head's
    foreign: Foreign | None = None
    drift: list[DriftPart] = field(default_factory=list)
    plan: Plan | None = None
    trained: str = ""  # folder of the trained head; empty until it is trained
    shares: list[Share] = field(default_factory=list)
    head: str = ""  # folder of the new head, which is the trained one or between it and the old one; empty until chosen
    compared: list[Compared] = field(default_factory=list)
    decision: Decision | None = None
    seconds: float = 0.0  # of the budget used, over all starts of the run
    steps: list[StepRecord] = field(default_factory=list)  # the commands that were run
