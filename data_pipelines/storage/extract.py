"""`headstart data extract`: the target reads every sample once, and what a head trains on is written into shards.

The target's next batch runs while the states of the last ones are put into 8 bits and written, in a thread. Which rows
a shard holds, and in which batches they are read, follows from the samples alone: it is the same for any number of
processes and after any interruption.
"""

import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...configs.errors import BadInput
from ...heads.base import DraftHead
from ...heads.target import Target
from .features import Reads
from .quantise import STORAGE, Packed, pack
from .samples import Sample
from .shard_file import Kept, Stored
from .shards import MANIFEST, Shards, ShardWriter, clear_progress, read_manifest

TOKENS = "tokens"  # the folder within the output that holds the samples while they are extracted
AHEAD = 2  # batches that wait to be written while the target reads the next


class Reader:
    """Runs the target on batches and hands over what is kept of its states, in two parts.

    `start` queues the work on the device; what it returns, called, gives the rows, and may be called in another thread.
    """

    def __init__(self, target: Target, reads: Reads, *, storage_dtype: str):
        self.target, self.reads, self.storage_dtype = target, reads, storage_dtype

    @torch.no_grad()
    def start(self, samples: Sequence[Sample]) -> Callable[[], list[Stored]]:
        input_ids = padded(samples, device=self.target.device)  # [B, T]
        output = self.target.forward(input_ids, feature_layers=self.reads.layers)
        at = [self.reads.positions(sample.loss_mask) for sample in samples]
        sent = [
            self._sent(states.flatten(0, 1), [one[which] for one in at], width=input_ids.shape[1])
            for which, states in enumerate((output.features, output.post_norm))
        ]
        return lambda: self._rows(samples, at, sent)

    def _sent(self, states: Tensor, at: list[np.ndarray], *, width: int) -> Callable[[], Packed]:
        """states [B * T, ..., D] at the positions of each row, on their way to the host."""
        index = np.concatenate([row * width + np.flatnonzero(one) for row, one in enumerate(at)])
        chosen = states.index_select(0, torch.from_numpy(index).to(states.device))  # [n, ..., D]
        if not states.is_cuda:
            return lambda: pack(chosen, self.storage_dtype)
        packed = pack(chosen, self.storage_dtype)
        host = Packed(to_pinned(packed.values), None if packed.scales is None else to_pinned(packed.scales))
        done = torch.cuda.Event()
        done.record()

        def wait() -> Packed:
            done.synchronize()
            return Packed(host.values.clone(), None if host.scales is None else host.scales.clone())  # pinned is scarce

        return wait

    @torch.no_grad()
    def _rows(self, samples: Sequence[Sample], at: list[Any], sent: list[Callable[[], Packed]]) -> list[Stored]:
        parts = []
        for which, arrives in enumerate(sent):
            packed = arrives()
            checked = packed.values if packed.scales is None else packed.scales
            if not checked.sum(dtype=torch.float32).isfinite():
                raise BadInput(f"target {self.target.name}: its states are not finite numbers in {self.target.dtype}")
            parts.append(packed.split([int(one[which].sum()) for one in at]))
        kept = [
            Kept(where[0], features, where[1], post_norm, self.target.dtype)
            for where, features, post_norm in zip(at, *parts, strict=True)
        ]
        return [Stored(sample, one) for sample, one in zip(samples, kept, strict=True)]


def padded(samples: Sequence[Sample], *, device: torch.device) -> Tensor:
    """[B, T] token ids, padded on the right with 0."""
    ids = np.zeros((len(samples), max(map(len, samples))), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.input_ids
    return torch.from_numpy(ids).to(device)


def to_pinned(tensor: Tensor) -> Tensor:
    """A copy on the host that is on its way: to be read once the stream has got there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def batches(lengths: np.ndarray, *, batch_tokens: int) -> list[np.ndarray]:
    """Rows [num_rows] by index in batches of like length, of batch_tokens with padding, or of one longer row."""
    order = np.argsort(-lengths, kind="stable")
    found, first = [], 0
    while first < len(order):
        last = first + max(1, batch_tokens // int(lengths[order[first]]))
        found.append(order[first:last])
        first = last
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclass(kw_only=True)
class ExtractConfig:
    """storage_dtype: float32 (exact), bfloat16, or 8bit with a scale per vector. batch_tokens: of one target forward,
    padding included. shard_bytes: of one shard, about."""

    storage_dtype: str = "8bit"
    batch_tokens: int = 8192
    shard_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        if self.storage_dtype not in STORAGE:
            raise BadInput(f"storage_dtype {self.storage_dtype!r}: expected {' or '.join(STORAGE)}")
        for name in ("batch_tokens", "shard_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)}: expected at least 1")


class Extraction:
    """The extraction of a folder of samples into another, in shards whose rows do not depend on who writes them.

    fields: what the manifest says of the folder, see `fields_of`. shards: the rows of each. num_bytes: on disk, all.
    """

    def __init__(self, samples: Shards, target: Target, reads: Reads, *, config: ExtractConfig, fields: dict[str, Any]):
        self.samples, self.target, self.reads, self.config, self.fields = samples, target, reads, config, fields
        how = {"hidden_size": target.hidden_size, "storage_dtype": config.storage_dtype}
        sizes = np.array([reads.row_bytes(stored.sample.loss_mask, **how) for stored in samples], dtype=np.int64)
        self.shards, self.bytes_of = cut(sizes, limit=config.shard_bytes)
        self.num_bytes = int(sizes.sum())

    def check_disk(self, output: Path, *, free: Callable[[Path], int] | None = None) -> None:
        """BadInput: what is still to be written does not fit."""
        done = set(ShardWriter(output, fields=self.fields).done)
        needed = sum(size for number, size in enumerate(self.bytes_of) if number not in done)
        left = (free or disk_free)(output)
        if needed > left:
            raise BadInput(
                f"{output}: {in_bytes(needed)} are still to be written, {in_bytes(left)} of this disk are free"
            )

    def run(
        self, output: Path, *, rank: int = 0, num_ranks: int = 1, say: Callable[[int], None] = lambda _: None
    ) -> None:
        """Writes this rank's shards but those that are complete. say: is told how many tokens each shard brought."""
        writer = ShardWriter(output, fields=self.fields)
        reader = Reader(self.target, self.reads, storage_dtype=self.config.storage_dtype)
        with ThreadPoolExecutor(1, thread_name_prefix="shards") as thread:
            waiting: deque[Future[None]] = deque()
            try:
                for number, rows in list(enumerate(self.shards))[rank::num_ranks]:
                    if number not in writer.done:
                        for job in self._jobs(reader, writer, number, rows):
                            waiting.append(thread.submit(job))
                            if len(waiting) > AHEAD:
                                waiting.popleft().result()
                    say(int(self.samples.lengths[rows.start : rows.stop].sum()))
                while waiting:
                    waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def finish(self, output: Path) -> dict[str, Any]:
        """The manifest, once all ranks have run."""
        manifest = ShardWriter(output, fields=self.fields).finish()
        shutil.rmtree(output / TOKENS, ignore_errors=True)
        return manifest

    def num_tokens(self, rank: int = 0, num_ranks: int = 1, *, skip: Collection[int] = ()) -> int:
        """Tokens of a rank's shards, or of all; those of the shards in `skip` do not count."""
        ends = np.concatenate([[0], np.cumsum(self.samples.lengths)])
        shards = [rows for number, rows in enumerate(self.shards) if number not in skip][rank::num_ranks]
        return sum(int(ends[rows.stop] - ends[rows.start]) for rows in shards)

    def _jobs(self, reader: Reader, writer: ShardWriter, number: int, rows: range) -> Iterator[Callable[[], None]]:
        """Reads the shard's rows batch by batch; what is left to do, in another thread, in this order."""
        samples = [self.samples[i].sample for i in rows]
        found: dict[int, Stored] = {}
        for chosen in batches(self.samples.lengths[rows.start : rows.stop], batch_tokens=self.config.batch_tokens):
            rest = reader.start([samples[i] for i in chosen])
            yield lambda rest=rest, chosen=chosen: found.update(zip(chosen.tolist(), rest(), strict=True))
        yield lambda: writer.write(number, [found[i] for i in range(len(samples))])


def cut(sizes: np.ndarray, *, limit: int) -> tuple[list[range], list[int]]:
    """Rows of these bytes [num_rows] in consecutive shards of about `limit`, and the bytes of each."""
    shards, totals, first, total = [], [], 0, 0
    for row, size in enumerate(sizes.tolist()):
        total += size
        if total >= limit or row == len(sizes) - 1:
            shards.append(range(first, row + 1))
            totals.append(total)
            first, total = row + 1, 0
    return shards, totals


def fields_of(target: Target, reads: Reads, config: ExtractConfig, origin: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of a folder, and what a second start has to share. origin: as `features.origin_of`."""
    return {
        **reads.described(),
        "storage_dtype": config.storage_dtype,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "shard_bytes": config.shard_bytes,
        **origin,
    }


def extract(
    samples: Shards,
    target: Target,
    head: DraftHead,
    output: str | Path,
    *,
    config: ExtractConfig | None = None,
    origin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes what training `head` reads of the target on the samples, in one process; returns the manifest.

    A second call goes on where the first was interrupted, and does nothing where it had finished. BadInput: the disk is
    too small, the folder holds something else, the head changes the target.
    """
    output, config, reads = Path(output), config or ExtractConfig(), Reads.of(head)
    fields = fields_of(target, reads, config, origin or {})
    if not is_finished(output, fields):
        extraction = Extraction(samples, target, reads, config=config, fields=fields)
        extraction.check_disk(output)
        extraction.run(output)
        extraction.finish(output)
    return read_manifest(output)


def is_finished(output: Path, fields: dict[str, Any]) -> bool:
    """Whether it holds these features already. BadInput: it holds others, with the key and both values."""
    if not (output / MANIFEST).exists():
        return False
    manifest = read_manifest(output)
    for key, value in fields.items():
        if manifest.get(key) != value:
            raise BadInput(
                f"{output}: holds samples with {key} {manifest.get(key)}, not {value}; choose another folder"
            )
    clear_progress(output)
    shutil.rmtree(output / TOKENS, ignore_errors=True)
    return True


def disk_free(folder: Path) -> int:
    """Bytes left on the disk of a folder that need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.resolve().parents) if path.exists())).free


def in_bytes(size: float) -> str:
    """For people: 1.24 GB."""
    unit, factor = next(((u, f) for u, f in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if size >= f), ("kB", 1e3))
    return f"{size / factor:.3g} {unit}"
