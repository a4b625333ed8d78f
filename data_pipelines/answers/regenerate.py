"""Regenerates the answers of rows with the target itself, because a head drafts what the target would write."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ...base.errors import BadInput
from ...base.files import LocalPath, from_anywhere
from ...base.owned import check_owner
from ...engines.neutral_sampling import NEUTRAL
from ...engines.servers.setting import OURS, EngineSetting
from ...targets.chat.rows import VARIABLES, check_variables
from ..rows.config import TURNS, check_at_least_one, check_choice
from ..rows.sources import iter_rows, read_sources
from .conversations import Exchange, Failure, SamplingConfig, exchanges
from .dispatch import Outcome
from .store import COMMAND, AnswerStore, RunIndex, RunSummary

BY_IDS, BY_MESSAGES = ("vllm", "sglang"), "openai"  # how servers of these names are asked


@dataclass(kw_only=True, frozen=True)
class ClientConfig:
    """How requests are sent to servers."""

    concurrency: int = 64  # concurrent requests per server
    timeout: float = 900.0  # seconds for an answer
    num_attempts: int = 6  # per answer; attempts that reach no server are not counted
    backoff: float = 0.5  # seconds before the second attempt, doubled before each later one
    patience: float = 600.0  # seconds without any answer from any server after which the run stops
    extra_body: dict[str, Any] = field(default_factory=dict)  # further keys of each request, e.g. {min_p: 0.05}

    def __post_init__(self) -> None:
        check_at_least_one(concurrency=self.concurrency, num_attempts=self.num_attempts)
        check_variables(self.extra_body.get(VARIABLES, {}), f"extra_body.{VARIABLES}")
        for name in ("timeout", "backoff", "patience"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{name} {getattr(self, name)}: expected more than 0")


@dataclass(kw_only=True, frozen=True)
class EngineConfig(EngineSetting):
    """What answers; with what our own engine is told, which runs in this process."""

    dtype: str = "auto"
    device: str | None = None  # None: cuda where there is one
    revision: str | None = None
    adapter: LocalPath | None = None  # a folder of a LoRA adapter (peft): the target answers as served with it
    batch_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_name(OURS, *BY_IDS, BY_MESSAGES)
        check_at_least_one(batch_size=self.batch_size)
        ours = {"dtype": self.dtype != "auto", "device": self.device}
        ours |= {"adapter": self.adapter} if self.name != "vllm" else {}
        if key := next((key for key, value in ours.items() if value and not self.is_ours), None):
            raise BadInput(f"{key}: goes with name: {OURS}")
        if self.name == BY_MESSAGES and not self.server:
            raise BadInput(f"server: name {BY_MESSAGES} is of one that runs, such as http://localhost:8000")
        if self.name == BY_MESSAGES and self.revision:
            raise BadInput(f"revision: a server of name {BY_MESSAGES} has the one that it was started with")


@dataclass(kw_only=True)
class RegenerateConfig:
    """Which prompts are answered, by whom, and how."""

    sources: str | list[str | dict[str, Any]]  # a `Source` of sources.py, or a list of them
    output: LocalPath  # the folder to fill
    target: LocalPath  # a local folder or hub id; of engine.name openai, its name at the server
    turns: str = "all"  # `all`: each assistant turn is answered, after the new answers before it; or only the `last`
    num_rows: int | None = None  # the first rows only, over all sources
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check_choice("turns", self.turns, TURNS)
        check_at_least_one(num_rows=self.num_rows)
        for name in ("output", "target"):
            if not getattr(self, name):
                raise BadInput(f"{name}: is empty")
        if self.client.extra_body and self.engine.is_ours:
            raise BadInput(f"client.extra_body: goes with a server; engine.name is {OURS}")
        if VARIABLES in self.client.extra_body and self.engine.name in BY_IDS:
            key = f"client.extra_body.{VARIABLES}"
            raise BadInput(f"{key}: prompts are rendered here; give sampling.{VARIABLES}")

    @property
    def recorded_target(self) -> str:
        """The target in settings and rows, the same from any working directory; a name at a server as it is."""
        return self.target if self.engine.name == BY_MESSAGES else from_anywhere(self.target)


@dataclass
class RunProgress:
    """How far a run is, counted in conversations."""

    num_all: int
    num_answered: int
    num_failed: int = 0


class Answerer(Protocol):
    """`by_threads`, `in_batches` or `joining` with all other arguments bound; yields outcomes in any order."""

    def __call__(self, conversations: Iterable[Exchange], *, is_done: Callable[[str], bool]) -> Iterator[Outcome]: ...


def regenerate(
    config: RegenerateConfig,
    answers: Answerer,
    *,
    target_identity: Mapping[str, Any] | None = None,
    show: Callable[[RunProgress], None] = lambda progress: None,
) -> RunSummary:
    """Answer every conversation of the sources that has no answer yet.

    Rows are read twice: first to find all errors in them before the first request, then to answer them.

    Args:
        answers: yields the outcome of each conversation that is not done.
        target_identity: what is known of the target that answers, for the settings.
        show: called after each outcome.

    Raises: BadInput on rows without a prompt, on a folder that was started with other settings or rows, and if no
        request can succeed any more. Answers so far are kept, and a later call with the same settings resumes.
    """
    index = RunIndex.of(conversations(config))
    with AnswerStore(config.output, _settings(config, index, target_identity or {})) as store:
        if (summary := store.finished()) is not None:
            return summary
        progress = RunProgress(num_all=len(index.source_ids), num_answered=len(store))
        show(progress)
        failed: dict[str, dict[str, Any]] = {}
        for key, outcome in answers(_each_once(conversations(config)), is_done=store.__contains__):
            if key in store:
                continue
            if isinstance(outcome, Failure):
                failed[key] = {"id": key, "source_id": index.source_ids[key], "problem": str(outcome)}
            else:
                store.add(key, {**outcome, "target": config.recorded_target})
            progress.num_answered, progress.num_failed = len(store), len(failed)
            show(progress)
        return store.finish(index, failed)


def check_prompts(config: RegenerateConfig) -> None:
    """Raises BadInput on what `regenerate` would refuse of rows and output folder, before a target is loaded."""
    check_owner(config.output, command=COMMAND)
    deque(conversations(config), maxlen=0)


def conversations(config: RegenerateConfig) -> Iterator[Exchange]:
    """What is asked, row by row. Raises BadInput on rows without a prompt."""
    for row in iter_rows(config.sources, num_rows=config.num_rows):
        yield from exchanges(row, config.sampling, turns=config.turns)


def _each_once(exchanges: Iterable[Exchange]) -> Iterator[Exchange]:
    keys = set()
    for exchange in exchanges:
        if exchange.key not in keys:
            keys.add(exchange.key)
            yield exchange


def _settings(config: RegenerateConfig, index: RunIndex, target_identity: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the answers depend on; not the servers' addresses or concurrency."""
    engine, client = config.engine, config.client
    by_servers = {"by": engine.name, "args": engine.args, "extra_body": client.extra_body}
    by_servers |= {"neutral_unless_chosen": NEUTRAL}
    by_engine = {"by": "engine", "dtype": engine.dtype, "batch_size": engine.batch_size}  # for rounding
    return {
        "target": config.recorded_target,
        "target_fingerprint": None,
        **target_identity,
        **(by_engine if engine.is_ours else by_servers),
        **{name: getattr(config, name) for name in ("turns", "num_rows")},
        "sampling": {source.called: asdict(config.sampling) for source in read_sources(config.sources)},
        "rows_sha256": hashlib.sha256("".join(index.source_ids).encode()).hexdigest(),
    }
