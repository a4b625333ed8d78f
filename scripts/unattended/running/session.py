"""An unattended run in its folder: settings, journal, clock and commands; and what runs its stages."""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from .... import __version__
from ....base.differing import first_difference
from ....base.doing import doing
from ....base.errors import BadInput, first_line
from ....base.owned import OwnedFolder
from ....base.terminal import PlainConsole
from ....engines.servers.setting import EngineSetting
from ....eval.figures.environment import device_name
from ....targets.dtype import default_dtype
from ....targets.target import Target
from ....train.watching.stopping import Stopping
from .clock import Clock, clock_text
from .journal import AutoJournal, Journal, Machine, known
from .steps import CommandRunner, StepRecord

WEIGHTS = (".safetensors", ".gguf")  # files that are too large to read whole
SAMPLED, SAMPLE_BYTES = 256, 4096  # parts of such a file


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. A run is only resumed with equal settings."""

    target: str
    budget: float  # seconds
    dtype: str
    device: str
    launcher: str  # command that starts Python for training; empty: none
    seed: int
    adapter: str = ""  # folder of the target's adapter; empty: none
    engine: EngineSetting = field(default_factory=EngineSetting)
    concurrency: list[int] = field(default_factory=lambda: [1])  # of measurements in the engine's server


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings):
    """The options of `headstart auto`."""

    prompts: str
    batch_size: int
    max_new_tokens: int
    draft_window: str  # as of `headstart eval`; empty: none
    traffic: str  # digest of the file `prompts`, and of the target's


@dataclass(frozen=True, kw_only=True)
class RefitSettings(Settings):
    """The options of `headstart refit`."""

    head: str
    traffic: str
    replay: str
    max_length: int
    rows: str  # digest of the files `traffic` and `replay`, of the head's files, the target's and the adapter's


S = TypeVar("S", bound=Settings)
J = TypeVar("J", bound=Journal)


class Session(Generic[S, J]):
    """A run in its folder; `open` starts or resumes it.

    keep: after this was called, a new folder is not removed when the run fails. is_verbose: whether commands are told.
    load_seconds: in which the target was loaded; none where a server has its layers.
    """

    command: ClassVar[str]  # such as `headstart auto`
    journal_type: type[J]
    load_seconds = 0.0

    def __init__(self, settings: S, owned: OwnedFolder, stopping: Stopping, *, is_verbose: bool = False):
        self.settings, self.stopping, self.is_verbose = settings, stopping, is_verbose
        self.folder, self.keep = owned.path, owned.keep
        self.clock = Clock(self.folder / "clock.json", settings.budget)
        self.journal = self.journal_type.read(self.folder, asdict(settings))
        self.runner = CommandRunner(self.folder / "logs", self.clock, stopping, shlex.split(settings.launcher))
        self.console = PlainConsole(stderr=True)

    @classmethod
    @contextmanager
    def open(cls, output: Path, settings: S, *, is_verbose: bool = False) -> Iterator[Self]:
        """Starts or resumes a run in the folder `output`. In the `with` block, Ctrl-C stops it at the next safe point.

        Raises: BadInput if another command made the folder, it was made with other settings, or a launcher started this
        command in several processes: steps start processes themselves.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise BadInput(f"{cls.command}: run it in one process; --launcher says how to train on several devices")
        told = asdict(settings)
        with OwnedFolder(output, command=cls.command, settings=told) as owned:
            if difference := first_difference(owned.settings, told):
                raise BadInput(f"{owned.path}: started with {difference}; give a new folder")
            with Stopping() as stopping:
                run = cls(settings, owned, stopping, is_verbose=is_verbose)
                run.note_machine()
                yield run

    def note_machine(self) -> None:
        """Says so where the last start was on another machine, whose times are not those of this one."""
        here, before = machine_words(self.settings.device), self.journal.ran_on
        self.journal.ran_on = here
        if before not in ("", here) and self.journal.decision is None:
            then = ""
            if any(getattr(self.journal, key) for key in self.journal.timed):
                then = f": what was timed {'is timed again' if self.forget_times() else 'stays'}"
            self.say(f"warning: goes on with {here}, behind a start with {before}{then}")

    def forget_times(self) -> bool:
        """Drop what was timed, if nothing rests on it yet; whether it was dropped."""
        return False

    @property
    def data(self) -> Path:
        """The folder of the rows: held_out.jsonl and others."""
        return self.folder / "data"

    def say(self, text: str, *, seconds: float | None = None) -> None:
        """Print a line with the time used so far. Args: seconds: expected duration of what the line announces."""
        about = "" if seconds is None else f" (about {clock_text(seconds)})"
        now = f"[{clock_text(self.clock.used)} of {clock_text(self.settings.budget)}]"
        self.print(f"{now} {text}{about}")

    def print(self, line: str, *, style: str | None = None) -> None:
        self.console.print(line, style=style, highlight=False, soft_wrap=True)

    def write(self) -> None:
        """Write the journal and the used time."""
        self.clock.save()
        self.journal.seconds = round(self.clock.used, 1)
        self.journal.write(self.folder)

    def step(
        self,
        what: str,
        arguments: list[str],
        *,
        name: str,
        seconds: float | None,
        until: float | None = None,
        meanwhile: Callable[[], bool] = lambda: True,
    ) -> StepRecord:
        """Announce and run a `headstart` command; its record is added to the journal, which is not written yet.

        Args:
            what: the announcement.
            name: of the log.
            seconds: expected duration, if known.
            until: second of the budget at which the command is stopped.
            meanwhile: called again and again while it runs; it is stopped when this returns False.

        Raises: as `CommandRunner.run`.
        """
        self.say(what, seconds=seconds)
        if self.is_verbose:
            self.print(f"    {self.runner.command_line(arguments)}", style="dim")
        with doing(what, is_announced=True):
            record = self.runner.run(name, arguments, until=until, meanwhile=meanwhile)
        self.journal.steps.append(record)
        return record

    def check_stop(self) -> None:
        """To be called regularly by work in this process: raises SystemExit after a signal, and saves the used time."""
        if self.stopping.received:
            raise SystemExit(self.stopping.exit_code)
        self.clock.save()

    def load_target(self) -> Target:
        """The target, with the adapter that serves."""
        settings, began = self.settings, time.monotonic()
        adapter = settings.adapter or None
        target = Target.load(settings.target, dtype=settings.dtype, device=settings.device, adapter=adapter)
        self.load_seconds = time.monotonic() - began
        return target

    def left_until(self, second: float | None) -> float:
        """Seconds up to that second of the budget, 0 or more. Args: second: of the journal, which has it by now."""
        return max(known(second) - self.clock.used, 0.0)


R = TypeVar("R", bound=Session)


@dataclass(frozen=True)
class Stage(Generic[R]):
    """A part of a run, which finds the value of a field of the journal; `find` may raise BadInput."""

    field: str
    find: Callable[[R], Any]
    is_needed: Callable[[R], bool] = lambda run: True


def run_stages(run: R, stages: Sequence[Stage[R]], write_page: Callable[[R], list[str]]) -> None:
    """Runs the stages up to a decision, writes the page, and prints the lines that it returns on stdout.

    The journal is written behind each stage, and a stage whose field is filled is skipped: a killed run resumes.
    """
    for stage in stages:
        if run.journal.decision is None and not getattr(run.journal, stage.field) and stage.is_needed(run):
            try:
                setattr(run.journal, stage.field, stage.find(run))
            except SystemExit:
                run.keep()  # a signal: the same command goes on
                raise
            run.write()
    console = PlainConsole()
    for line in write_page(run):
        console.print(line, highlight=False, soft_wrap=True)


class AutoRun(Session[AutoSettings, AutoJournal]):
    """A run of `headstart auto`."""

    command, journal_type = "headstart auto", AutoJournal

    def forget_times(self) -> bool:
        journal = self.journal
        if journal.rungs or journal.chosen or journal.report:
            return False
        journal.serving = journal.machine = journal.learning_until = journal.evaluation = None
        journal.least_budget = 0.0
        if journal.answers is None:
            journal.answers_until = None
        return True

    @property
    def machine(self) -> Machine:
        """The measured machine, once it is."""
        return known(self.journal.machine)


def machine_words(device: str) -> str:
    """What times depend on besides the settings: the device, the threads, and our version."""
    return f"{device_name(torch.device(device))}, {torch.get_num_threads()} threads, headstart {__version__}"


def files_digest(paths: Iterable[str]) -> str:
    """A hash of the contents of files, and of a model's folder, whose weights are sampled. Of paths that are neither,
    such as hub ids, the name is hashed."""
    digest = hashlib.sha256()
    for path in paths:
        place = Path(path).expanduser()
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            if not file.is_file():
                digest.update(file.name.encode() if place.is_dir() else path.encode())
            elif file.suffix in WEIGHTS:
                size = file.stat().st_size
                digest.update(f"{file.name} {size}".encode())
                with file.open("rb") as opened:
                    for part in range(SAMPLED):
                        opened.seek(part * size // SAMPLED)
                        digest.update(opened.read(SAMPLE_BYTES))
            else:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def target_dtype(target: str, device: str, dtype: str) -> str:
    """The given dtype, or the default of `headstart eval`. Raises BadInput if the target cannot be found."""
    try:
        return dtype or default_dtype(target, device)
    except OSError as error:
        raise BadInput(f"--target {target}: {first_line(error)}") from error
