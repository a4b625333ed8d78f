"""What an export reads and how it writes: a head's folder, its target's config, a folder whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...configs.errors import BadInput, first_line
from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from ..loading import read_model_config, torch_dtype
from ..mtp_checkpoint import stored_tensors
from ..registry import read_head_config

PROVENANCE = "headstart_export"  # the key under which an exported config.json keeps the head's own config
SWITCHES = ("eagle-", "eagle3", "dflash", "dspark")  # in a path, vLLM takes them for the method
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "model.language_model.embed_tokens.weight")


@dataclass(frozen=True)
class HeadFolder:
    """A trained head as `save_head` wrote it.

    config: the serving keys of config.json. ours: its `headstart` part. tensors: by served name, in the dtype that
    they are exported in. target: folder or hub id; target_config: as Hugging Face reads it, None where it is not there.
    """

    path: Path
    config: dict[str, Any]
    ours: dict[str, Any]
    tensors: dict[str, Tensor]
    target: str
    target_config: dict[str, Any] | None

    @property
    def family(self) -> str:
        return self.ours["head"]["type"]

    @property
    def has_adapter(self) -> bool:
        """Whether the head drafts for its target with an adapter on it (Medusa-2)."""
        return (self.path / ADAPTER_WEIGHTS).is_file()

    @property
    def provenance(self) -> dict[str, Any]:
        """What importing the export needs to give the same head."""
        return {PROVENANCE: self.ours}


def read_folder(path: str | Path, *, target: str | None = None, dtype: str | None = None) -> HeadFolder:
    """A head folder, or the `final` of a run folder.

    Args: target: folder or hub id, where it is not the one that config.json names. dtype: of the exported weights;
        None: the target's, or as stored where the target is not there.
    Raises: BadInput where the folder is no head of ours, or a target that was named has no config.
    """
    path = Path(path)
    if not (path / "config.json").is_file() and (path / "final").is_dir():
        path = path / "final"
    ours = read_head_config(path)
    config = json.loads((path / "config.json").read_text())
    del config["headstart"]
    name = target or ours["target"]["name"]
    target_config = None
    try:
        found = read_model_config(name)
        # a model of several parts keeps its dtype outside its text part
        target_config = {**found.get_text_config().to_dict(), "dtype": str(found.dtype).removeprefix("torch.")}
    except BadInput:
        if target is not None:
            raise
    wanted = torch_dtype(dtype or usable((target_config or {}).get("dtype")))
    file = path / "model.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: {first_line(error)}") from error
    if isinstance(wanted, torch.dtype):
        tensors = {name: value.to(wanted) if value.is_floating_point() else value for name, value in tensors.items()}
    kind = str(next(value.dtype for value in tensors.values() if value.is_floating_point())).removeprefix("torch.")
    return HeadFolder(path, {**config, "dtype": kind, "torch_dtype": kind}, ours, tensors, name, target_config)


def usable(dtype: str | None) -> str:
    """A dtype that drafts are served in, else `auto`: as stored."""
    return dtype if dtype in ("float32", "bfloat16", "float16") else "auto"


def switching_word(where: str | Path, family: str) -> str | None:
    """The word in a path or hub id that makes vLLM take its head for another method; None: there is none.

    Of eagle and eagle3, whose method a path never overrides once it is given, only the last part of it counts.
    """
    allowed = {"eagle": ("eagle-",), "eagle3": ("eagle3",)}.get(family)
    text = str(where).lower() if allowed is None else Path(where).name.lower()
    return next((word for word in SWITCHES if word in text and word not in (allowed or ())), None)


@contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `output` if all goes well, else it goes. Raises BadInput where it exists."""
    output = Path(output)
    if output.exists():
        raise BadInput(f"{output}: exists already")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    except OSError as error:
        raise BadInput(f"{output}: {first_line(error)}") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        os.replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, name: str = "model.safetensors") -> None:
    whole = {key: value.contiguous() for key, value in tensors.items()}
    save_file(whole, folder / name, metadata={"format": "pt"})


def output_rows(head: HeadFolder) -> Tensor:
    """[V, D] the output layer of the target, read from its safetensors; a tied one is its embedding.

    Raises: BadInput where the target is no local folder, or has none.
    """
    if not Path(head.target).is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its lm_head is written in")
    where = stored_tensors(head.target)
    names = [name for name in ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDINGS) if name in where]
    if not names:
        raise BadInput(f"target {head.target}: no tensor lm_head.weight in it")
    with safe_open(where[names[0]], framework="pt") as opened:
        rows = opened.get_tensor(names[0])
    return rows.to(next(value.dtype for value in head.tensors.values() if value.is_floating_point()))
