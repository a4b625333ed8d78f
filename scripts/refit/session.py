"""The settings of a run, and what all of its stages share."""

from dataclasses import dataclass

from ..unattended import session
from .journal import Journal


@dataclass(frozen=True)
class Settings:
    """The options of a run. A run is only resumed with equal settings."""

    target: str
    head: str
    traffic: str
    replay: str
    replay_share: float
    temperature: float | None
    max_length: int
    budget: float  # seconds
    dtype: str
    device: str
    launcher: str
    seed: int
    rows: str  # digest of the files `traffic` and `replay`, of the head's files and the target's


class Session(session.Session[Settings, Journal]):
    """A run in its folder."""
