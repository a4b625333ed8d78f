"""`headstart data plan`: what it costs to run the target in every epoch, and what to extract its states once.

Rates are measured on samples of the run, and interleaved: a pass of the target alone, then one of the whole extraction
in each storage dtype, shards on disk included, then the same again, as often as the time allows.
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

NUM_SHARDS = 8  # that a measured sample is written in
NUM_PASSES = 3  # that count
EXTRACTED = 1.5  # approximate time of extracting in one dtype and reading it back, in forwards of the target
SURVEY_SHARE = 0.3  # of the time, for encoding and counting rows
NUM_PROBED = 32  # rows that are encoded to see how long that takes


@dataclass
class Survey:
    """The samples of a run, in numbers, and some of them, drawn evenly."""

    num_rows: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STORAGE, 0))  # of extraction, by dtype
    drawn: list[Sample] = field(default_factory=list)
    every: int = 1  # every Nth row was counted, and the numbers are scaled by N

    def of_all(self, every: int) -> "Survey":
        """What it says of all rows, where it saw one of so many."""
        size = {name: every * found for name, found in self.num_bytes.items()}
        rows, tokens, supervised = self.num_rows, self.num_tokens, self.num_supervised_tokens
        return Survey(every * rows, every * tokens, every * supervised, size, self.drawn, every)


def survey_samples(samples: Iterable[Sample], reads: Reads, *, hidden_size: int, num_drawn: int) -> Survey:
    """One pass over the samples, one in memory at a time besides those that are drawn (the same ones every time)."""
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


def one_of(rows: Iterator[Any], encode: Callable[[list[Any]], object], *, seconds: float) -> int:
    """N such that every Nth row can be encoded in that time: judged by the first ones. Reads all rows."""
    encode(list(islice(rows, 1)))  # a template is compiled
    probed = list(islice(rows, NUM_PROBED))
    started = time.perf_counter()
    encode(probed)
    spent = time.perf_counter() - started
    left = sum(1 for _ in rows)
    return max(1, math.ceil(left / NUM_PROBED * spent / seconds))


def within(
    samples: Sequence[Sample],
    target: Target,
    *,
    seconds: float,
    num_passes: int = NUM_PASSES,
    num_storages: int = 1,
) -> list[Sample]:
    """As many of the samples as `measure_rates` takes about that long for, one at least; judged by a timed forward."""
    read = sorted(samples, key=len)[len(samples) // 2]
    ids = padded([read], device=target.device)
    spent = 0.0
    for _ in range(2):  # the first fills caches and compiles
        started = time.perf_counter()
        target.forward(ids)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        spent = time.perf_counter() - started
        if spent > seconds / 10:
            break
    num_tokens = seconds / (1 + EXTRACTED * num_storages) / (num_passes + 1) * len(read) / spent
    kept = [sample for sample, end in zip(samples, accumulate(map(len, samples)), strict=True) if end <= num_tokens]
    return kept or [min(samples, key=len)]


@dataclass
class Rates:
    """Tokens per second of the target alone, of extraction, and of reading what that wrote."""

    forward: float
    extraction: float
    reading: float
    spread: float = 0.0  # of the passes: the largest difference of a forward's or an extraction's time, over its mean
    num_passes: int = NUM_PASSES

    @property
    def ratio(self) -> float:
        """Extraction's share of the target's own rate."""
        return self.extraction / self.forward


def measure_rates(
    samples: Sequence[Sample],
    target: Target,
    reads: Reads,
    *,
    config: ExtractConfig,
    folder: Path | None = None,
    num_passes: int = NUM_PASSES,
) -> Rates:
    """`measure_storages` of one config."""
    return measure_storages(samples, target, reads, configs=[config], folder=folder, num_passes=num_passes)[0]


def measure_storages(
    samples: Sequence[Sample],
    target: Target,
    reads: Reads,
    *,
    configs: Sequence[ExtractConfig],
    folder: Path | None = None,
    num_passes: int = NUM_PASSES,
    seconds: float = math.inf,
) -> list[Rates]:
    """Rates on these samples, in the batches of each config, beside the same passes of the target alone.

    They are written in several shards, as a long run writes them: each while the target reads the next. The first pass,
    in which caches fill, is left out, where there is time for a second one.

    Args: folder: on the disk to be measured; None: the temporary one. seconds: no second pass that would end later.
    """
    began, passes = time.perf_counter(), list[list[float]]()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".plan.") as temporary:
        writer = ShardWriter(Path(temporary, "tokens"))
        for sample in samples:
            writer.add(StoredSample(sample))
        writer.finish()
        tokens = Shards(Path(temporary, "tokens"))
        extractions = [in_shards(tokens, target, reads, config) for config in configs]
        while not passes or (len(passes) <= num_passes and time.perf_counter() - began + sum(passes[-1]) <= seconds):
            passes.append(timed_pass(extractions, Path(temporary, str(len(passes)))))
    columns = list(zip(*(passes[1:] or passes), strict=True))  # of forwards, then extractions and readings by turns
    forward, num_tokens = columns[0], sum(map(len, samples))
    rates = []
    for written, read in zip(columns[1::2], columns[2::2], strict=True):
        each = [len(forward) * num_tokens / sum(times) for times in (forward, written, read)]
        spread = max(len(times) * (max(times) - min(times)) / sum(times) for times in (forward, written))
        rates.append(Rates(*each, spread=spread, num_passes=len(forward)))
    return rates


def in_shards(tokens: Shards, target: Target, reads: Reads, config: ExtractConfig) -> Extraction:
    """Of measured samples, in several shards."""
    size = Extraction(tokens, target, reads, config=config, fields={}).num_bytes
    config = replace(config, shard_bytes=max(1, min(config.shard_bytes, size // NUM_SHARDS)))
    return Extraction(tokens, target, reads, config=config, fields=fields_of(target, reads, config, {}))


def timed_pass(extractions: Sequence[Extraction], folder: Path) -> list[float]:
    """Seconds of the target alone, then of each extraction into a folder and of reading what it wrote."""
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


def estimate(extraction: Extraction, output: Path, *, num_ranks: int = 1) -> str:
    """Size and time of what is still to be written, in words; the time from two passes over a few batches."""
    samples, config = extraction.samples, extraction.config
    done = ShardWriter(output, fields=extraction.fields).done
    left = extraction.num_tokens(skip=done)
    if not left:
        return "all shards are complete"
    num_sampled = max(1, int(4 * config.batch_tokens / samples.lengths.mean()))
    chosen = [samples[i].sample for i in range(0, len(samples), max(1, len(samples) // num_sampled))][:num_sampled]
    target, reads = extraction.target, extraction.reads
    rates = measure_rates(chosen, target, reads, config=config, folder=output / PROGRESS, num_passes=1)
    size, tokens = extraction.num_bytes, extraction.num_tokens()
    hours = left / rates.extraction / num_ranks / 3600
    return (
        f"{tokens:,} tokens, {in_bytes(size)} in {config.storage_dtype} ({size / tokens:.1f} bytes per token), "
        f"{in_bytes(disk_free(output))} free; about {in_hours(hours)} for the {left:,} tokens that are not there yet"
    )


def in_hours(hours: float) -> str:
    """For people: 2.1 hours, 3.4 minutes."""
    return f"{hours:.3g} hours" if hours >= 1 else f"{60 * hours:.2g} minutes"


@torch.no_grad()
def run_target(extraction: Extraction) -> None:
    """The target alone on the batches that extraction reads."""
    samples, device = extraction.samples, extraction.target.device
    for rows in extraction.shards:
        lengths = samples.lengths[rows.start : rows.stop]
        for batch in batches(lengths, batch_tokens=extraction.config.batch_tokens):
            extraction.target.forward(padded([samples[rows.start + int(i)].sample for i in batch], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Online:
    """The target runs in every epoch."""

    tokens_per_second: float
    seconds_per_epoch: float


@dataclass(frozen=True)
class Extracted:
    """The target's states are extracted once, in one storage dtype."""

    storage_dtype: str
    bytes_per_token: float
    bytes: int
    fits: bool
    extraction_hours: float
    extraction_over_forward: float
    seconds_saved_per_epoch: float
    pays_off_after_epochs: int | None  # None: never


@dataclass(frozen=True)
class Comparison:
    """Online against each way to store; `asdict` of it is the JSON of `headstart data plan`."""

    num_rows: int
    num_tokens: int
    num_supervised_tokens: int
    free_bytes: int
    num_processes: int
    num_measured: int  # rows
    spread: float  # of the timed passes, the largest: (slowest - fastest) / mean
    num_measured_tokens: int
    num_passes: int  # over them that counted, the fewest of any storage dtype
    one_row_of: int  # N: every Nth row was counted; above 1 if counting all would exceed the time
    online: Online
    extracted: list[Extracted]


def compare(survey: Survey, rates: dict[str, Rates], *, free_bytes: int, num_processes: int = 1) -> Comparison:
    """Bytes, hours, and the epochs from which extracting costs less time.

    rates: by storage dtype, of one process; num_processes share the work.
    """
    forward = sum(rate.forward for rate in rates.values()) / len(rates)
    online = Online(
        tokens_per_second=round(forward * num_processes, 1),
        seconds_per_epoch=round(survey.num_tokens / forward / num_processes, 3),
    )
    extracted = []
    for name, rate in rates.items():
        size, tokens = survey.num_bytes[name], survey.num_tokens / num_processes
        once, saved = tokens / rate.extraction, tokens / rate.forward - tokens / rate.reading
        extracted.append(
            Extracted(
                storage_dtype=name,
                bytes_per_token=round(size / max(1, survey.num_tokens), 2),
                bytes=size,
                fits=size <= free_bytes,
                extraction_hours=round(once / 3600, 5),
                extraction_over_forward=round(rate.ratio, 4),
                seconds_saved_per_epoch=round(saved, 3),
                pays_off_after_epochs=math.ceil(once / saved) if saved > 0 else None,
            )
        )
    numbers = survey.num_rows, survey.num_tokens, survey.num_supervised_tokens
    spread = round(max(rate.spread for rate in rates.values()), 4)
    num_passes, num_tokens = min(rate.num_passes for rate in rates.values()), sum(map(len, survey.drawn))
    measured = len(survey.drawn), spread, num_tokens, num_passes
    return Comparison(*numbers, free_bytes, num_processes, *measured, survey.every, online, extracted)
