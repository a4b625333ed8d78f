"""What runs the target, one setting for every command: our own engine in this process, or the server of another one."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...base.errors import BadInput, first_line
from ...targets.loading import GPU
from ...targets.weights.served_adapter import ServedAdapter
from .process import ServerProcess
from .registry import SERVER_ENGINES

OURS = "headstart"
MEMORY = re.compile(r"--(?:gpu[-_]memory[-_]utilization|mem[-_]fraction[-_]static)[= ]+(\d*\.?\d+)")  # share of a GPU
KEY = re.compile(r"--(?:admin[-_])?api[-_]key")


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """Section `engine` of configs; on command lines `--engine`, `--engine-python`, `--engine-args` and `--server`.

    An engine whose server runs already is asked there; of another one, a server is started."""

    name: str = OURS  # this process; or a server: vllm, sglang, llama-server; openai: any that runs
    python: str = ""  # of an environment with that engine, of llama-server its binary; empty: this one
    args: str = ""  # more flags of a server that is started, in shell syntax
    server: str | list[str] = ""  # the address of one that runs, such as http://localhost:8000; or several

    def __post_init__(self) -> None:
        told = next((key for key in ("python", "args", "server") if getattr(self, key)), None)
        if self.is_ours and told is not None:
            raise BadInput(f"{told}: goes with another engine; its name is {OURS}")
        if self.server and (self.python or self.args):
            raise BadInput("python, args: are of a server that is started; leave out server")
        if KEY.search(self.args):
            raise BadInput("args: --api-key: reports would show it; set VLLM_API_KEY and HEADSTART_API_KEY instead")
        try:
            shlex.split(self.args)
        except ValueError as error:
            raise BadInput(f"args {self.args!r}: {first_line(error)}") from error

    @property
    def is_ours(self) -> bool:
        """Whether the target runs in this process."""
        return self.name == OURS

    @property
    def servers(self) -> list[str]:
        """The addresses of running servers; none: one is started."""
        return [self.server] * bool(self.server) if isinstance(self.server, str) else self.server

    @property
    def has_room_for_two(self) -> bool:
        """Whether two servers can be up together: where they run already, without a GPU, and on one where each is given
        at most half of its memory."""
        shares = MEMORY.findall(self.args)
        return bool(self.server) or not GPU.exists() or (bool(shares) and float(shares[-1]) <= 0.5)

    def check_name(self, *known: str) -> Self:
        """Raises BadInput if it is none of these."""
        if self.name not in known:
            raise BadInput(f"name {self.name!r}: expected {' or '.join(known)}")
        return self

    def flags(self) -> list[str]:
        """The setting as words of a command line. Of a server that is started here."""
        told = {"--engine": self.name, "--engine-python": self.python, "--engine-args": self.args}
        return [word for flag, value in told.items() if value for word in (flag, value)]

    def process(
        self,
        target: str,
        *,
        drafting: Sequence[str] = (),
        arguments: Sequence[str] = (),
        adapter: ServedAdapter | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        while_starting: Callable[[], object] = lambda: None,
    ) -> ServerProcess:
        """The server, not yet started. Args: drafting: flags of what it drafts with. arguments: more flags, before the
        user's. adapter: that it serves too; the others as `ServerProcess` has them."""
        engine = SERVER_ENGINES[self.name]
        adapting = [] if adapter is None else engine.adapting(adapter)
        words = [*arguments, *adapting, *shlex.split(self.args)]
        return ServerProcess(
            engine.command(self.python or engine.program, target, drafting, words),
            name=engine.title,
            option=engine.option,
            log=log,
            environment=environment,
            while_starting=while_starting,
        )
