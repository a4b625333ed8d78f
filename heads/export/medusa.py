"""Medusa in vLLM's layout (up to 0.32) and in FasterDecoding's, which vLLM and TGI also read.

Neither has cut draft vocabularies: vLLM's code has a `token_map` for them, but its loader refuses a head that has it.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import BadInput
from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from ..adapters import read_adapter
from ..folder import ADAPTER
from ..importing.imported import ForeignFolder, Imported
from .contracts import Contract, sizes_of
from .folder import OUTPUTS, table_rows, write_config, write_tensors
from .serving import HeadFolder, Serving
from .tensor_files import TensorFiles

ADAPTER_FOLDER = "target_adapter"


class MedusaServing(Serving):
    engines = ("vllm", "hf")
    order = 2
    key_types = dict.fromkeys(("medusa_num_heads", "medusa_num_layers"), int)
    computes = ("num_blocks", "output")

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        if to == "hf":
            write_published(head, folder)
        else:
            write_blocks(head, folder)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        is_told = config.get("model_type") == "medusa" or "medusa_num_heads" in config
        return is_told or "blocks.0.layers.0.weight" in stored.shapes

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        is_blocks = any(re.match(r"blocks\.|lm_heads\.|lm_head\.", name) for name in stored.shapes)
        contract = Contract("medusa" if is_blocks else "medusa (FasterDecoding)")
        counts = {
            "num_heads": config.get("num_heads", config.get("medusa_num_heads")),
            "num_hidden_layers": config.get("num_hidden_layers", config.get("medusa_num_layers")),
        }
        sizes = sizes_of({**config, **counts}, contract, ("hidden_size", "vocab_size", *counts))
        contract.want(config, "model_type", "medusa", "vLLM reads the config as another model's")
        if sizes is None:
            return contract
        for ours, theirs in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
            if theirs in config and config[theirs] != sizes[ours]:
                contract.problems.append(f"{theirs}: {config[theirs]}, but {ours} {sizes[ours]}")
        hidden, vocab, num_blocks = sizes["hidden_size"], sizes["vocab_size"], sizes["num_hidden_layers"]
        is_biased = any(name.endswith(".bias") for name in stored.shapes)
        is_dropped = is_biased and not config.get("medusa_fc_bias")
        contract.report(is_dropped, "medusa_fc_bias: must be true; vLLM drops the blocks' biases without it")
        cut = config.get("truncated_vocab_size")
        contract.report(cut not in (None, vocab), f"truncated_vocab_size: {cut}: heads draft all {vocab} tokens")
        for k in range(sizes["num_heads"]):
            for j in range(num_blocks):
                place = f"blocks.{k}.layers.{j}" if is_blocks else f"{k}.{j}.linear"
                contract.shapes[f"{place}.weight"] = (hidden, hidden)
                if is_biased or config.get("medusa_fc_bias"):
                    contract.shapes[f"{place}.bias"] = (hidden,)
            if not (is_blocks and config.get("original_lm_head")):
                place = f"lm_heads.{k}" if is_blocks else f"{k}.{num_blocks}"
                contract.shapes[f"{place}.weight"] = (vocab, hidden)
        if is_blocks and config.get("original_lm_head"):
            contract.shapes["lm_head.weight"] = (vocab, hidden)
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        raw = folder.tensors()
        parts = r"(\d+)\.(\d+)\.linear\.|blocks\.(\d+)\.layers\.(\d+)\."
        blocks = [match for name in raw if (match := re.search(parts, name))]
        if "token_map" in raw or not blocks:
            raise BadInput("a truncated Medusa vocabulary is not supported" if blocks else "no Medusa block in it")
        numbers = [[int(part) for part in match.groups() if part is not None] for match in blocks]
        num_depths, num_blocks = 1 + max(k for k, _ in numbers), 1 + max(j for _, j in numbers)
        tensors = from_blocks(raw, num_blocks=num_blocks)
        outputs = [f"{k}.{num_blocks}.weight" for k in range(num_depths)]
        output = "own" if any(name in tensors for name in outputs) else "shared"
        if (folder.own or {"output": output})["output"] == "shared":
            tensors = {name: value for name, value in tensors.items() if name not in outputs}
        for k, j in numbers:
            tensors.setdefault(f"{k}.{j}.linear.bias", torch.zeros(folder.target.hidden_size))
        adapter = read_adapter(folder.path / ADAPTER_FOLDER)
        tensors |= {ADAPTER + name: value for name, value in adapter.items()}
        return Imported({"num_depths": num_depths, "num_blocks": num_blocks, "output": output}, tensors)

    def notes(self, head: HeadFolder) -> list[str]:
        why = "merge that into the target that you serve"
        return [f"it drafts for the target with {ADAPTER_FOLDER}/ on it: {why}"] if head.has_adapter else []

    def commands(self, head: HeadFolder, output: str, *, to: str, target: str) -> dict[str, str]:
        # FasterDecoding's layout is one that neither engine reads
        return {} if to == "hf" else super().commands(head, output, to=to, target=target)


def write_blocks(head: HeadFolder, folder: Path) -> None:
    """vLLM's layout: blocks.{k}.layers.{j} and lm_heads.{k}, or one lm_head if the head shares the target's.

    Raises: BadInput if the draft vocabulary is cut, or output layers have a bias, which vLLM does not support.
    """
    check_whole_vocabulary(head)
    tensors = {served_name(head, name): value for name, value in head.tensors.items()}
    is_shared = head.own["output"] == "shared"
    if is_shared:
        tensors["lm_head.weight"] = table_rows(head, OUTPUTS)
    config = {key: value for key, value in head.config.items() if not key.startswith("medusa_num_")}
    write_config(folder, {**config, "original_lm_head": is_shared, **head.provenance})
    write_tensors(folder, tensors)
    carry_adapter(head, folder)


def write_published(head: HeadFolder, folder: Path) -> None:
    """FasterDecoding's layout: {k}.{j}.linear and {k}.{num_blocks}, a copy of the target's output layer if shared.

    Raises: BadInput if the draft vocabulary is cut.
    """
    check_whole_vocabulary(head)
    tensors = dict(head.tensors)
    if head.own["output"] == "shared":
        rows, config = table_rows(head, OUTPUTS), head.config
        names = [f"{k}.{config['medusa_num_layers']}.weight" for k in range(config["medusa_num_heads"])]
        tensors |= {name: rows.clone() for name in names}
    own = {"base_model_name_or_path": head.target}
    write_config(folder, {**head.config, **own, **head.provenance})
    write_tensors(folder, tensors, name="medusa_lm_head.safetensors")
    carry_adapter(head, folder)


def check_whole_vocabulary(head: HeadFolder) -> None:
    """Raises BadInput if the draft vocabulary is cut."""
    size = head.own["draft_vocab_size"]
    if size is not None:
        raise BadInput(
            f"head {head.path}: draft_vocab_size {size}: engines draft the whole vocabulary from Medusa heads"
        )


def served_name(head: HeadFolder, name: str) -> str:
    """vLLM's name of a tensor. Raises BadInput on a bias of an output layer."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
    if match:
        k, j, kind = match.groups()
        return f"blocks.{k}.layers.{j}.{kind}"
    match = re.fullmatch(r"(\d+)\.\d+\.weight", name)
    if match is None:
        raise BadInput(f"head {head.path}: tensor {name}: vLLM's Medusa has no bias in its output layers")
    return f"lm_heads.{match.group(1)}.weight"


def carry_adapter(head: HeadFolder, folder: Path) -> None:
    """Copy the target's adapter into a subfolder, as engines read every safetensors file next to a head's config."""
    if head.has_adapter:
        (folder / ADAPTER_FOLDER).mkdir()
        for name in ("adapter_config.json", ADAPTER_WEIGHTS):
            shutil.copyfile(head.path / name, folder / ADAPTER_FOLDER / name)


def from_blocks(tensors: dict[str, Tensor], *, num_blocks: int) -> dict[str, Tensor]:
    """Rename tensors of either layout to FasterDecoding's names, which are ours; drop a shared output layer."""
    renamed = {}
    for name, value in tensors.items():
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        renamed[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_blocks}.", name)] = value
    renamed.pop("lm_head.weight", None)
    return renamed
