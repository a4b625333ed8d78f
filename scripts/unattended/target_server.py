"""The engine's server while an unattended run has the target answer and read: one for both, started when it is first
asked, ended before heads are measured in servers of their own.

It answers the prompts and, of vLLM, gives the target's states to the run and its trainings, whose processes then load
no layer. One that ends is started again at its address; where that does not help, the run ends in a line.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from ...base.errors import BadInput
from ...base.files import remove
from ...data_pipelines.served.reading import ServedTarget, label_of
from ...data_pipelines.served.state_server import Gone, StateServer
from ...data_pipelines.served.vllm_process import beside_training, state_process
from ...engines.servers.process import ServerProcess
from ...engines.servers.registry import SERVER_ENGINES
from ...heads.base import HeadConfig
from ...heads.stored.fit import build_skeleton_head
from ...targets.loading import TargetConfig, release_memory
from ...targets.skeleton import load_skeleton
from ...targets.target import Target
from ...targets.weights.served_adapter import ServedAdapter, lora_of
from ...train.inputs.target import is_built
from .in_server import served_rate, server_of
from .running.session import Session
from .running.steps import StepRecord

ROUNDS = 4  # of answers after each other for which there is time, however many are in flight
MOST_IN_FLIGHT = 128  # questions
PATIENCE = 20  # seconds that a question waits for a server, beside those of a new start
MOST_STARTS = 4  # of a server that ends again and again
STATES = "states"  # the folder in which a server gives them
T = TypeVar("T")


class TargetServer:
    """The server of a run's target. Used in a `with` block.

    problem: why it is not started again; empty: it may be. journal.stateless: why it gives no states."""

    def __init__(self, run: Session[Any, Any], heads: Callable[[], Sequence[HeadConfig]]):
        """Args: heads: those that read its states, called when it is started; it may raise BadInput."""
        self.run, self.heads, self.running = run, heads, ExitStack()
        self.process: ServerProcess | None = None
        self.num_starts, self.until, self.problem = 0, math.inf, ""

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
        is_vllm = server_of(self.run) is not None and self.run.settings.engine.name == "vllm"
        return is_vllm and not self.run.journal.stateless

    @property
    def seconds_to_start(self) -> float:
        """Estimated; 0 where it runs, or our own engine answers."""
        serving = server_of(self.run)
        return 0.0 if serving is None or self.process is not None else serving.start_seconds

    def answering(self) -> list[str]:
        """What `headstart data regenerate` is told of the server, once it is ready; none: our own engine answers.

        Raises: as `url`."""
        run, serving = self.run, server_of(self.run)
        if serving is None:
            return []
        left = run.left_until(run.journal.answers_until)
        url, tokens = self.url(left) or self.url(left), left * served_rate(serving)  # of one without states at last
        in_flight = min(max(int(tokens / (ROUNDS * run.settings.max_new_tokens)), 1), MOST_IN_FLIGHT)
        patience = PATIENCE + math.ceil(2 * serving.start_seconds)
        told = [f"engine.name={run.settings.engine.name}", f"engine.server={url}"]
        return [*told, f"client.concurrency={in_flight}", f"client.patience={patience}"]

    def train(self, what: str, arguments: list[str], *, name: str, seconds: float, until: float | None) -> StepRecord:
        """Run a `headstart train`, from the server's states where it gives them. Raises: as `step` and `url`."""
        if url := self.url(self.run.clock.left) if self.gives_states else "":
            arguments = [*arguments, "engine.name=vllm", f"engine.server={url}", "train.decode_prompts=0"]
        else:
            self.close()  # it would take memory that the training needs
        return self.step(what, arguments, name=name, seconds=seconds, until=until)

    def step(self, what: str, arguments: list[str], *, name: str, seconds: float, until: float | None) -> StepRecord:
        """As `Session.step`, of a command that asks the server, if it runs; this is started again where it ends
        meanwhile. Raises: BadInput too where that does not help."""
        record = self.run.step(what, arguments, name=name, seconds=seconds, until=until, meanwhile=self.keep)
        if self.problem:
            raise BadInput(self.problem)
        return record

    def url(self, left: float) -> str:
        """The address of the server, which is started unless it runs; empty: its start showed that it gives no states.

        Args: left: seconds for what it is asked for. Raises: BadInput if it does not start in that time."""
        if self.process is None:
            serving, stating, self.until = server_of(self.run), self.gives_states, self.run.clock.used + left
            what = f"starting {self.title}'s server for the {'states' if stating else 'answers'}"
            self.run.say(what, seconds=(serving and serving.start_seconds) or None)
            self.num_starts += 1
            try:
                self.process = self.running.enter_context(self.stating() if stating else self.plain())
            except BadInput as error:
                if not stating or self.run.clock.used > self.until:
                    raise
                self.give_up_states(str(error))
        elif not self.keep():
            raise BadInput(self.problem)
        return "" if self.process is None else self.process.url

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
            arguments=["--dtype", dtype, *beside_training()],
            adapter=lora_of(target.adapter),
            log=self.log,
            while_starting=self.check,
        )

    def check(self) -> None:
        """Called while it starts."""
        self.run.check_stop()
        if self.run.clock.used > self.until:
            raise BadInput(f"{self.title}: not ready in the time for what it is asked for")

    def keep(self) -> bool:
        """Called while it is asked: starts it again, at its address, where it has ended. Returns whether that was not
        needed or helped; else `problem` says what is wrong."""
        ended = None if self.process is None else self.process.is_gone()
        if self.process is None or ended is None:
            return True
        if self.num_starts == MOST_STARTS:
            self.problem = ended
            return False
        self.run.say(f"{ended}: it is started again")
        self.num_starts, self.until = self.num_starts + 1, self.run.clock.used + max(self.run.clock.left, 0.0)
        try:
            self.process.close()
            self.process.__enter__()
        except BadInput as error:
            self.problem = str(error)
        return not self.problem

    def give_up_states(self, problem: str) -> None:
        """From now on the target is loaded for its states."""
        self.close()
        self.run.journal.stateless = problem
        self.run.say(f"no states from the server: {problem}")
        self.run.write()

    @property
    def source(self) -> TargetConfig:
        settings = self.run.settings
        return TargetConfig(path=settings.target, dtype=settings.dtype, adapter=settings.adapter or None)

    def target(self) -> ServedTarget | None:
        """The target without its layers, which reads by the server; None: that gives no states. Raises: as `url`, and
        Gone."""
        if not self.gives_states or not self.url(self.run.clock.left) or self.process is None:
            return None
        target, layers = ServedTarget.read(self.source), layers_read(self.source, self.heads())
        how = {"label": label_of(self.run.folder), "is_gone": self.process.is_gone}
        try:
            target.attach(StateServer(self.process.url, adapter=lora_of(target.adapter), **how), layers)
        except Gone:
            raise
        except BadInput as error:
            self.give_up_states(str(error))
            return None
        return target.to(self.run.settings.device)

    def reading(self, find: Callable[[Target], T]) -> T:
        """What is found by the target, without its layers, while the server reads for it; found again where that ended
        meanwhile. Where it gives no states it is ended, and the target loaded. Raises: BadInput, as `step`."""
        while True:
            try:
                if (target := self.target()) is None:
                    break
                return find(target)
            except Gone:
                if not self.keep():
                    raise BadInput(self.problem) from None
        self.close()
        try:
            return find(self.run.load_target())
        finally:
            release_memory()


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
