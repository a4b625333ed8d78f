"""`headstart data plan`: what it costs to run the target in every epoch, and what to extract its states once.

Rates are measured on samples of the run, and interleaved: a pass of the bare target, then one of the whole extraction,
shards on disk included, then the same again.
"""

import math
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..heads.target import Target
from .storage.extract import ExtractConfig, Extraction, batches, disk_free, fields_of, in_bytes, padded
from .storage.features import Reads
from .storage.quantise import STORAGE
from .storage.samples import Sample
from .storage.shard_file import Stored
from .storage.shards import PROGRESS, Shards, ShardWriter

NUM_SHARDS = 8  # that a measured sample is written in


@dataclass
class Survey:
    """The samples of a run, in numbers. num_bytes: what extracting them writes, by storage dtype. sampled: some of
    them, drawn evenly."""

    num_rows: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STORAGE, 0))
    sampled: list[Sample] = field(default_factory=list)


def survey(samples: Iterable[Sample], reads: Reads, *, hidden_size: int, num_sampled: int) -> Survey:
    """One pass over the samples, one in memory at a time besides those that are drawn (the same ones every time)."""
    found, source = Survey(), random.Random(0)
    for sample in samples:
        if len(found.sampled) < num_sampled:
            found.sampled.append(sample)
        elif (place := source.randrange(found.num_rows + 1)) < num_sampled:
            found.sampled[place] = sample
        found.num_rows += 1
        found.num_tokens += len(sample)
        found.num_supervised_tokens += int(sample.loss_mask.sum())
        for name in STORAGE:
            found.num_bytes[name] += reads.row_bytes(sample.loss_mask, hidden_size=hidden_size, storage_dtype=name)
    return found


@dataclass
class Rates:
    """Tokens per second of the bare target, of extraction, and of reading what that wrote."""

    forward: float
    extraction: float
    reading: float

    @property
    def ratio(self) -> float:
        """Extraction's share of the bare target's rate."""
        return self.extraction / self.forward


def measure_rates(
    samples: Sequence[Sample],
    target: Target,
    reads: Reads,
    *,
    config: ExtractConfig,
    folder: Path | None = None,
    num_passes: int = 3,
) -> Rates:
    """Rates on these samples, in the batches of `config`. folder: on the disk to be measured; None: the temporary one.

    They are written in several shards, as a long run writes them: each while the target reads the next. The first pass,
    in which caches fill, is left out.
    """
    times = {"forward": 0.0, "extraction": 0.0, "reading": 0.0}
    num_tokens = sum(map(len, samples))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".plan.") as temporary:
        writer = ShardWriter(Path(temporary, "tokens"))
        for sample in samples:
            writer.add(Stored(sample))
        writer.finish()
        tokens = Shards(Path(temporary, "tokens"))
        size = Extraction(tokens, target, reads, config=config, fields={}).num_bytes
        config = replace(config, shard_bytes=max(1, min(config.shard_bytes, size // NUM_SHARDS)))
        fields = fields_of(target, reads, config, {})
        extraction = Extraction(tokens, target, reads, config=config, fields=fields)
        for number in range(num_passes + 1):
            output = Path(temporary, str(number))
            for name, work in (
                ("forward", lambda: run_target(extraction)),
                ("extraction", lambda output=output: (extraction.run(output), extraction.finish(output))),
                ("reading", lambda output=output: [stored.states for stored in Shards(output)]),
            ):
                started = time.perf_counter()
                work()
                if number:
                    times[name] += time.perf_counter() - started
    return Rates(**{name: num_passes * num_tokens / spent for name, spent in times.items()})


def estimate(extraction: Extraction, output: Path, *, num_ranks: int = 1) -> str:
    """Size and time of what is still to be written, in words; the time from two passes over a few batches."""
    samples, config = extraction.samples, extraction.config
    done = ShardWriter(output, fields=extraction.fields).done
    left = extraction.num_tokens(skip=done)
    if not left:
        return "all shards are complete"
    num_sampled = max(1, int(4 * config.batch_tokens / samples.lengths.mean()))
    chosen = [samples[i].sample for i in range(0, len(samples), max(1, len(samples) // num_sampled))][:num_sampled]
    how: dict[str, Any] = {"config": config, "folder": output / PROGRESS, "num_passes": 1}
    rates = measure_rates(chosen, extraction.target, extraction.reads, **how)
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
    """The bare target on the very batches that extraction reads."""
    samples, device = extraction.samples, extraction.target.device
    for rows in extraction.shards:
        lengths = samples.lengths[rows.start : rows.stop]
        for chosen in batches(lengths, batch_tokens=extraction.config.batch_tokens):
            extraction.target.forward(padded([samples[rows.start + int(i)].sample for i in chosen], device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(found: Survey, rates: dict[str, Rates], *, free_bytes: int, num_processes: int = 1) -> dict[str, Any]:
    """Online against each way to store: bytes, hours, and the epochs from which extracting costs less time.

    rates: by storage dtype, of one process; num_processes share the work.
    """
    rows = list(options(found, rates, free_bytes=free_bytes, num_processes=num_processes))
    numbers = {key: value for key, value in asdict(found).items() if key.startswith("num_") and key != "num_bytes"}
    forward = sum(rate.forward for rate in rates.values()) / len(rates)
    return {
        **numbers,
        "free_bytes": free_bytes,
        "num_processes": num_processes,
        "online": {
            "tokens_per_second": round(forward * num_processes, 1),
            "seconds_per_epoch": round(found.num_tokens / forward / num_processes, 3),
        },
        "extracted": rows,
    }


def options(found: Survey, rates: dict[str, Rates], *, free_bytes: int, num_processes: int) -> Iterator[dict[str, Any]]:
    for name, rate in rates.items():
        size, tokens = found.num_bytes[name], found.num_tokens / num_processes
        once, forward, reading = tokens / rate.extraction, tokens / rate.forward, tokens / rate.reading
        saved = forward - reading  # in each epoch
        yield {
            "storage_dtype": name,
            "bytes_per_token": round(size / max(1, found.num_tokens), 2),
            "bytes": size,
            "fits": size <= free_bytes,
            "extraction_hours": round(once / 3600, 5),
            "extraction_over_forward": round(rate.ratio, 4),
            "seconds_saved_per_epoch": round(saved, 3),
            "pays_off_after_epochs": math.ceil(once / saved) if saved > 0 else None,
        }
