"""A head's own folder: config.json, model.safetensors and, for Medusa-2, an adapter of the target (peft)."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...base.errors import BadInput, first_line
from ...base.files import from_anywhere, replacing_folder, restore_folder, write_json
from ...base.jsonl import loads
from ...base.typed import check_type
from ...targets.adapters import merged_state, read_adapter, write_adapter
from ...targets.weights.stored import fingerprint_of_digests
from ..base import DraftHead, HeadConfig
from ..loss.calibration import ConfidenceLine
from .record import HeadRecord, read_head_config

ADAPTER = "adapter."  # prefix of the tensors that a head puts on the target's layers


def config_of(record: HeadRecord, config_class: type[HeadConfig], *, key: str = "headstart") -> HeadConfig:
    """The head's config. Args: config_class: of the expected family. key: of the record in config.json.

    Raises: BadInput if the head is of another family, or has a key of another version or a value of another type.
    """
    if record.family != config_class.type:
        raise BadInput(f"config.json: {key}.head.type: expected {config_class.type!r}, found {record.family!r}")
    unknown = sorted(record.head.keys() - {known.name for known in fields(config_class)})
    if unknown:
        raise BadInput(f"config keys of another version of Headstart: {unknown}")
    kinds = get_type_hints(config_class)
    for name, value in record.head.items():
        check_type(value, kinds[name], name=f"config.json: {key}.head.{name}")
    return config_class(**record.head)


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    training: dict[str, Any] | None = None,
    confidence: ConfidenceLine | None = None,
) -> Path:
    """Write a head folder atomically: a head that was there before is replaced only when the new one is complete.

    config.json has the serving keys of the family and, under `headstart`, the `HeadRecord`; model.safetensors has the
    tensors under the family's served names, with `d2t` and `t2d` if the draft vocabulary is cut. Adapters of the head's
    own layers are merged into them; those of the target are written as peft's two files.

    Args: dtype: of the stored weights; None: as they are. training: how it was trained (docs/reference/run_folder.md).
        confidence: calibrates what is stored.
    Returns: the folder.
    """
    state = dict(merged_state(head))
    if confidence is not None:
        state = head.calibrated(state, confidence)
    tensors = {
        name: value.detach().to((dtype if value.is_floating_point() else None) or value.dtype).cpu().contiguous()
        for name, value in state.items()
    }
    if head.vocabulary is not None:
        to_target = head.vocabulary.to_target.cpu()
        tensors["d2t"] = to_target - torch.arange(len(to_target))
        tensors["t2d"] = head.vocabulary.to_draft.cpu() >= 0
    if training is not None:
        training = {**training, "fingerprint": fingerprint_of_tensors(tensors)}
    record = HeadRecord(
        head.config.as_dict(), from_anywhere(head.target.name), head.target.stored_fingerprint, training
    )
    name_of_dtype = str(dtype or next(iter(head.parameters())).dtype).removeprefix("torch.")
    dtypes = {"dtype": name_of_dtype, "torch_dtype": name_of_dtype}
    with replacing_folder(Path(folder)) as temporary:
        write_json(temporary / "config.json", {**head.serving_config(), **dtypes, "headstart": record.to_json()})
        if head.adapts_target:
            names = [name for name in tensors if name.startswith(ADAPTER)]
            write_adapter({name.removeprefix(ADAPTER): tensors.pop(name) for name in names}, head.target, temporary)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    return Path(folder)


def fingerprint_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """`fingerprint_of_digests` of tensors in memory: identifies a head by all of its bytes."""

    def digest(value: Tensor) -> str:
        return hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()

    return fingerprint_of_digests(
        (name, str(value.dtype), tuple(value.shape), digest(value)) for name, value in tensors.items()
    )


def read_record(folder: str | Path) -> HeadRecord:
    """The `headstart` part of config.json. Raises BadInput as `read_head_config`, and if that part is damaged."""
    try:
        return HeadRecord.from_json(read_head_config(folder)["headstart"])
    except BadInput as error:
        raise BadInput(f"head {folder}: {error}") from error


def is_head_folder(folder: str | Path) -> bool:
    """Whether `save_head` wrote it; if not, it is an export, another project's head, or a hub id."""
    restore_folder(folder)
    try:
        return "headstart" in loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False


def read_files(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a head folder as they are stored. Raises BadInput if the file is missing or damaged."""
    path = Path(folder, "model.safetensors")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error


def read_tensors(folder: str | Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors of a head folder by the head's names, and the draft token ids [Vd], None if the vocabulary is whole.

    Raises: BadInput if a file is missing or damaged.
    """
    tensors = read_files(folder)
    try:
        tensors |= {ADAPTER + name: value for name, value in read_adapter(Path(folder)).items()}
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder}: {first_line(error)}") from error
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    return tensors, None if d2t is None else d2t + torch.arange(len(d2t))


def load_weights(head: DraftHead, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Copy a folder's tensors into a head, in its dtype. Raises BadInput unless names and shapes match exactly."""
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    stored = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise BadInput(f"head {folder}: tensor {name}: expected {expected.get(name)}, found {stored.get(name)}")
    head.load_state_dict(tensors)
