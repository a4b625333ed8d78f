"""The files that an export writes, and what it reads of the target."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...base.errors import BadInput
from ...base.files import write_json
from ...targets.end_tokens import contradiction, said_ends
from ...targets.loading import TargetConfig, load_tokenizer
from ...targets.weights.gguf import gguf_folder
from ...targets.weights.stored import indexed_tensors
from .contracts import EMBEDDING
from .serving import HeadFolder

EMBEDDINGS = (
    "model.embed_tokens.weight",
    EMBEDDING,
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
BARE_EMBEDDING = "SGLang puts the target's embedding in its place, vLLM does not"
SCALE = "embedding_scale"  # the key of an exported config.json that says why the folder has an embedding table
OUTPUTS = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDINGS)  # a tied one is the embedding


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


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    whole = {key: value.contiguous() for key, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def table_rows(head: HeadFolder, names: Sequence[str]) -> Tensor:
    """[V, D] the first of these tensors that the target's safetensors hold, in the head's dtype.

    Raises: BadInput if the target is not a local folder or has no such tensor.
    """
    if not Path(head.target).is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its {names[0]} is written in")
    where = indexed_tensors(head.target)
    table = next((name for name in names if name in where), None)
    if table is None:
        raise BadInput(f"target {head.target}: no tensor {names[0]} in it")
    with safe_open(where[table].file, framework="pt") as opened:
        rows = opened.get_tensor(table)
    return rows.to(getattr(torch, head.config["dtype"]))


def scale_key(head: HeadFolder) -> dict[str, float]:
    return {} if head.embedding_scale == 1 else {SCALE: head.embedding_scale}


def own_embedding(head: HeadFolder) -> dict[str, Tensor]:
    """The table as a target's embedding module scales it, which vLLM keeps for the draft; none if it does not.

    Raises: BadInput as `table_rows`."""
    if head.embedding_scale == 1:
        return {}
    rows = table_rows(head, EMBEDDINGS)
    return {EMBEDDING: rows * torch.tensor(head.embedding_scale, dtype=rows.dtype)}  # rounded as models do


def scaling_problem(head: HeadFolder) -> str:
    """Why an engine that gives a draft the target's bare table cannot have this head; empty: it can.

    Raises: BadInput if the target cannot be built without weights."""
    if head.embedding_scale == 1:
        return ""
    kind = (head.target_config or {}).get("model_type")
    why = "scales its embeddings and this engine gives a draft the bare table, so it would draft badly there"
    return f"{kind} {why}: nothing written"


def target_folder(head: HeadFolder) -> Path:
    """The folder with the target's config and tokenizer; for a GGUF file, its dequantised folder.

    Raises: BadInput if the target is not a local folder."""
    if head.target.endswith(".gguf"):
        return gguf_folder(head.target)
    if not Path(head.target).is_dir():
        raise BadInput(f"target {head.target}: no local folder; name one with --target: its tokenizer is copied")
    return Path(head.target)


def whole_vocabulary_note(head: HeadFolder, what: str) -> list[str]:
    """A remark where the draft vocabulary is cut and engines do not mind."""
    line = f"engines draft the whole vocabulary from {what}: draft_vocab_size has no effect there"
    return [line] if head.own["draft_vocab_size"] else []
