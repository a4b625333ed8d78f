"""What all stages share: the settings, the folder, auto.json as it grows, and steps that are announced and kept."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ...train.stopping import Stopping
from .budget import Clock, clock_words
from .journal import Journal, Machine
from .learning import Learner
from .steps import Runner, StepRecord


@dataclass(frozen=True)
class Settings:
    """What a run was asked for; a folder goes on with the same alone. budget: seconds. traffic: of the files given."""

    target: str
    prompts: str
    chats: str
    budget: float
    engine: str
    batch_size: int
    max_new_tokens: int
    dtype: str
    device: str
    launcher: str
    seed: int
    traffic: str


@dataclass
class Session:
    """A run in its folder. keep: called when from then on a failure is to leave the folder."""

    settings: Settings
    folder: Path
    clock: Clock
    stopping: Stopping
    console: Console
    keep: Callable[[], None]

    def __post_init__(self) -> None:
        self.journal = Journal.read(self.folder, asdict(self.settings))
        launcher = shlex.split(self.settings.launcher)
        self.runner = Runner(self.folder / "logs", self.clock, self.stopping, launcher)

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

    def say(self, words: str, *, seconds: float | None = None, command: str = "") -> None:
        """What is done next, and how long that takes about."""
        about = "" if seconds is None else f" (about {clock_words(seconds)})"
        now = f"[{clock_words(self.clock.used)} of {clock_words(self.settings.budget)}]"
        self.console.print(f"{now} {words}{about}", highlight=False, soft_wrap=True)
        if command:
            self.console.print(f"    {command}", style="dim", highlight=False, soft_wrap=True)

    def write(self) -> None:
        self.clock.note()
        self.journal.seconds = round(self.clock.used, 1)
        self.journal.write(self.folder)

    def step(self, what: str, words: list[str], *, name: str, seconds: float, until: float | None = None) -> StepRecord:
        """Say and run a command, and keep its record."""
        self.say(what, seconds=seconds, command=self.runner.shown(words))
        record = self.runner.run(name, words, until=until)
        self.journal.steps.append(record)
        return record
