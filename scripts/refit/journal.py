"""refit.json: the findings and decisions of a run, with the figures behind them. A killed run resumes from it."""

from dataclasses import dataclass, field

from ..unattended.session import StoredJournal
from ..unattended.steps import StepRecord
from .foreign import OwnAnswers

SCHEMA_VERSION = 1
NAME = "refit.json"


@dataclass(frozen=True)
class Found:
    """What the files hold, in rows. unread: by reason. repeated: left out, since another row says the same or more."""

    new: int
    old: int
    held_out_new: int
    held_out_old: int
    repeated: int
    unread: dict[str, int]


@dataclass(frozen=True)
class Foreign:
    """Rows that the target did not write. served: temperature that fits the others. thresholds: by temperature of the
    target's own answers. read: rows that were looked at; late: for which there was no time. origins: where they stand.
    """

    served: float
    thresholds: dict[str, float]
    own: list[OwnAnswers]
    read: int
    late: int
    refused: dict[str, int]  # rows that the target cannot be given, by reason
    origins: list[str]


@dataclass(frozen=True)
class DriftPart:
    """What of some rows the head drafts. covered: the share of their tokens that it can draft at all."""

    traffic: str  # `new` or `old`
    domain: str
    week: str
    rows: int
    tokens: int
    acceptance_length: float | None
    covered: float | None


@dataclass(frozen=True)
class Plan:
    """The training. steps take step_seconds each, of new and old rows."""

    max_steps: int
    step_seconds: float
    new: int
    old: int
    until: float  # seconds of the budget


@dataclass(frozen=True)
class Compared:
    """Both heads on the same held-out answers. ratio: forwards of the target that the old head needs, over those that
    the new one does, with its 95 % interval, over conversations."""

    traffic: str
    domain: str
    conversations: int
    before: float | None  # acceptance length
    after: float | None
    ratio: float | None
    interval: list[float | None]


@dataclass(frozen=True)
class Decision:
    """What to do. commands: that measure the new head's speed and export it."""

    deploy: bool
    headline: str
    reasons: list[str]
    cautions: list[str]
    commands: list[str] = field(default_factory=list)


@dataclass
class Journal(StoredJournal):
    """Everything, in the order in which it comes about; what is not known yet is null or empty."""

    file_name = NAME
    schema_version: int = SCHEMA_VERSION
    found: Found | None = None
    reading_until: float | None = None  # seconds of the budget
    own: list[OwnAnswers] = field(default_factory=list)
    row_seconds: float = 0.0  # of reading one
    foreign: Foreign | None = None
    drift: list[DriftPart] = field(default_factory=list)
    plan: Plan | None = None
    head: str = ""  # folder of the new one
    compared: list[Compared] = field(default_factory=list)
    decision: Decision | None = None
    seconds: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
