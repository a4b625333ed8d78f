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
from ..layouts.contracts import LM_HEAD, Contract, sizes_of
from ..layouts.foreign import ForeignFolder, Imported
from ..layouts.serving import HeadFolder, Serving
from ..layouts.writing import OUTPUTS, table_rows, write_config, write_tensors

ADAPTER_FOLDER = "target_adapter"
BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.")  # head and block in our name of a tensor
OUTPUT = re.compile(r"^(\d+)\.(\d+)\.(?=weight$|bias$)")  # head and number of blocks, of an output layer


def in_vllm(name: str) -> str:
    """vLLM's name of a tensor of ours, which has FasterDecoding's."""
    return OUTPUT.sub(r"lm_heads.\1.", BLOCK.sub(r"blocks.\1.layers.\2.", name))


def as_ours(name: str, num_residual_blocks: int = 0) -> str:
    """Our name of a tensor in either layout, where heads have so many blocks."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
    return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_residual_blocks}.", name)


class MedusaServing(Serving):
    key_types = dict.fromkeys(("medusa_num_heads", "medusa_num_layers"), int)
    computes = ("num_residual_blocks", "output")

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        size = head.own["draft_vocab_size"]
        cut = f"draft_vocab_size {size}: engines draft the whole vocabulary from Medusa heads"
        biases = [name for name in head.tensors if OUTPUT.match(name) and name.endswith(".bias")]
        biased = [f"tensor {name}: vLLM's Medusa has no bias in its output layers" for name in biases]
        if head.own["output"] == "shared" and (head.target_config or {}).get("lm_head_bias"):
            biased = ["output shared: the target's output layer has a bias, which vLLM's Medusa has not"]
        return ([cut] if size is not None else []) + biased

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        is_shared = head.own["output"] == "shared"
        tensors = {in_vllm(name): value for name, value in head.tensors.items()}
        tensors |= {LM_HEAD: table_rows(head, OUTPUTS)} if is_shared else {}
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
        return is_told or in_vllm("0.0.linear.weight") in stored.shapes

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        is_blocks = any(re.match(r"blocks\.|lm_heads\.|lm_head\.", name) for name in stored.shapes)
        contract = Contract("medusa" if is_blocks else "medusa (FasterDecoding)")
        counts = {
            "num_heads": config.get("num_heads", config.get("medusa_num_heads")),
            "num_hidden_layers": config.get("num_hidden_layers", config.get("medusa_num_layers")),
        }
        sizes = sizes_of({**config, **counts}, contract, "hidden_size", "vocab_size", *counts)
        contract.want(config, "model_type", "medusa", "vLLM reads the config as another model's")
        if sizes is None:
            return contract
        for ours, theirs in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
            if theirs in config and config[theirs] != counts[ours]:
                contract.problems.append(f"{theirs}: {config[theirs]}, but {ours} {counts[ours]}")
        is_biased = any(name.endswith(".bias") for name in stored.shapes)
        is_dropped = is_biased and not config.get("medusa_fc_bias")
        contract.report(is_dropped, "medusa_fc_bias: must be true; vLLM drops the blocks' biases without it")
        cut, vocab, size = config.get("truncated_vocab_size"), sizes["vocab_size"], sizes["hidden_size"]
        contract.report(cut not in (None, vocab), f"truncated_vocab_size: {cut}: heads draft all {vocab} tokens")
        is_shared = is_blocks and bool(config.get("original_lm_head"))
        keys = {"num_depths": sizes["num_heads"], "num_residual_blocks": sizes["num_hidden_layers"]}
        llama = {"hidden_size": size, "vocab_size": vocab, "num_attention_heads": 1}
        contract.require("medusa", llama, **keys, output="shared" if is_shared else "own")
        if not is_biased and not config.get("medusa_fc_bias"):
            contract.shapes = {name: shape for name, shape in contract.shapes.items() if not name.endswith(".bias")}
        if is_blocks:
            contract.shapes = {in_vllm(name): shape for name, shape in contract.shapes.items()}
        if is_shared and contract.shapes:
            contract.shapes[LM_HEAD] = (vocab, size)
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        stored = folder.tensors()
        found = [match for name in stored if (match := BLOCK.match(as_ours(name)))]
        if "token_map" in stored or not found:
            raise BadInput("a truncated Medusa vocabulary is not supported" if found else "no Medusa block in it")
        numbers = [(int(k), int(j)) for k, j in (match.groups() for match in found)]
        num_depths, num_residual_blocks = 1 + max(k for k, _ in numbers), 1 + max(j for _, j in numbers)
        tensors = {as_ours(n, num_residual_blocks): value for n, value in stored.items() if n != LM_HEAD}
        output = "own" if any(map(OUTPUT.match, tensors)) else "shared"
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
