"""What all stages of an unattended run share: settings, folder, journal, and the recorded steps."""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from rich.console import Console

from ...configs.errors import BadInput, first_line
from ...configs.files import write_json
from ...configs.loader import build
from ...configs.owned import OwnedFolder
from ...configs.terminal import PlainConsole
from ...data_pipelines.answers.store import check_settings
from ...heads.loading import default_dtype
from ...train.stopping import Stopping
from .clock import Clock, clock_words
from .steps import Runner, StepRecord


class Settings(Protocol):
    """What a run was asked for; a folder goes on with the same alone. budget: seconds. launcher: of training."""

    @property
    def budget(self) -> float: ...
    @property
    def launcher(self) -> str: ...


class Journal(Protocol):
    """Findings and decisions of a run. A killed run resumes from it."""

    seconds: float
    steps: list[StepRecord]

    def write(self, folder: Path) -> None: ...


S = TypeVar("S", bound=Settings)
J = TypeVar("J", bound=Journal)
T = TypeVar("T")


@dataclass
class Session(Generic[S, J]):
    """A run in its folder. keep: to be called once the folder is worth keeping after a failure."""

    settings: S
    journal: J
    folder: Path
    clock: Clock
    stopping: Stopping
    console: Console
    keep: Callable[[], None]

    def __post_init__(self) -> None:
        launcher = shlex.split(self.settings.launcher)
        self.runner = Runner(self.folder / "logs", self.clock, self.stopping, launcher)

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

    def go_on(self) -> None:
        """Between two parts of a stage in this process. Raises SystemExit where it was told to stop."""
        if self.stopping.received:
            raise SystemExit(self.stopping.exit_code)
        self.clock.note()


@dataclass
class StoredJournal:
    """A journal as a JSON file of the run's folder. settings: what the run was asked for, as in the folder's marker."""

    file_name: ClassVar[str]
    settings: dict[str, Any]

    def write(self, folder: Path) -> None:
        write_json(folder / self.file_name, asdict(self))

    @classmethod
    def read(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """As a run left it; a new one where there is none. Raises BadInput on a damaged file."""
        path = folder / cls.file_name
        if not path.exists():
            return cls(settings)
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read; give a new folder") from error
        return build(cls, found, where=str(path))


@contextmanager
def opened(
    command: str,
    output: Path,
    settings: S,
    journal: Callable[[Path, dict[str, Any]], J],
    session: Callable[[S, J, Path, Clock, Stopping, Console, Callable[[], None]], T],
) -> Iterator[T]:
    """A run in its folder, new or resumed; Ctrl-C stops it at the next safe point.

    Raises: BadInput on a folder that is not the command's, or was made with other settings.
    """
    asked = vars(settings)
    with OwnedFolder(output, command=command, settings=asked) as folder:
        check_settings(folder.settings, asked, folder=folder.path)
        with Stopping() as stopping:
            clock, found = Clock(folder.path / "clock.json", settings.budget), journal(folder.path, asked)
            yield session(settings, found, folder.path, clock, stopping, PlainConsole(stderr=True), folder.keep)


def check_started_once(command: str) -> None:
    """Raises BadInput in one of several processes: steps that need them start them."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInput(f"{command} is started once; --launcher says how training is started on several devices")


def digest(paths: Iterable[str]) -> str:
    """Of what is in the files; of others, such as data sets on the hub, their names."""
    found = hashlib.sha256()
    for path in paths:
        file = Path(path).expanduser()
        found.update(file.read_bytes() if file.is_file() else path.encode())
    return found.hexdigest()[:16]


def target_dtype(target: str, device: str, dtype: str) -> str:
    """As `headstart eval` has it. Raises BadInput if there is no such target."""
    try:
        return dtype or default_dtype(target, device)
    except OSError as error:
        raise BadInput(f"--target {target}: {first_line(error)}") from error
