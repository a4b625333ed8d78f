"""The data of a run: its rows, encoded once into the run folder, or extracted features; and batches of them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from ...base.errors import BadInput, naming, printable
from ...base.files import remove
from ...data_pipelines.loader import BatchPlan, TrainingBatch, collate
from ...data_pipelines.masks.chat import encode_rows
from ...data_pipelines.masks.retokenised import line_on_sources
from ...data_pipelines.row_sequence import RowSequence
from ...data_pipelines.rows.config import DataConfig
from ...data_pipelines.rows.parallel import read_ahead
from ...data_pipelines.rows.samples import Sample
from ...data_pipelines.rows.sources import iter_rows
from ...data_pipelines.served.reading import ServedReader
from ...data_pipelines.storage.features import check_features, origin_of
from ...data_pipelines.storage.shard_file import StoredSample
from ...data_pipelines.storage.shards import Shards, ShardWriter, is_shards, read_manifest
from ...data_pipelines.vocab import always_kept, count_supervised, coverage, covering_size, most_frequent
from ...engines.heads import start_vocabulary
from ...heads.base import DraftHead
from ...targets.target import Target
from .config import Inputs, RunConfig
from .main_process import on_main

LARGE_VOCABULARY = 8192  # tokens; in smaller ones an output layer over all of them costs little
ROWS_AHEAD = 32  # of a server, in flight or ready, beside the batch that is trained on; a batch in any case


@dataclass
class TrainingData:
    """The rows of a run, of at most config.max_length tokens."""

    config: DataConfig
    samples: Shards  # memory-mapped: token ids, masks and, of extracted features, the target's states
    validation: Sequence[StoredSample]
    reader: ServedReader | None = None  # of the states, where a server gives them

    def plan(self, *, batch_size: int, seed: int, num_ranks: int = 1, rank: int = 0) -> BatchPlan:
        """batch_size: rows per rank."""
        block = batch_size * num_ranks
        rows = RowSequence(self.samples.lengths, layout=self.config.layout, block=block, seed=seed)
        return BatchPlan(rows, batch_size, num_ranks, rank)

    def batch(self, rows: Sequence[int]) -> TrainingBatch:
        return self._begun(rows)()

    def batches(self, plan: BatchPlan, numbers: Sequence[int]) -> Iterator[TrainingBatch]:
        """The batches of these numbers, in order, read ahead in a thread. Raises BadInput if a server stays away."""
        begun = (self._begun(plan.rows(number)) for number in numbers)  # a server is asked for several at a time
        depth = 2 if self.reader is None else max(1, ROWS_AHEAD // plan.batch_size)
        return read_ahead(lambda finish: finish(), begun, depth=depth)

    def _begun(self, rows: Sequence[int]) -> Callable[[], TrainingBatch]:
        """Begin to get a batch; returns a function that waits for it."""
        if self.reader is None:
            return lambda: self._collated([self.samples[i] for i in rows])
        coming = self.reader.start([self.samples[i].sample for i in rows])
        return lambda: self._collated(coming())

    def _collated(self, rows: Sequence[StoredSample]) -> TrainingBatch:
        return collate(rows, segment_weights=self.config.segment_weights)


def check_sources(config: DataConfig, *, encoded: Path) -> None:
    """Raises BadInput if there are no such extracted features, or a file of rows is not there or its first row cannot
    be read. Args: encoded: the folder of the rows of data.train, which are not read again where they are in it."""
    if config.features is not None:
        read_manifest(Path(config.features))
    elif not (encoded / "manifest.json").is_file():
        next(iter_rows(config.train), None)
    if config.validation and extracted_validation(config) is None:
        next(iter_rows(config.validation), None)


def load_data(run: RunConfig, target: Target, accelerator: Accelerator, console: Console) -> TrainingData:
    """The run's samples: those that an earlier start left in its folder, else encoded there now.

    Args: target: with or without weights. Raises: BadInput, in every process, if there is nothing to train on.
    """
    config = replace(run.data, max_length=min(run.data.max_length, target.num_positions))
    validation = validation_rows(config, target, console)
    if isinstance(validation, Shards):
        on_main(accelerator, validation.verify)
    if config.features is not None:
        features = Shards(Path(config.features))
        on_main(accelerator, features.verify)
        return TrainingData(config, features, validation)
    folder = Path(run.train.output_dir, "tokens")
    is_begun = (folder.parent / "config.yaml").is_file()
    on_main(accelerator, lambda: encode_into(folder, config, target, console, is_begun=is_begun))
    if not folder.is_dir():
        raise BadInput(f"train.output_dir {run.train.output_dir}: not on a disk that all nodes share")
    return TrainingData(config, Shards(folder), validation)


def validation_rows(config: DataConfig, target: Target, console: Console) -> Sequence[StoredSample]:
    """The rows of data.validation, with states if that is a folder of extracted features. Raises BadInput if there are
    none to supervise."""
    if (extracted := extracted_validation(config)) is not None:
        return extracted
    rows = iter_rows(config.validation) if config.validation else ()
    counts, problems = Counter[str](), list[str]()
    encoded = encode_rows(
        rows, target.tokenizer, config, counts=counts, problems=problems, vocab_size=target.vocab_size
    )
    validation = [StoredSample(sample) for sample in encoded]
    if config.validation and not validation:
        problem = f"no row has supervised tokens in data.max_length {config.max_length}"
        raise BadInput(f"data.validation: {problem}: {summary_of(counts)}")
    say_what_changed("data.validation", counts, problems, console)
    return validation


def extracted_validation(config: DataConfig) -> Shards | None:
    """data.validation, if it is a folder that `headstart data extract` wrote. Raises BadInput if it is unfinished."""
    folder = Path(config.validation).expanduser() if isinstance(config.validation, str) and config.validation else None
    return None if folder is None or not is_shards(folder) else Shards(folder)


def encode_into(folder: Path, config: DataConfig, target: Target, console: Console, *, is_begun: bool) -> None:
    """Write the rows of data.train as a folder of samples, unless it exists already.

    Raises: BadInput if no token of the rows can be drafted, or a run that has begun used other rows.
    """
    origin = rows_of(config, target.tokenizer)
    if (folder / "manifest.json").is_file():
        written = read_manifest(folder).fields
        key = next((key for key, value in origin.items() if written.get(key) != value), None)
        if key is None:
            return
        if is_begun:
            raise BadInput(f"{folder.parent}: its rows were encoded from another {key}; choose another folder")
    remove(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"train.output_dir {folder.parent}: {error.strerror}") from error
    counts, problems, sources = Counter[str](), list[str](), Counter[str]()
    writer = ShardWriter(folder, fields=origin)
    rows = iter_rows(config.train, num_rows=config.num_rows)
    how: dict[str, Any] = {"counts": counts, "problems": problems, "vocab_size": target.vocab_size}
    for sample in encode_rows(rows, target.tokenizer, config, is_used=has_token_to_draft, **how):
        sources[sample.source] += 1
        writer.add(StoredSample(sample))
    summary = summary_of(counts)
    if not counts["kept"]:
        limit = f"in data.max_length {config.max_length}"
        raise BadInput(f"data.train: no row has a token to draft (two supervised tokens in a row) {limit}: {summary}")
    writer.finish()
    say_what_changed("data.train", counts, problems, console)
    rows = iter_rows(config.train, num_rows=config.num_rows)
    if line := line_on_sources(sources, rows, target.tokenizer, config, vocab_size=target.vocab_size):
        console.print(f"data.train: {line}", soft_wrap=True)


def has_token_to_draft(sample: Sample) -> bool:
    """Whether a chain can start in it: a step of other samples alone would teach nothing."""
    return bool((sample.loss_mask[1:-1] & sample.loss_mask[2:]).any())


def rows_of(config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Everything that the encoded rows depend on, except where files are; without `data.train` if these are gone."""
    origin = origin_of(config, tokenizer)
    settings = {f"data.{key}": value for key, value in json.loads(json.dumps(origin.pop("data"))).items()}
    return {**settings, **{"data.train" if key == "rows" else key: value for key, value in origin.items()}}


def say_what_changed(key: str, counts: Counter[str], problems: Sequence[str], console: Console) -> None:
    """A line on what `encode_rows` did not take whole: rows that it cut, split or dropped, and the first it refused."""
    if counts["cut"] or counts["split"] or counts["dropped"]:
        named = "".join(f"; the first refused: {printable(problem)}" for problem in problems)
        console.print(f"{key}: {summary_of(counts)}{named}", soft_wrap=True, highlight=False)


def summary_of(counts: Counter[str]) -> str:
    """The counts of `encode_rows` in one line."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def with_draft_vocabulary(
    run: RunConfig, data: TrainingData, target: Target, console: Console
) -> tuple[RunConfig, Tensor | None]:
    """The run with the head.draft_vocab_size that train.draft_coverage asks for, where it is not given; and [Vd] the
    ascending target ids to draft, None if these are all, or those of the head to start from. Prints what they cover.

    A head that starts from another one drafts what that one does, and if it is to draft more tokens, the data's most
    frequent ones besides.

    Raises: BadInput if the family drafts the whole vocabulary only, or the head to start from cannot be read.
    """
    size, share, folder = run.head.draft_vocab_size, run.train.draft_coverage, run.train.start_from
    if size is None and (not share or target.vocab_size < LARGE_VOCABULARY):
        return run, None
    start: list[int] = []
    if folder is not None:
        with naming("train.start_from: "):
            start = start_vocabulary(run.head, target, folder) or []
        size = size or len(start) or None
        if not start or size is None or len(start) >= size:
            return with_draft_size(run, size), None
    samples = (data.samples[i].sample for i in range(len(data.samples)))
    counts = count_supervised(samples, vocab_size=target.vocab_size)
    always = always_kept(target.tokenizer, eos_token_ids=target.eos_token_ids, vocab_size=target.vocab_size)
    size = size or covering_size(counts, always, share=share)
    if size is None:
        return run, None
    more = [token for token in always if token not in start][: size - len(start)]
    ids = most_frequent(counts, size=size, always=[*start, *more])
    console.print(f"draft vocabulary: {size} of {target.vocab_size} tokens, {coverage(counts, ids):.1%} of the answers")
    return with_draft_size(run, size), ids


def with_draft_size(run: RunConfig, size: int | None) -> RunConfig:
    """The run with this head.draft_vocab_size. Raises BadInput if the family drafts the whole vocabulary only."""
    return replace(run, head=replace(run.head, draft_vocab_size=size))


def count_rows(inputs: Inputs, target: Target) -> tuple[np.ndarray, int]:
    """How often each token of data.train is supervised, [V], and how many rows were kept."""
    config = replace(inputs.data, max_length=min(inputs.data.max_length, target.num_positions))
    counts: Counter[str] = Counter()
    rows = iter_rows(config.train, num_rows=config.num_rows)
    samples = encode_rows(rows, target.tokenizer, config, counts=counts, vocab_size=target.vocab_size)
    return count_supervised(samples, vocab_size=target.vocab_size), counts["kept"]


def check_stored_states(data: TrainingData, head: DraftHead, target: Target) -> None:
    """Raises BadInput if extracted features are not what this head reads of this target."""
    if data.config.features is not None:
        check_features(data.samples, head, target, data=data.config)
    if isinstance(data.validation, Shards):
        check_features(data.validation, head, target, data=data.config, key="data.validation")
