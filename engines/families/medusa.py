"""Medusa in vLLM's layout (up to 0.32); FasterDecoding's, which published heads have, is read too.

Neither has cut draft vocabularies: vLLM's code has a `token_map` for them, but its loader refuses a head that has it.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ...base.errors import BadInput
from ...heads.stored.folder import ADAPTER
from ...targets.adapters import WEIGHTS as ADAPTER_WEIGHTS
from ...targets.adapters import read_adapter
from ...targets.weights.tensor_files import TensorFiles
from ..layouts.contracts import Contract, sizes_of
from ..layouts.foreign import ForeignFolder, Imported
from ..layouts.serving import HeadFolder, Serving
from ..layouts.tensors import LM_HEAD, Part, shapes_of
from ..layouts.writing import OUTPUTS, table_rows, write_config, write_tensors

ADAPTER_FOLDER = "target_adapter"
BLOCK = re.compile(
    r"(\d+)\.(\d+)\.linear\.|blocks\.(\d+)\.layers\.(\d+)\."
)  # head and block in a name of either layout


def parts_of(num_heads: int, num_residual_blocks: int) -> list[Part]:
    """The tensors of a head by FasterDecoding's names, which are ours; the other ones are vLLM's."""
    parts = []
    for k in range(num_heads):
        for j in range(num_residual_blocks):
            ours, theirs = f"{k}.{j}.linear", f"blocks.{k}.layers.{j}"
            parts.append(Part(f"{ours}.weight", "hidden hidden", f"{theirs}.weight"))
            parts.append(Part(f"{ours}.bias", "hidden", f"{theirs}.bias", when="biased"))
        parts.append(
            Part(f"{k}.{num_residual_blocks}.weight", "vocab hidden", f"lm_heads.{k}.weight", when="own output")
        )
    return parts


class MedusaServing(Serving):
    order = 2
    key_types = dict.fromkeys(("medusa_num_heads", "medusa_num_layers"), int)
    computes = ("num_residual_blocks", "output")

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        size, known = head.own["draft_vocab_size"], {part.name for part in own_parts(head)} | {LM_HEAD.name}
        cut = f"draft_vocab_size {size}: engines draft the whole vocabulary from Medusa heads"
        biases = [name for name in head.tensors if name not in known and name not in ("d2t", "t2d")]
        biased = [f"tensor {name}: vLLM's Medusa has no bias in its output layers" for name in biases]
        return ([cut] if size is not None else []) + biased

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        parts, is_shared = own_parts(head), head.own["output"] == "shared"
        rows = table_rows(head, OUTPUTS) if is_shared else None
        tensors = {part.other: head.tensors[part.name] for part in parts if part.name in head.tensors}
        tensors |= {} if rows is None else {LM_HEAD.name: rows}
        config = {key: value for key, value in head.config.items() if not key.startswith("medusa_num_")}
        config["original_lm_head"] = is_shared
        write_config(folder, {**config, **head.provenance})
        write_tensors(folder, tensors)
        if head.has_adapter:  # in a subfolder, as engines read every safetensors file next to a head's config
            (folder / ADAPTER_FOLDER).mkdir()
            for name in ("adapter_config.json", ADAPTER_WEIGHTS):
                shutil.copyfile(head.path / name, folder / ADAPTER_FOLDER / name)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        is_told = config.get("model_type") == "medusa" or "medusa_num_heads" in config
        return is_told or parts_of(1, 1)[0].other in stored.shapes

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        is_blocks = any(re.match(r"blocks\.|lm_heads\.|lm_head\.", name) for name in stored.shapes)
        contract = Contract("medusa" if is_blocks else "medusa (FasterDecoding)")
        counts = {
            "num_heads": config.get("num_heads", config.get("medusa_num_heads")),
            "num_hidden_layers": config.get("num_hidden_layers", config.get("medusa_num_layers")),
        }
        keys = {"hidden_size": "hidden", "vocab_size": "vocab", "num_heads": "num_heads", "num_hidden_layers": "blocks"}
        sizes = sizes_of({**config, **counts}, contract, keys)
        contract.want(config, "model_type", "medusa", "vLLM reads the config as another model's")
        if sizes is None:
            return contract
        for ours, theirs in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
            if theirs in config and config[theirs] != counts[ours]:
                contract.problems.append(f"{theirs}: {config[theirs]}, but {ours} {counts[ours]}")
        is_biased = any(name.endswith(".bias") for name in stored.shapes)
        is_dropped = is_biased and not config.get("medusa_fc_bias")
        contract.report(is_dropped, "medusa_fc_bias: must be true; vLLM drops the blocks' biases without it")
        cut, vocab = config.get("truncated_vocab_size"), sizes["vocab"]
        contract.report(cut not in (None, vocab), f"truncated_vocab_size: {cut}: heads draft all {vocab} tokens")
        is_shared = is_blocks and bool(config.get("original_lm_head"))
        having = {"biased": is_biased or config.get("medusa_fc_bias"), "own output": not is_shared}
        contract.shapes = shapes_of(parts_of(sizes["num_heads"], sizes["blocks"]), sizes, having, other=is_blocks)
        if is_shared:
            contract.shapes[LM_HEAD.name] = (vocab, sizes["hidden"])
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        raw = {re.sub(r"^medusa_heads?\.", "", name): value for name, value in folder.tensors().items()}
        found = [match for name in raw if (match := BLOCK.search(name))]
        if "token_map" in raw or not found:
            raise BadInput("a truncated Medusa vocabulary is not supported" if found else "no Medusa block in it")
        numbers = [[int(part) for part in match.groups() if part is not None] for match in found]
        num_depths, num_residual_blocks = 1 + max(k for k, _ in numbers), 1 + max(j for _, j in numbers)
        parts = parts_of(num_depths, num_residual_blocks)
        ours = {part.other: part.name for part in parts}
        tensors = {ours.get(name, name): value for name, value in raw.items() if name != LM_HEAD.name}
        output = "own" if any(part.name in tensors for part in parts if part.when == "own output") else "shared"
        for k, j in numbers:
            tensors.setdefault(f"{k}.{j}.linear.bias", torch.zeros(folder.target.hidden_size))
        adapter = read_adapter(folder.path / ADAPTER_FOLDER)
        tensors |= {ADAPTER + name: value for name, value in adapter.items()}
        return Imported(
            {"num_depths": num_depths, "num_residual_blocks": num_residual_blocks, "output": output}, tensors
        )

    def notes(self, head: HeadFolder) -> list[str]:
        why = "merge that into the target that you serve"
        return [f"it drafts for the target with {ADAPTER_FOLDER}/ on it: {why}"] if head.has_adapter else []


def own_parts(head: HeadFolder) -> list[Part]:
    """The tensors that a head of ours may have."""
    return parts_of(head.config["medusa_num_heads"], head.config["medusa_num_layers"])
