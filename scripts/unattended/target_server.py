"""The engine's server while an unattended run has the target answer and read: one for both, started when it is first
asked, ended before heads are measured in servers of their own.

It answers the prompts and, of vLLM, gives the target's states to the run and its trainings, whose processes then load
no layer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from ...base.errors import BadInput
from ...base.files import remove
from ...data_pipelines.served.reading import ServedTarget, label_of
from ...data_pipelines.served.state_server import Gone, StateServer
from ...data_pipelines.served.vllm_process import state_process
from ...engines.servers.process import ServerProcess
from ...engines.servers.registry import SERVER_ENGINES
from ...heads.base import HeadConfig
from ...heads.stored.fit import build_skeleton_head
from ...targets.loading import TargetConfig, release_memory
from ...targets.skeleton import load_skeleton
from ...targets.target import Target
from ...targets.weights.served_adapter import ServedAdapter, lora_of
from ...train.inputs.target import is_built
from .in_server import STARTING, served_rate, server_of
from .running.clock import clock_text
from .running.session import Session
from .running.steps import StepRecord

ROUNDS = 4  # of answers after each other for which there is time, however many are in flight
MOST_IN_FLIGHT = 128  # questions
PATIENCE = 20  # seconds without any answer after which a server that fails is given up, beside those of a new start
MOST_STARTS = 4  # of a server that ends again and again
STATES = "states"  # the folder in which a server gives them
BESIDE_TRAINING = ["--gpu-memory-utilization", "0.5"]  # unless the user's flags say what it may take of a GPU
T = TypeVar("T")


class TargetServer:
    """The server of a run's target. Used in a `with` block.

    journal.unserved says why it is not asked any more, in later starts of the run too: then our own engine answers, and
    trainings load the target. journal.stateless: why it gives no states."""

    def __init__(self, run: Session[Any, Any], heads: Callable[[], Sequence[HeadConfig]], *, least: int = 0):
        """Args: heads: those that read its states, called when it is started; it may raise BadInput. least: answers
        that it must have time for."""
        self.run, self.heads, self.least, self.running = run, heads, least, ExitStack()
        self.process: ServerProcess | None = None
        self.num_starts, self.until = 0, math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, if it runs."""
        self.running.close()
        self.process = None
        remove(self.run.folder / STATES)

    @property
    def gives_states(self) -> bool:
        """Whether the run and its trainings get the target's states from it."""
        journal = self.run.journal
        is_asked = server_of(self.run) is not None and not journal.unserved
        return is_asked and self.run.settings.engine.name == "vllm" and not journal.stateless

    def answering(self) -> list[str]:
        """What `headstart data regenerate` is told of the server, once it is ready; none: our own engine answers.

        Raises: SystemExit after a signal to stop."""
        run, serving = self.run, server_of(self.run)
        if serving is None or run.journal.unserved:
            return []
        left, most, rate = run.left_until(run.journal.answers_until), run.settings.max_new_tokens, served_rate(serving)
        needed = serving.start_seconds + self.least * most / rate
        if self.process is None and needed > STARTING * left:
            late = f"the server's first answers would come after {clock_text(needed)}, too late of {clock_text(left)}"
            run.say(f"{late}: our own engine answers")
            return []
        if (url := self.ready(left)) is None:
            return []
        in_flight = min(max(int(left * rate / (ROUNDS * most)), 1), MOST_IN_FLIGHT)
        patience = PATIENCE + math.ceil(2 * serving.start_seconds)
        told = [f"engine.name={run.settings.engine.name}", f"engine.server={url}"]
        return [*told, f"client.concurrency={in_flight}", f"client.patience={patience}"]

    def training(self) -> list[str]:
        """What `headstart train` is told of the server, once it is ready; none: its process loads the target.

        Raises: SystemExit after a signal to stop."""
        if not self.gives_states:
            self.close()  # it would take memory that the training needs
            return []
        url = self.ready(self.run.clock.left)
        # a server that was started again may give no states
        served = [] if url is None or not self.gives_states else ["engine.name=vllm", f"engine.server={url}"]
        return [*served, "train.decode_prompts=0"] if served else []

    def ready(self, left: float) -> str | None:
        """The address of the server, which is started unless it runs; None: it is given up.

        Args: left: seconds for what it is asked for."""
        if self.process is None:
            run, serving = self.run, server_of(self.run)
            run.say(
                f"starting {self.title}'s server for the {'states' if self.gives_states else 'answers'}",
                seconds=None if serving is None else serving.start_seconds,
            )
            self.until = run.clock.used + STARTING * left
            try:
                self.process = self.start()
            except BadInput as error:
                self.give_up(str(error))
        return None if self.process is None else self.process.url

    def start(self) -> ServerProcess:
        """Raises BadInput if it does not start in time; one that gives no states is started without them."""
        self.num_starts += 1
        if self.gives_states:
            try:
                return self.running.enter_context(self.stating())
            except BadInput as error:
                if self.run.clock.used > self.until:
                    raise
                self.give_up_states(str(error))
        return self.running.enter_context(self.plain())

    @property
    def title(self) -> str:
        return SERVER_ENGINES[self.run.settings.engine.name].title

    @property
    def log(self) -> Path:
        (self.run.folder / "logs").mkdir(exist_ok=True)
        return self.run.folder / "logs" / "target_server.log"

    def plain(self) -> ServerProcess:
        settings = self.run.settings
        adapter = ServedAdapter.read(settings.adapter) if settings.adapter else None
        return settings.engine.process(settings.target, adapter=adapter, log=self.log, while_starting=self.check)

    def stating(self) -> ServerProcess:
        """One that gives the states which the heads read, in the dtype in which they are trained."""
        run, target = self.run, ServedTarget.read(self.source)
        dtype = str(target.dtype).removeprefix("torch.")
        remove(run.folder / STATES)  # of a run that was killed
        return state_process(
            run.settings.engine,
            run.settings.target,
            layers_read(self.source, self.heads()),
            run.folder / STATES,
            arguments=["--dtype", dtype, *(BESIDE_TRAINING if torch.cuda.is_available() else [])],
            adapter=lora_of(target.adapter),
            log=self.log,
            while_starting=self.check,
        )

    def check(self) -> None:
        """Called while it starts."""
        self.run.check_stop()
        if self.run.clock.used > self.until:
            raise BadInput(f"{self.title}: not ready in {STARTING:.0%} of the time for what it is asked for")

    def keep(self) -> bool:
        """Called while a command asks it: starts it again, at its address, where it has ended. Returns whether it runs.

        Raises: SystemExit after a signal to stop."""
        if self.process is None or (problem := self.process.is_gone()) is None:
            return self.process is not None
        if self.num_starts == MOST_STARTS:
            self.give_up(problem)
            return False
        self.process.close()
        self.num_starts += 1
        self.run.say(f"{problem}: it is started again")
        self.until = self.run.clock.used + STARTING * max(self.run.clock.left, 0.0)
        try:
            self.process.__enter__()
        except BadInput as error:
            self.give_up(str(error))
        return self.process is not None

    def give_up(self, problem: str) -> None:
        """From now on our own engine runs the target. Args: problem: as the client has it; that the server ended says
        more."""
        ended = None if self.process is None else self.process.is_gone()
        self.close()
        self.run.journal.unserved = ended or problem
        self.run.say(f"{ended or problem}: our own engine runs the target")
        self.run.write()

    def give_up_states(self, problem: str) -> None:
        """From now on our own engine gives the states."""
        self.run.journal.stateless = problem
        self.run.say(f"no states from the server: {problem}")
        self.run.write()

    @property
    def source(self) -> TargetConfig:
        settings = self.run.settings
        return TargetConfig(path=settings.target, dtype=settings.dtype, adapter=settings.adapter or None)

    def target(self) -> ServedTarget:
        """The target without its layers, which reads by the server. Raises: BadInput, as `ServedTarget.attach`."""
        assert self.process is not None, "it runs"
        target, layers = ServedTarget.read(self.source), layers_read(self.source, self.heads())
        how = {"label": label_of(self.run.folder), "is_gone": self.process.is_gone}
        target.attach(StateServer(self.process.url, adapter=lora_of(target.adapter), **how), layers)
        return target.to(self.run.settings.device)

    def reading(self, find: Callable[[Target], T], load: Callable[[], Target]) -> T:
        """What is found by the target, without its layers, while the server reads for it; found again where that ended
        meanwhile. Where it gives no states it is ended, and the target loaded."""
        while self.gives_states and self.ready(self.run.clock.left) is not None and self.gives_states:
            target = None
            try:
                target = self.target()
                return find(target)
            except Gone:
                self.keep()
            except BadInput as error:
                if target is not None:
                    raise
                self.give_up_states(str(error))
        self.close()
        try:
            return find(load())
        finally:
            release_memory()

    def train(self, what: str, arguments: list[str], *, name: str, seconds: float, until: float | None) -> StepRecord:
        """Run a `headstart train`, from the server's states where it gives them; again without them if it is given up
        meanwhile. Raises: as `Session.step`."""
        words, how = self.training(), {"name": name, "seconds": seconds, "until": until}
        if not words:
            return self.run.step(what, arguments, **how)
        try:
            record = self.run.step(what, [*arguments, *words], **how, meanwhile=self.keep)
        except BadInput:
            if self.gives_states:
                raise
        else:
            if self.gives_states:
                return record
        return self.run.step(what, arguments, **how)


def layers_read(source: TargetConfig, heads: Sequence[HeadConfig]) -> list[int]:
    """The layers whose states these heads read, of those that fit the target. Raises BadInput if it cannot be built
    without weights."""
    skeleton = load_skeleton(source)
    layers = {skeleton.num_layers}
    for config in heads:
        if not is_built(config):
            with suppress(BadInput):
                layers.update(build_skeleton_head(config, skeleton).feature_layers)
    return sorted(layers)
