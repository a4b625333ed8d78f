"""What an export reads (a trained head's folder and its target's config), and the two files that it writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...configs.errors import BadInput, first_line
from ...configs.files import write_json
from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from ..fit import load_skeleton
from ..folder import HeadRecord, read_head_config
from ..importing.mtp_checkpoint import tensor_locations
from ..loading import TargetConfig, load_tokenizer, read_model_config, torch_dtype
from ..targets.end_tokens import contradiction, said_ends

PROVENANCE = "headstart_export"  # the key under which an exported config.json keeps the head's own config
DFLASH, DFLASH2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"  # of block drafters
SWITCHES = ("eagle-", "eagle3", "dflash", "dspark")  # vLLM infers the method from these words in a path
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
SCALE = "embedding_scale"  # the key of an exported config.json that says why the folder has an embedding table
OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDINGS)  # a tied one is the embedding


@dataclass(frozen=True)
class HeadFolder:
    """A trained head as `save_head` wrote it."""

    path: Path
    config: dict[str, Any]  # the serving keys of config.json
    record: HeadRecord
    tensors: dict[str, Tensor]  # by served name, in the dtype that they are exported in
    target: str  # folder or hub id
    target_config: dict[str, Any] | None  # as Hugging Face reads it; None: the target is not available

    @property
    def family(self) -> str:
        return self.record.family

    @property
    def method(self) -> str:
        """The engines' name for it: the family, or dflash or dspark for a block drafter."""
        if self.family != "block":
            return self.family
        return "dspark" if self.config["architectures"] == [DSPARK] else "dflash"

    @property
    def own(self) -> dict[str, Any]:
        """The head's own config."""
        return self.record.head

    @property
    def has_adapter(self) -> bool:
        """Whether the head drafts for its target with an adapter (Medusa-2)."""
        return (self.path / ADAPTER_WEIGHTS).is_file()

    @cached_property
    def embedding_scale(self) -> float:
        """The factor by which the target's embedding module multiplies its table: sqrt(hidden size) in Gemma, mostly 1.

        A head reads what the module gives, without the factor by which a model like Granite multiplies that later. 1 if
        the target is not available. Raises: BadInput if the target cannot be built without weights.
        """
        if self.target_config is None:
            return 1.0
        module = load_skeleton(TargetConfig(path=self.target)).input_embedding
        return float(getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0)))

    @property
    def provenance(self) -> dict[str, Any]:
        """The entry of an exported config.json from which an import restores the same head."""
        return {PROVENANCE: self.record.to_json()}


def read_folder(path: str | Path, *, target: str | None = None, dtype: str | None = None) -> HeadFolder:
    """Read a head folder, or the `final` of a run folder.

    Args: target: folder or hub id, if it is not the one that config.json names. dtype: of the exported weights; None:
        the target's, or as stored if the target is not available.
    Raises: BadInput if we did not write the folder, or the config of the given target cannot be read.
    """
    path = Path(path)
    if not (path / "config.json").is_file() and (path / "final").is_dir():
        path = path / "final"
    config = read_head_config(path)
    record = HeadRecord.from_json(config.pop("headstart"))
    name = target or record.target_name
    target_config = None
    try:
        whole = read_model_config(TargetConfig(path=name))
        # a model of several parts keeps its dtype outside its text part
        target_config = {**whole.get_text_config().to_dict(), "dtype": str(whole.dtype).removeprefix("torch.")}
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
    return HeadFolder(path, {**config, "dtype": kind, "torch_dtype": kind}, record, tensors, name, target_config)


def usable(dtype: str | None) -> str:
    """The dtype if drafts are served in it, else `auto`, which means as stored."""
    return dtype if dtype in ("float32", "bfloat16", "float16") else "auto"


def switching_word(where: str | Path, family: str) -> str | None:
    """The word in a path or hub id that makes vLLM take its head for another method; None: there is none.

    A path never overrides an explicit method eagle, eagle3, dflash or dspark, so for these families only the last part
    of the path counts.
    """
    allowed = {"eagle": ("eagle-",), "eagle3": ("eagle3",), "block": ("dflash", "dspark")}.get(family)
    text = str(where).lower() if allowed is None else Path(where).name.lower()
    return next((word for word in SWITCHES if word in text and word not in (allowed or ())), None)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    write_json(folder / "config.json", config)


def write_ends(folder: Path) -> None:
    """Let the generation_config.json of an exported model name all end tokens, where files contradict each other."""
    config = json.loads((folder / "config.json").read_text())
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    try:
        tokenizer = load_tokenizer(TargetConfig(path=str(folder)))
    except BadInput:
        tokenizer = None
    eos = config.get("text_config", config).get("eos_token_id")
    said = said_ends(generation.get("eos_token_id"), eos, tokenizer)
    if contradiction(said, folder.name) is not None:
        write_json(path, {**generation, "eos_token_id": sorted(frozenset[int]().union(*said.values()))})


def write_tensors(folder: Path, tensors: dict[str, Tensor], *, name: str = "model.safetensors") -> None:
    whole = {key: value.contiguous() for key, value in tensors.items()}
    save_file(whole, folder / name, metadata={"format": "pt"})


def table_rows(head: HeadFolder, names: Sequence[str]) -> Tensor:
    """[V, D] the first of these tensors that the target's safetensors hold, in the head's dtype.

    Raises: BadInput if the target is not a local folder or has no such tensor.
    """
    if not Path(head.target).is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its {names[0]} is written in")
    where = tensor_locations(head.target)
    found = next((name for name in names if name in where), None)
    if found is None:
        raise BadInput(f"target {head.target}: no tensor {names[0]} in it")
    with safe_open(where[found], framework="pt") as opened:
        rows = opened.get_tensor(found)
    return rows.to(next(value.dtype for value in head.tensors.values() if value.is_floating_point()))
