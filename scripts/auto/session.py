"""What all stages share: the settings and the journal."""

from dataclasses import dataclass
from pathlib import Path

from ..unattended import session
from .journal import Journal, Machine
from .learning import Learner


@dataclass(frozen=True)
class Settings:
    """What a run was asked for; a folder goes on with the same alone. budget: seconds. traffic: of the files given."""

    target: str
    prompts: str
    chats: str
    budget: float
    engine: str
    batch_size: int
    load: float  # requests per second; 0: batch_size says what is served at a time
    max_new_tokens: int
    dtype: str
    device: str
    launcher: str
    seed: int
    traffic: str


class Session(session.Session[Settings, Journal]):
    """A run in its folder."""

    @property
    def machine(self) -> Machine:
        assert self.journal.machine is not None
        return self.journal.machine

    @property
    def learner(self) -> Learner:
        assert self.journal.answers is not None
        settings = self.settings
        return Learner(self.folder, settings.target, self.machine, self.journal.answers, self.runner, settings.seed)

    @property
    def held_out(self) -> Path:
        return self.folder / "data" / "held_out.jsonl"
