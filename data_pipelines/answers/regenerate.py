"""Rows answered anew by the target itself: a draft head learns from what the target says, not from what others said."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ...configs.errors import BadInput
from ...configs.loader import build
from ..sources import iter_rows, read_sources
from .answers import Failure, Outcome, SamplingConfig
from .client import ClientConfig
from .conversations import Exchange, exchanges
from .store import AnswerStore

TURNS = ("all", "last")


@dataclass(kw_only=True, frozen=True)
class EngineConfig:
    """How the target is run in this process, where there are no servers. device: None: cuda where there is one."""

    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadInput(f"batch_size {self.batch_size}: expected at least 1")


@dataclass(kw_only=True)
class RegenerateConfig:
    """What is asked, of whom, and how.

    sources: where rows come from, see sources.py; a mapping may have a `sampling` of its own, whose keys win over
    `sampling`. output: the folder to fill. target: the name by which `servers` serve it, or without servers a local
    folder or hub id. turns: `all` assistant turns are asked anew, each with the new answers before it, or the `last`.
    num_rows: the first rows only, over all sources. drop_truncated: leave answers that were cut out of answers.jsonl.
    servers: URLs as http://localhost:8000/v1; none: the target runs in this process.
    """

    sources: str | list[str | dict[str, Any]]
    output: str
    target: str
    turns: str = "all"
    num_rows: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drop_truncated: bool = False
    servers: list[str] = field(default_factory=list)
    client: ClientConfig = field(default_factory=ClientConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise BadInput(f"turns {self.turns!r}: expected {' or '.join(TURNS)}")
        if self.num_rows is not None and self.num_rows < 1:
            raise BadInput(f"num_rows should be at least 1, got {self.num_rows}")
        for name in ("output", "target"):
            if not getattr(self, name):
                raise BadInput(f"{name}: is empty")


@dataclass
class Progress:
    """How far a run is, counted in conversations. num_tokens: of the answers of this run."""

    num_all: int
    num_answered: int
    num_failed: int = 0
    num_tokens: int = 0


class Answers(Protocol):
    """`by_threads` or `in_batches`, told by whom: outcomes in any order."""

    def __call__(self, conversations: Iterable[Exchange], *, is_done: Callable[[str], bool]) -> Iterator[Outcome]: ...


def regenerate(
    config: RegenerateConfig,
    answers: Answers,
    *,
    target_fingerprint: str | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Have every conversation of the sources answered that is not yet; returns the manifest.

    Rows are read twice: once to find all that is wrong with them before anything is asked, once to ask.

    Args:
        answers: yields what becomes of each conversation that is not done.
        target_fingerprint: of the weights, where they are known.
        show: told how far it is, after each outcome.

    Raises: BadInput on rows that cannot be asked, on a folder begun with other settings or other rows, and where
        nothing can be answered any more; what was answered is kept, and the same call goes on from there.
    """
    sampling_of = source_samplings(config)
    survey = Survey.of(conversations(config, sampling_of))
    settings = _settings(config, sampling_of, survey, target_fingerprint)
    with AnswerStore(config.output, settings) as store:
        if (manifest := store.finished()) is not None:
            return manifest
        progress = Progress(num_all=len(survey.keys), num_answered=len(store))
        show(progress)
        failed: dict[str, dict[str, Any]] = {}
        for key, outcome in answers(_each_once(conversations(config, sampling_of)), is_done=store.__contains__):
            if key in store:
                continue
            if isinstance(outcome, Failure):
                failed[key] = {"id": key, "source_id": survey.keys[key], "problem": str(outcome)}
            else:
                store.add(key, {**outcome, "target": config.target})
                progress.num_tokens += outcome["usage"]["completion_tokens"]
            progress.num_answered, progress.num_failed = len(store), len(failed)
            show(progress)
        return store.finish(
            survey.keys,
            [failed[key] for key in survey.keys if key in failed],
            keep=lambda row: not (config.drop_truncated and row["truncated"]),
            more={"servers": config.servers, "rows": survey.num_rows, "duplicates": survey.num_duplicates},
        )


def conversations(config: RegenerateConfig, sampling_of: Mapping[str, SamplingConfig]) -> Iterator[Exchange]:
    """The conversations of all rows, in order."""
    for row in iter_rows(_plain_sources(config), num_rows=config.num_rows):
        yield from exchanges(row, sampling_of[row.source], turns=config.turns)


def source_samplings(config: RegenerateConfig) -> dict[str, SamplingConfig]:
    """How answers are sampled, by the name of the source. BadInput: one name with two ways."""
    specs = config.sources if isinstance(config.sources, list) else [config.sources]
    found: dict[str, SamplingConfig] = {}
    for index, (spec, source) in enumerate(zip(specs, read_sources(_plain_sources(config)), strict=True)):
        own = spec.get("sampling") if isinstance(spec, dict) else None
        if own is not None and not isinstance(own, dict):
            raise BadInput(f"sources.{index}.sampling: should be a mapping of keys, got {own!r}")
        sampling = build(SamplingConfig, {**asdict(config.sampling), **(own or {})}, where=f"sources.{index}.sampling")
        if found.setdefault(source.called, sampling) != sampling:
            raise BadInput(f"sources.{index}: another {source.called!r} is sampled otherwise; give them a `name` each")
    return found


@dataclass
class Survey:
    """All conversations of a run before it starts. keys: of each, in order, with the id of its row."""

    keys: dict[str, str]
    num_rows: int
    num_duplicates: int

    @classmethod
    def of(cls, every: Iterable[Exchange]) -> "Survey":
        survey = cls({}, 0, 0)
        for one in every:
            survey.num_rows += one.sample == 0
            survey.num_duplicates += one.key in survey.keys
            survey.keys.setdefault(one.key, one.source_id)
        return survey

    def digest(self) -> str:
        digest = hashlib.sha256()
        for key in self.keys:
            digest.update(key.encode())
        return digest.hexdigest()


def _each_once(every: Iterable[Exchange]) -> Iterator[Exchange]:
    seen = set()
    for one in every:
        if one.key not in seen:
            seen.add(one.key)
            yield one


def _plain_sources(config: RegenerateConfig) -> list[str | dict[str, Any]]:
    """The sources without what is ours."""
    specs = config.sources if isinstance(config.sources, list) else [config.sources]
    return [
        {key: value for key, value in spec.items() if key != "sampling"} if isinstance(spec, dict) else spec
        for spec in specs
    ]


def _settings(
    config: RegenerateConfig,
    sampling_of: Mapping[str, SamplingConfig],
    survey: Survey,
    target_fingerprint: str | None,
) -> dict[str, Any]:
    """All that the answers depend on; not which servers give them, nor how they are asked."""
    if config.servers:
        runs = {"extra_body": config.client.extra_body}
    else:  # rounding depends on the dtype, and sampling on the batch
        runs = {"dtype": config.engine.dtype, "batch_size": config.engine.batch_size}
    return {
        "target": config.target,
        "target_fingerprint": target_fingerprint,
        "by": "servers" if config.servers else "engine",
        **runs,
        "turns": config.turns,
        "num_rows": config.num_rows,
        "drop_truncated": config.drop_truncated,
        "sampling": {name: asdict(sampling) for name, sampling in sampling_of.items()},
        "rows_sha256": survey.digest(),
    }
