"""The settings of a run, and what all of its stages share."""

from dataclasses import dataclass
from pathlib import Path

from ..unattended import session
from .journal import Journal, Machine
from .learning import Learner


@dataclass(frozen=True)
class Settings:
    """The options of a run. A run is only resumed with equal settings."""

    target: str
    prompts: str
    chats: str
    budget: float  # seconds
    engine: str
    batch_size: int
    load: float  # requests per second; 0: `batch_size` says how many rows are served at a time
    max_new_tokens: int
    dtype: str
    device: str
    launcher: str
    seed: int
    traffic: str  # digest of the files `prompts` and `chats`, and of the target's


class Session(session.Session[Settings, Journal]):
    """A run in its folder. `machine` and `learner` may be used once the stages that fill the journal have run."""

    @property
    def machine(self) -> Machine:
        assert self.journal.machine is not None
        return self.journal.machine

    @property
    def learner(self) -> Learner:
        assert self.journal.answers is not None
        settings = self.settings
        return Learner(self.folder, settings.target, self.machine, self.journal.answers, settings.seed)

    @property
    def held_out(self) -> Path:
        return self.folder / "data" / "held_out.jsonl"
