"""Which of the target's hidden states are kept on disk: exactly those that training a head reads.

A chain start t is a position whose next two tokens are supervised. The loss reads the target's `post_norm` behind each
(its labels); the head reads its features, or `post_norm`, at the starts, and where it attends to what is before them
(`reads_context`) at every position up to the last one. Nothing else is kept.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...configs.errors import BadInput
from ...heads.base import DraftHead
from ...heads.reasoning import short_hash, template_hash
from ...heads.target import Target
from ..config import DataConfig
from .quantise import STORAGE
from .shard_file import row_bytes
from .shards import Shards

WHERE = ("nowhere", "labels", "starts", "context")  # where states are kept; each holds what those before it do
NOT_OF_SAMPLES = (
    "validation",
    "layout",
    "segment_weights",
    "features",
    "num_workers",
)  # keys of `data:` that change no sample


@dataclass(frozen=True)
class Reads:
    """What is kept for a head: layers, and where their features and post_norm are kept, of WHERE."""

    layers: tuple[int, ...]
    features_at: str
    post_norm_at: str

    @classmethod
    def of(cls, head: DraftHead) -> "Reads":
        """BadInput: the head changes the target that it reads."""
        if head.adapts_target:
            raise BadInput(f"head {head.config.type}: trains adapters of the target, so its states cannot be extracted")
        where = "context" if head.reads_context else "starts"
        layers = head.feature_layers
        return cls(layers, where if layers else "nowhere", where if head.reads_post_norm else "labels")

    def positions(self, loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a sample's loss_mask [T]: where features and post_norm are kept, [T] bool each."""
        places = positions(loss_mask)
        return places[self.features_at], places["labels"] | places[self.post_norm_at]

    def row_bytes(self, loss_mask: np.ndarray, *, hidden_size: int, storage_dtype: str) -> int:
        """What a sample takes on disk."""
        features, post_norm = self.positions(loss_mask)
        counts = {"num_features": len(self.layers) * int(features.sum()), "num_post_norm": int(post_norm.sum())}
        item = STORAGE[storage_dtype].itemsize
        return 16 + row_bytes(len(loss_mask), values=hidden_size, item=item, **counts)

    def described(self) -> dict[str, Any]:
        """As a manifest has it."""
        return {"layers": list(self.layers), "features_at": self.features_at, "post_norm_at": self.post_norm_at}


def positions(loss_mask: np.ndarray) -> dict[str, np.ndarray]:
    """The positions [T] bool that each of WHERE names."""
    starts = np.zeros_like(loss_mask)
    starts[:-2] = loss_mask[1:-1] & loss_mask[2:]
    labels = np.zeros_like(loss_mask)
    labels[1:] = starts[:-1]
    context = np.flip(np.maximum.accumulate(np.flip(starts)))
    return {"nowhere": np.zeros_like(loss_mask), "labels": labels, "starts": starts, "context": context}


def origin_of(data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """What decides the samples of a run, as a manifest has it."""
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none of slow tokenizers
    return {
        "data": {key: value for key, value in asdict(data).items() if key not in NOT_OF_SAMPLES},
        "tokenizer_hash": short_hash(words if backend is None else backend.to_str()),
        "template_hash": template_hash(tokenizer),
    }


def check_features(samples: Shards, head: DraftHead, target: Target, *, data: DataConfig | None = None) -> None:
    """Raises BadInput unless the folder holds what this head reads of this target, with the key and both values.

    data: the `data:` section of the run that wants to train; None: of whatever samples are there.
    """
    manifest, where = samples.manifest, f"data.features {samples.folder}"
    wanted = Reads.of(head)
    if not samples.has_states:
        raise BadInput(f"{where}: holds token ids only; `headstart data extract` writes the target's states")
    if manifest["target_fingerprint"] != target.fingerprint:
        found = f"{manifest['target']} (fingerprint {manifest['target_fingerprint'][:12]})"
        raise BadInput(f"{where}: target {found}, not {target.name} ({target.fingerprint[:12]})")
    if wanted.layers and tuple(manifest["layers"]) != wanted.layers:
        raise BadInput(f"{where}: layers {manifest['layers']}, head {head.config.type} reads {list(wanted.layers)}")
    for key in ("features_at", "post_norm_at"):
        if WHERE.index(manifest[key]) < WHERE.index(getattr(wanted, key)):
            problem = f"{key} {manifest[key]}, head {head.config.type} needs {getattr(wanted, key)}"
            raise BadInput(f"{where}: {problem}; extract it for this head")
    written, now = manifest.get("data", {}), {} if data is None else asdict(data)
    for key in written.keys() & now.keys():
        if written[key] != now[key]:
            raise BadInput(f"{where}: extracted with data.{key} {written[key]!r}, not {now[key]!r}")
