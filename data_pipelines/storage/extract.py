"""`headstart data extract`: runs the target on every sample once, and writes the states that a head reads to shards.

While the target runs a batch, a thread quantises and writes the states of earlier batches. The assignment of rows to
shards and batches depends only on the samples and the config: it is the same for any number of processes, and in a
resumed run.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

from ...base.differing import first_difference
from ...base.errors import BadInput
from ...base.files import remove
from ...targets.loading import config_hash
from ...targets.target import Target
from ..rows.config import check_at_least_one, check_choice
from ..rows.parallel import read_ahead
from ..rows.samples import Sample
from .features import Reads
from .quantise import STORAGE, Packed, pack
from .shard_file import PackedStates, StoredSample
from .shards import MANIFEST, Manifest, Shards, ShardWriter, clear_progress, read_manifest

TOKENS = "tokens"  # subfolder of the output with the samples, until the extraction is finished
AHEAD = 2  # batches that may wait to be written

# begins to get the states of a batch of samples; returns a function that waits for them
Start = Callable[[Sequence[Sample]], Callable[[], list[StoredSample]]]


@torch.no_grad()
def start_target(
    samples: Sequence[Sample], *, target: Target, reads: Reads, storage_dtype: str
) -> Callable[[], list[StoredSample]]:
    """Queue the target's forward over a batch of samples on its device.

    Returns: a function that waits for it and returns the samples with their states; it may be called in another thread,
        and raises BadInput if a state is NaN or infinite.
    """
    texts, pictures = padded(samples, device=target.device), [sample.pictures for sample in samples]
    output = target.read_texts(texts, feature_layers=reads.layers, pictures=pictures)
    features_at, post_norm_at = zip(*(reads.positions(sample.loss_mask) for sample in samples), strict=True)
    features = start_copy(output.features, features_at, target, storage_dtype)
    post_norm = start_copy(output.post_norm, post_norm_at, target, storage_dtype)

    shifts = [None] * len(samples) if output.shift is None else output.shift.cpu().numpy()

    def rows() -> list[StoredSample]:
        states = zip(features_at, features(), post_norm_at, post_norm(), strict=True)
        packed = [PackedStates(*of_row, target.dtype) for of_row in states]
        for one, sample, shift in zip(packed, samples, shifts, strict=True):
            one.shift = None if shift is None else shift[: len(sample)]
        return [StoredSample(*pair) for pair in zip(samples, packed, strict=True)]

    return rows


def start_copy(
    states: Tensor, at: Sequence[np.ndarray], target: Target, storage_dtype: str
) -> Callable[[], list[Packed]]:
    """Start copying states [B, T, ..., D] at the positions `at` (per row [T] bool) to the host, packed.

    Returns: a function that waits for the copy and returns the states [n, ..., D] of each row.
    """
    row_length = states.shape[1]
    index = np.concatenate([row * row_length + np.flatnonzero(row_at) for row, row_at in enumerate(at)])
    chosen = states.flatten(0, 1).index_select(0, torch.from_numpy(index).to(states.device))  # [n, ..., D]
    sizes = [int(row_at.sum()) for row_at in at]
    if not states.is_cuda:
        return lambda: checked(pack(chosen, storage_dtype), target).split(sizes)
    packed = pack(chosen, storage_dtype)
    host = Packed(to_pinned(packed.values), None if packed.scales is None else to_pinned(packed.scales))
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[Packed]:
        copied.synchronize()
        # cloned, as pinned memory is scarce
        cloned = Packed(host.values.clone(), None if host.scales is None else host.scales.clone())
        return checked(cloned, target).split(sizes)

    return wait


def checked(packed: Packed, target: Target) -> Packed:
    """The same states. Raises BadInput if one of them is NaN or infinite."""
    values = packed.values if packed.scales is None else packed.scales
    # one NaN or infinite value makes the sum so
    if not values.sum(dtype=torch.float32).isfinite():
        raise BadInput(f"target {target.name}: its states are not finite numbers in {target.dtype}")
    return packed


def padded(samples: Sequence[Sample], *, device: torch.device) -> Tensor:
    """[B, T] int64 token ids, padded on the right with 0."""
    ids = np.zeros((len(samples), max(map(len, samples))), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.input_ids
    return torch.from_numpy(ids).to(device)


def to_pinned(tensor: Tensor) -> Tensor:
    """An asynchronous copy in pinned host memory; valid after the current stream has reached this point."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def batches(lengths: np.ndarray, *, batch_tokens: int) -> list[np.ndarray]:
    """Group rows of similar length into batches of at most batch_tokens tokens, padding included.

    A longer row gets its own batch. Args: lengths: [num_rows] tokens of each row. Returns: row indices of each batch.
    """
    order = np.argsort(-lengths, kind="stable")  # the longest first: it sets the padded length of its batch
    groups, first = [], 0
    while first < len(order):
        end = first + max(1, batch_tokens // int(lengths[order[first]]))
        groups.append(order[first:end])
        first = end
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(kw_only=True)
class ExtractConfig:
    """How states are read and stored."""

    storage_dtype: str = "8bit"  # float32, bfloat16 or 8bit (with a scale per vector), see quantise.py
    batch_tokens: int = 8192  # tokens of one target forward, padding included
    shard_bytes: int = 512 * 2**20  # approximate size of a shard

    def __post_init__(self) -> None:
        check_choice("storage_dtype", self.storage_dtype, STORAGE)
        check_at_least_one(batch_tokens=self.batch_tokens, shard_bytes=self.shard_bytes)


class Extraction:
    """An extraction of a folder of samples into an output folder; several processes may each write some of its shards.

    fields: the manifest's, see `fields_of`. shards: the rows of each shard. shard_sizes: approximate bytes of each.
    num_bytes: of all shards.
    """

    def __init__(self, samples: Shards, target: Target, reads: Reads, *, config: ExtractConfig, fields: dict[str, Any]):
        self.samples, self.target, self.reads, self.config, self.fields = samples, target, reads, config, fields
        masks = (stored.sample.loss_mask for stored in samples)
        size, dtype = target.hidden_size, config.storage_dtype
        sizes = [reads.row_bytes(mask, hidden_size=size, storage_dtype=dtype) for mask in masks]
        self.shards, self.shard_sizes = cut_into_shards(sizes, limit=config.shard_bytes)
        self.num_bytes = sum(sizes)

    def size_line(self, output: Path) -> str:
        """How large it will be, and how much of it is still missing, in a line."""
        left = self.num_tokens(skip=ShardWriter(output, fields=self.fields).done)
        tokens, dtype = self.num_tokens(), self.config.storage_dtype
        each = f"{decimal(self.num_bytes)} in {dtype} ({self.num_bytes / tokens:.1f} bytes per token)"
        return f"{tokens:,} tokens, {each}, {decimal(disk_free(output))} free; {left:,} tokens still to be read"

    def check_disk(self, output: Path) -> None:
        """Raises BadInput if the shards that are still missing do not fit on the disk."""
        written = ShardWriter(output, fields=self.fields).done
        needed = sum(size for number, size in enumerate(self.shard_sizes) if number not in written)
        left = disk_free(output)
        if needed > left:
            problem = f"{decimal(needed)} are still to be written, {decimal(left)} of this disk are free"
            raise BadInput(f"{output}: {problem}")

    def run(
        self,
        output: Path,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        on_tokens: Callable[[int], None] = lambda _: None,
        start: Start | None = None,
    ) -> None:
        """Write this rank's shards, except complete ones.

        Args:
            on_tokens: called with the number of tokens of each shard, complete ones included.
            start: gives the states of a batch; None: the target in this process does, see `start_target`.
        """
        writer = ShardWriter(output, fields=self.fields)
        if start is None:
            storage_dtype = self.config.storage_dtype
            start = partial(start_target, target=self.target, reads=self.reads, storage_dtype=storage_dtype)

        def jobs() -> Iterator[Callable[[], None]]:
            for number, rows in list(enumerate(self.shards))[rank::num_ranks]:
                if number not in writer.done:
                    yield from self._jobs(start, writer, number, rows)
                on_tokens(int(self.samples.lengths[rows.start : rows.stop].sum()))

        for _ in read_ahead(lambda job: job(), jobs(), depth=AHEAD):
            pass

    def finish(self, output: Path) -> Manifest:
        """Write the manifest, after all ranks have run, and remove the folder of samples."""
        manifest = ShardWriter(output, fields=self.fields).finish()
        remove(output / TOKENS)
        return manifest

    def num_tokens(self, rank: int = 0, num_ranks: int = 1, *, skip: Collection[int] = ()) -> int:
        """Number of tokens in a rank's shards, or with the defaults in all shards, without the shards in `skip`."""
        ends = np.concatenate([[0], np.cumsum(self.samples.lengths)])
        shards = [rows for number, rows in enumerate(self.shards) if number not in skip][rank::num_ranks]
        return sum(int(ends[rows.stop] - ends[rows.start]) for rows in shards)

    def _jobs(self, start: Start, writer: ShardWriter, number: int, rows: range) -> Iterator[Callable[[], None]]:
        """Run the target on a shard's rows batch by batch; yields functions to call in order in another thread, which
        wait for the states and finally write the shard."""
        samples = [self.samples[i].sample for i in rows]
        stored: dict[int, StoredSample] = {}
        for batch in batches(self.samples.lengths[rows.start : rows.stop], batch_tokens=self.config.batch_tokens):
            finish = start([samples[i] for i in batch])
            yield lambda finish=finish, batch=batch: stored.update(zip(batch.tolist(), finish(), strict=True))
        yield lambda: writer.write(number, [stored[i] for i in range(len(samples))])


def cut_into_shards(sizes: Sequence[int], *, limit: int) -> tuple[list[range], list[int]]:
    """Cut rows of these sizes in bytes into consecutive shards of at least `limit` bytes, except the last.

    Returns: the rows of each shard, and its bytes.
    """
    shards, totals, first, total = [], [], 0, 0
    for row, size in enumerate(sizes):
        total += size
        if total >= limit or row == len(sizes) - 1:
            shards.append(range(first, row + 1))
            totals.append(total)
            first, total = row + 1, 0
    return shards, totals


def fields_of(target: Target, reads: Reads, config: ExtractConfig, origin: dict[str, Any]) -> dict[str, Any]:
    """The fields of the manifest; an extraction is only resumed with equal ones. origin: of `features.origin_of`."""
    return {
        **asdict(reads),
        "storage_dtype": config.storage_dtype,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "target": target.full_name,
        "target_fingerprint": target.fingerprint,
        "target_config_hash": config_hash(target.config),
        "output": asdict(target.output_use),
        "shard_bytes": config.shard_bytes,
        **origin,
    }


def is_finished(output: Path, fields: dict[str, Any], *, engine: str | None = None) -> bool:
    """Whether the output is a finished extraction with these fields by that engine; None: the target in a process of
    ours. Raises BadInput, naming the key and both values, if it is finished with others."""
    if not (output / MANIFEST).exists():
        return False
    written = read_manifest(output).fields
    wanted = {key: value for key, value in fields.items() if key != "target"} | {"engine": engine}
    if difference := first_difference(written, json.loads(json.dumps(wanted)), is_part=True):
        raise BadInput(f"{output}: holds samples with {difference}; choose another folder")
    return True


def clear_unfinished(output: Path) -> None:
    """Remove files that only an unfinished extraction needs."""
    clear_progress(output)
    remove(output / TOKENS)


def disk_free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.resolve().parents) if path.exists())).free
