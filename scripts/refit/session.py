"""What all stages share."""

from dataclasses import dataclass

from ..unattended import session
from .journal import Journal


@dataclass(frozen=True)
class Settings:
    """What a run was asked for; a folder goes on with the same alone. budget: seconds. rows: a hash of the files."""

    target: str
    head: str
    traffic: str
    replay: str
    replay_share: float
    temperature: float | None
    max_length: int
    budget: float
    dtype: str
    device: str
    launcher: str
    seed: int
    rows: str


class Session(session.Session[Settings, Journal]):
    """A run in its folder."""
