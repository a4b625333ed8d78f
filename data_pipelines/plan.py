"""`headstart data plan`: compares running the target in every epoch with extracting its hidden states once.

Rates are measured on samples of the run's own data. Each pass times the target alone and then, for each storage dtype,
the whole extraction (with writing shards) and reading the shards back. Passes are repeated as time allows, so that a
drift of the machine's speed affects all rates alike.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import torch

from ..heads.target import Target
from .storage.extract import ExtractConfig, Extraction, batches, disk_free, fields_of, in_bytes, padded
from .storage.features import Reads
from .storage.quantise import STORAGE
from .storage.samples import Sample
from .storage.shard_file import StoredSample
from .storage.shards import PROGRESS, Shards, ShardWriter

NUM_SHARDS = 8  # number of shards that the measured samples are written to
NUM_PASSES = 3  # number of passes that rates are computed from
EXTRACTED = 1.5  # approximate time to extract in one dtype and read back, relative to the target's forwards
SURVEY_SHARE = 0.3  # share of the time limit for tokenising and counting rows
LEAST_LEFT = 40  # tokens to extract for each one that an estimate reads: it reads these four times
NUM_PROBED = 32  # rows that are tokenised to estimate how long all rows take


@dataclass
class Survey:
    """Sizes of a run's samples, and a uniform random selection of the samples themselves."""

    num_rows: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STORAGE, 0))  # extracted, by storage dtype
    drawn: list[Sample] = field(default_factory=list)
    stride: int = 1  # every stride-th row was counted, and the sizes are scaled by it

    def scaled(self, stride: int) -> "Survey":
        """The estimate for all rows, from a survey of every stride-th row."""
        return replace(
            self,
            num_rows=stride * self.num_rows,
            num_tokens=stride * self.num_tokens,
            num_supervised_tokens=stride * self.num_supervised_tokens,
            num_bytes={name: stride * size for name, size in self.num_bytes.items()},
            stride=stride,
        )


def survey_samples(samples: Iterable[Sample], reads: Reads, *, hidden_size: int, num_drawn: int) -> Survey:
    """Survey the samples in one pass (reservoir sampling with a fixed seed); only drawn samples stay in memory.

    Args: hidden_size: D of the target. num_drawn: number of samples to draw.
    """
    survey, source = Survey(), random.Random(0)
    for sample in samples:
        if len(survey.drawn) < num_drawn:
            survey.drawn.append(sample)
        elif (index := source.randrange(survey.num_rows + 1)) < num_drawn:
            survey.drawn[index] = sample
        survey.num_rows += 1
        survey.num_tokens += len(sample)
        survey.num_supervised_tokens += int(sample.loss_mask.sum())
        for name in STORAGE:
            survey.num_bytes[name] += reads.row_bytes(sample.loss_mask, hidden_size=hidden_size, storage_dtype=name)
    return survey


def row_stride(rows: Iterator[Any], encode: Callable[[list[Any]], object], *, seconds: float) -> int:
    """The smallest N such that encoding every Nth row takes about `seconds`, estimated on the first rows.

    Reads all rows. Args: encode: tokenises a list of rows.
    """
    encode(list(islice(rows, 1)))  # the first call compiles the chat template
    probed = list(islice(rows, NUM_PROBED))
    started = time.perf_counter()
    encode(probed)
    spent = time.perf_counter() - started
    num_left = sum(1 for _ in rows)
    return max(1, math.ceil(num_left / NUM_PROBED * spent / seconds))


def samples_for_time(samples: Sequence[Sample], target: Target, *, seconds: float) -> list[Sample]:
    """The first samples, at least one, that `measure_storages` measures in all storage dtypes in about `seconds`,
    estimated by timing a forward over the sample of median length."""
    median = sorted(samples, key=len)[len(samples) // 2]
    ids = padded([median], device=target.device)
    spent = 0.0
    for _ in range(2):  # the first forward fills caches and compiles kernels
        started = time.perf_counter()
        target.read_texts(ids)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        spent = time.perf_counter() - started
        if spent > seconds / 10:
            break
    num_tokens = seconds / (1 + EXTRACTED * len(STORAGE)) / (NUM_PASSES + 1) * len(median) / spent
    chosen = [sample for sample, end in zip(samples, accumulate(map(len, samples)), strict=True) if end <= num_tokens]
    return chosen or [min(samples, key=len)]


@dataclass
class ExtractionRates:
    """Tokens per second of one process: the target alone, extraction, and reading the extracted states."""

    forward: float
    extraction: float
    reading: float
    spread: float = 0.0  # (slowest - fastest) / mean over passes, of forwards or extraction, whichever is larger
    num_passes: int = NUM_PASSES

    @property
    def ratio(self) -> float:
        """The rate of extraction relative to that of the target alone."""
        return self.extraction / self.forward


def measure_storages(
    samples: Sequence[Sample],
    target: Target,
    reads: Reads,
    *,
    configs: Sequence[ExtractConfig],
    folder: Path,
    num_passes: int = NUM_PASSES,
    seconds: float = math.inf,
) -> list[ExtractionRates]:
    """Measure the rates of extracting these samples with each config.

    The samples are written in several shards if they are several batches, because a long run writes one shard while the
    target reads the next. The first pass only warms up caches; its times are used only if there is no time for another
    pass.

    Args:
        folder: a folder on the disk to measure.
        num_passes: passes after the first one.
        seconds: time limit; no further pass starts that would exceed it.
    Returns: the rates for each config, in order.
    """
    began, passes = time.perf_counter(), list[list[float]]()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".plan.") as temporary:
        writer = ShardWriter(Path(temporary, "tokens"))
        for sample in samples:
            writer.add(StoredSample(sample))
        writer.finish()
        tokens = Shards(Path(temporary, "tokens"))
        extractions = [sharded_extraction(tokens, target, reads, config) for config in configs]
        while not passes or (len(passes) <= num_passes and time.perf_counter() - began + sum(passes[-1]) <= seconds):
            passes.append(timed_pass(extractions, Path(temporary, str(len(passes)))))
    timed = passes[1:] or passes  # the first one warms up
    num_tokens = len(timed) * sum(map(len, samples))
    forward, *others = zip(*timed, strict=True)  # seconds by pass
    rates = []
    for extraction, reading in zip(others[::2], others[1::2], strict=True):
        tokens_per_second = [num_tokens / sum(seconds) for seconds in (forward, extraction, reading)]
        spread = max(relative_range(forward), relative_range(extraction))
        rates.append(ExtractionRates(*tokens_per_second, spread=spread, num_passes=len(timed)))
    return rates


def relative_range(seconds: Sequence[float]) -> float:
    """How far the passes lie apart, relative to their mean."""
    return len(seconds) * (max(seconds) - min(seconds)) / sum(seconds)


def sharded_extraction(tokens: Shards, target: Target, reads: Reads, config: ExtractConfig) -> Extraction:
    """The extraction of the measured samples in about NUM_SHARDS shards, but none smaller than a batch, as the target
    reads a few rows less efficiently."""
    size = Extraction(tokens, target, reads, config=config, fields={}).num_bytes
    num_shards = min(NUM_SHARDS, max(1, int(tokens.lengths.sum()) // config.batch_tokens))
    config = replace(config, shard_bytes=max(1, min(config.shard_bytes, size // num_shards)))
    return Extraction(tokens, target, reads, config=config, fields=fields_of(target, reads, config, {}))


def timed_pass(extractions: Sequence[Extraction], folder: Path) -> list[float]:
    """Seconds for the target alone, then for each extraction: for running it, and for reading the states back."""
    marks = [time.perf_counter()]
    run_target(extractions[0])
    marks.append(time.perf_counter())
    for number, extraction in enumerate(extractions):
        output = folder / str(number)
        extraction.run(output)
        extraction.finish(output)
        marks.append(time.perf_counter())
        _ = [stored.states for stored in Shards(output)]
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


def estimate(extraction: Extraction, output: Path, *, num_ranks: int = 1, is_served: bool = False) -> str:
    """A line for the log: the size of the extraction, and the hours that its missing shards will take.

    The time is measured on a few batches. Args: num_ranks: number of processes that share the work. is_served: the
        states come from a server: no hours.
    """
    samples, config = extraction.samples, extraction.config
    written = ShardWriter(output, fields=extraction.fields).done
    left = extraction.num_tokens(skip=written)
    if not left:
        return "all shards are complete"
    size, tokens = extraction.num_bytes, extraction.num_tokens()
    line = (
        f"{tokens:,} tokens, {in_bytes(size)} in {config.storage_dtype} ({size / tokens:.1f} bytes per token), "
        f"{in_bytes(disk_free(output))} free"
    )
    if is_served:
        return f"{line}; {left:,} tokens still to be asked for"
    num_sampled = max(1, int(min(4 * config.batch_tokens, left / LEAST_LEFT) / samples.lengths.mean()))
    chosen = [samples[i].sample for i in range(0, len(samples), max(1, len(samples) // num_sampled))][:num_sampled]
    how: dict[str, Any] = {"configs": [config], "folder": output / PROGRESS, "num_passes": 1}
    [rates] = measure_storages(chosen, extraction.target, extraction.reads, **how)
    hours = left / rates.extraction / num_ranks / 3600
    return f"{line}; about {in_hours(hours)} for the {left:,} tokens still to be extracted"


def in_hours(hours: float) -> str:
    """A duration as text, such as `2.1 hours` or `3.4 minutes`."""
    return f"{hours:.3g} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"


@torch.no_grad()
def run_target(extraction: Extraction) -> None:
    """Run the target alone, without keeping states, on the same batches as the extraction."""
    samples, device = extraction.samples, extraction.target.device
    for rows in extraction.shards:
        lengths = samples.lengths[rows.start : rows.stop]
        for batch in batches(lengths, batch_tokens=extraction.config.batch_tokens):
            extraction.target.read_texts(padded([samples[rows.start + int(i)].sample for i in batch], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
