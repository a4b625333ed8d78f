"""An unattended run in its folder: settings, journal, clock and steps. `open_session` starts or resumes a run."""

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
from ...heads.targets.dtype import default_dtype
from ...train.stopping import Stopping
from .clock import Clock, clock_text
from .steps import Runner, StepRecord

WEIGHTS = (".safetensors", ".gguf")  # files that are too large to read whole
SAMPLED, SAMPLE_BYTES = 256, 4096  # parts of such a file


class Settings(Protocol):
    """The options of a run. A run is only resumed with equal settings."""

    @property
    def budget(self) -> float:
        """Seconds."""
        ...

    @property
    def launcher(self) -> str:
        """Command that starts Python for training; empty: none."""
        ...


class Journal(Protocol):
    """Findings and decisions of a run, from which a killed run resumes."""

    seconds: float  # of the budget used
    steps: list[StepRecord]

    def write(self, folder: Path) -> None: ...


S = TypeVar("S", bound=Settings)
J = TypeVar("J", bound=Journal)
T = TypeVar("T")


@dataclass
class Session(Generic[S, J]):
    """A run in its folder."""

    settings: S
    journal: J
    folder: Path
    clock: Clock
    stopping: Stopping
    console: Console
    keep: Callable[[], None]  # after this was called, a new folder is not removed when the run fails

    def __post_init__(self) -> None:
        launcher = shlex.split(self.settings.launcher)
        self.runner = Runner(self.folder / "logs", self.clock, self.stopping, launcher)

    def say(self, text: str, *, seconds: float | None = None, command: str = "") -> None:
        """Print a line with the time used so far. Args: seconds: expected duration of what the line announces."""
        about = "" if seconds is None else f" (about {clock_text(seconds)})"
        now = f"[{clock_text(self.clock.used)} of {clock_text(self.settings.budget)}]"
        self.console.print(f"{now} {text}{about}", highlight=False, soft_wrap=True)
        if command:
            self.console.print(f"    {command}", style="dim", highlight=False, soft_wrap=True)

    def write(self) -> None:
        """Write the journal and the used time."""
        self.clock.save()
        self.journal.seconds = round(self.clock.used, 1)
        self.journal.write(self.folder)

    def step(
        self, what: str, arguments: list[str], *, name: str, seconds: float, until: float | None = None
    ) -> StepRecord:
        """Announce and run a `headstart` command; its record is added to the journal, which is not written yet.

        Args:
            what: the announcement.
            name: of the log.
            seconds: expected duration.
            until: second of the budget at which the command is stopped.

        Raises: as `Runner.run`.
        """
        self.say(what, seconds=seconds, command=self.runner.command_line(arguments))
        record = self.runner.run(name, arguments, until=until)
        self.journal.steps.append(record)
        return record

    def check_stop(self) -> None:
        """To be called regularly by work in this process: raises SystemExit after a signal, and saves the used time."""
        if self.stopping.received:
            raise SystemExit(self.stopping.exit_code)
        self.clock.save()


@dataclass
class StoredJournal:
    """A journal that is a JSON file in the run's folder."""

    file_name: ClassVar[str]
    settings: dict[str, Any]  # the options of the run, the same as in the folder's marker file

    def write(self, folder: Path) -> None:
        write_json(folder / self.file_name, asdict(self))

    @classmethod
    def read(cls, folder: Path, settings: dict[str, Any]) -> Self:
        """The journal in a folder, or a new one with these settings. Raises BadInput on a damaged file."""
        path = folder / cls.file_name
        if not path.exists():
            return cls(settings)
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read; give a new folder") from error
        return build(cls, found, where=str(path))


@contextmanager
def open_session(
    command: str,
    output: Path,
    settings: S,
    journal: Callable[[Path, dict[str, Any]], J],
    session: Callable[[S, J, Path, Clock, Stopping, Console, Callable[[], None]], T],
) -> Iterator[T]:
    """Starts or resumes a run in the folder `output`. In the `with` block, Ctrl-C stops it at the next safe point.

    Args:
        command: such as `headstart auto`.
        journal: reads the journal, given the folder and the settings: the `read` of a StoredJournal.
        session: the class of the session, or what builds one from its fields.

    Raises: BadInput if another command made the folder, or it was made with other settings.
    """
    options = vars(settings)
    with OwnedFolder(output, command=command, settings=options) as folder:
        check_settings(folder.settings, options, folder=folder.path)
        with Stopping() as stopping:
            clock, stored = Clock(folder.path / "clock.json", settings.budget), journal(folder.path, options)
            yield session(settings, stored, folder.path, clock, stopping, PlainConsole(stderr=True), folder.keep)


def check_started_once(command: str) -> None:
    """Raises BadInput if a launcher started this command in several processes: steps start processes themselves."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise BadInput(f"{command}: run it in one process; --launcher says how to train on several devices")


def digest(paths: Iterable[str]) -> str:
    """A hash of the contents of files, and of a model's folder, whose weights are sampled. Of paths that are neither,
    such as hub ids, the name is hashed."""
    found = hashlib.sha256()
    for path in paths:
        place = Path(path).expanduser()
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            if not file.is_file():
                found.update(file.name.encode() if place.is_dir() else path.encode())
            elif file.suffix in WEIGHTS:
                size = file.stat().st_size
                found.update(f"{file.name} {size}".encode())
                with file.open("rb") as opened:
                    for part in range(SAMPLED):
                        opened.seek(part * size // SAMPLED)
                        found.update(opened.read(SAMPLE_BYTES))
            else:
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def target_dtype(target: str, device: str, dtype: str) -> str:
    """The given dtype, or the default of `headstart eval`. Raises BadInput if the target cannot be found."""
    try:
        return dtype or default_dtype(target, device)
    except OSError as error:
        raise BadInput(f"--target {target}: {first_line(error)}") from error
