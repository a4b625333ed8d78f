"""Which of the target's hidden states are stored for training a head: exactly those that training reads.

A chain start t is a position whose next two tokens are supervised. The loss reads the target's `post_norm` at t + 1
(the label). The head reads the target's features, or `post_norm`, at t, or, if it attends to earlier positions
(`reads_context`), at every position up to the last chain start. No other states are stored.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...base.differing import first_difference
from ...base.errors import BadInput
from ...base.files import sha256_of
from ...heads.base import DraftHead
from ...targets.chat.reasoning import template_hash, tokenizer_hash
from ...targets.loading import config_hash
from ...targets.target import Target
from ..masks.chat import ENCODING
from ..rows.config import DataConfig
from ..rows.sources import Source, read_sources
from .quantise import STORAGE
from .shard_file import row_bytes
from .shards import Shards

# sets of positions at which states are stored, from the smallest to the largest (`check_features` compares the ranks)
WHERE = ("nowhere", "labels", "starts", "context")
OF_ROWS = {"train", "num_rows"}  # keys of `data:` that say which rows are read
# keys of `data:` that do not change the samples
NOT_OF_SAMPLES = ("train", "validation", "layout", "segment_weights", "features", "num_workers")


@dataclass(frozen=True)
class Reads:
    """The states that a head reads: which layers' features, and at which positions."""

    layers: tuple[int, ...]  # HF `hidden_states` indices
    features_at: str  # one of WHERE
    post_norm_at: str  # one of WHERE; labels are stored in any case

    @classmethod
    def of(cls, head: DraftHead) -> "Reads":
        """The states that this head reads. Raises BadInput if it trains adapters of the target."""
        if head.adapts_target:
            raise BadInput(f"head {head.config.type}: trains adapters of the target, so its states cannot be extracted")
        where = "context" if head.reads_context else "starts"
        layers = head.feature_layers
        return cls(layers, where if layers else "nowhere", where if head.reads_post_norm else "labels")

    def positions(self, loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """loss_mask [T] -> two masks [T] bool: the positions at which features, and post_norm, are stored."""
        at = positions(loss_mask)
        return at[self.features_at], at["labels"] | at[self.post_norm_at]

    def row_bytes(self, loss_mask: np.ndarray, *, hidden_size: int, storage_dtype: str) -> int:
        """Bytes on disk of a sample with loss_mask [T], states included. hidden_size: D of the target."""
        features, post_norm = self.positions(loss_mask)
        num_vectors = len(self.layers) * int(features.sum()) + int(post_norm.sum())
        item_bytes = STORAGE[storage_dtype].itemsize
        return 16 + row_bytes(len(loss_mask), num_vectors=num_vectors, vector_size=hidden_size, item_bytes=item_bytes)


def positions(loss_mask: np.ndarray) -> dict[str, np.ndarray]:
    """For a sample with loss_mask [T] bool: the positions [T] bool of each name in WHERE."""
    starts = np.zeros_like(loss_mask)
    starts[:-2] = loss_mask[1:-1] & loss_mask[2:]
    labels = np.zeros_like(loss_mask)
    labels[1:] = starts[:-1]
    context = np.flip(np.maximum.accumulate(np.flip(starts))).copy()  # torch takes no reversed view
    return {"nowhere": np.zeros_like(loss_mask), "labels": labels, "starts": starts, "context": context}


def origin_of(data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """What determines the samples of a run, as entries of a manifest: the rows by content, the `data:` keys that
    matter, hashes of the tokenizer and its chat template, and the version of the encoding. Without `rows` if the files
    of data.train are gone."""
    try:
        rows = {"rows": [source_record(source) for source in read_sources(data.train)]}
    except (BadInput, OSError):
        rows = {}
    return {
        **rows,
        "data": {key: value for key, value in asdict(data).items() if key not in NOT_OF_SAMPLES},
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "encoding": ENCODING,
    }


def source_record(source: Source) -> dict[str, Any]:
    """A source identified by the contents of its files, or on the hub by its name."""
    files = [sha256_of(path) for path in source.files()]
    options = {key: value for key, value in asdict(source).items() if key not in ("source", "name")}
    return {"source": files or source.source, **options}


def check_features(
    samples: Shards, head: DraftHead, target: Target, *, data: DataConfig | None = None, key: str = "data.features"
) -> None:
    """Raises BadInput, naming the key and both values, unless a folder of shards has all states that this head reads of
    this target.

    Args:
        data: the `data:` section of the run that trains on them, to compare with; None: it is not compared.
        key: that names the folder. Under data.validation it has other rows than the run.
    """
    manifest, where = samples.manifest.fields, f"{key} {samples.folder}"
    wanted = Reads.of(head)
    if not samples.has_states:
        raise BadInput(f"{where}: holds token ids only; `headstart data extract` writes the target's states")
    if manifest["target_fingerprint"] != target.fingerprint:
        extracted = f"{manifest['target']} (fingerprint {manifest['target_fingerprint'][:12]})"
        raise BadInput(f"{where}: target {extracted}, not {target.full_name} ({target.fingerprint[:12]})")
    if manifest.get("target_config_hash") != config_hash(target.config):
        raise BadInput(f"{where}: target {manifest['target']} has another config.json now")
    if manifest["dtype"] != (dtype := str(target.dtype).removeprefix("torch.")):
        raise BadInput(f"{where}: states of a target in {manifest['dtype']}, here {dtype}: set target.dtype")
    if wanted.layers and tuple(manifest["layers"]) != wanted.layers:
        raise BadInput(f"{where}: layers {manifest['layers']}, head {head.config.type} reads {list(wanted.layers)}")
    for name in ("features_at", "post_norm_at"):
        if WHERE.index(manifest[name]) < WHERE.index(getattr(wanted, name)):
            problem = f"{name} {manifest[name]}, head {head.config.type} needs {getattr(wanted, name)}"
            raise BadInput(f"{where}: {problem}; extract it for this head")
    if data is not None:
        now = origin_of(data, target.tokenizer)
        if key == "data.validation":  # has rows of its own
            now = {**now, "rows": None, "data": {k: v for k, v in now["data"].items() if k not in OF_ROWS}}
        now = json.loads(json.dumps({name: value for name, value in now.items() if value is not None}))
        if difference := first_difference(manifest, now, is_part=True):
            raise BadInput(f"{where}: extracted with {difference}")
