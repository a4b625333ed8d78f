"""EAGLE-1 and EAGLE-2 in one folder that vLLM and SGLang both load.

SGLang has a bias that vLLM ignores, so it is zeros. Embedding and output layer are the target's and not in the file;
only of a target whose embedding module scales its table, the scaled one is in a folder for vLLM, as engines share the
bare one.
"""

from pathlib import Path
from typing import Any

import torch

from ...targets.weights.tensor_files import TensorFiles
from ..layouts.contracts import EMBEDDING, LM_HEAD, SIZES, Contract, llama_keys, sizes_of, trained_config
from ..layouts.foreign import ForeignFolder, Imported, architecture_of
from ..layouts.serving import HeadFolder, Serving
from ..layouts.writing import (
    BARE_EMBEDDING,
    SCALE,
    own_embedding,
    scale_key,
    scaling_problem,
    whole_vocabulary_note,
    write_config,
    write_tensors,
)

BIAS = "fc.bias"


class EagleServing(Serving):
    key_types = {"eagle_config": dict}
    in_fp8 = "LlamaForCausalLMEagle"
    computes = ("num_layers", "bias", "architecture")

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        why = f"{BIAS} is trained and vLLM leaves it out: export to sglang, or head.bias false"
        is_lost = to == "vllm" and bool(head.tensors[BIAS].any())
        scaling = "" if to == "vllm" else scaling_problem(head)
        return [*filter(None, [scaling, why if is_lost else ""])]

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        write_config(folder, {**head.config, **scale_key(head), **head.provenance})
        tensors = {name: value for name, value in head.tensors.items() if name not in ("d2t", "t2d")}
        write_tensors(folder, tensors | (own_embedding(head) if to == "vllm" else {}))

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        return "eagle" in str(config.get("architectures")).lower() or "fc.weight" in stored.shapes

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        contract = Contract("eagle")
        architectures = config.get("architectures") or []
        contract.report(
            architectures[:1] != ["LlamaForCausalLMEagle"] or "LlamaForCausalLM" not in architectures,
            f"architectures: found {architectures}: SGLang reads LlamaForCausalLMEagle from the first place, and vLLM "
            "loads it only with LlamaForCausalLM behind it",
        )
        llama_keys(config, contract)
        counts, sizes = sizes_of(config, contract, "num_hidden_layers"), sizes_of(config, contract, *SIZES)
        if counts is None or sizes is None:
            return contract
        contract.require("eagle", sizes, num_layers=counts["num_hidden_layers"])
        if config.get(SCALE) and contract.shapes:
            contract.shapes[EMBEDDING] = (sizes["vocab_size"], sizes["hidden_size"])
        contract.zero = [] if trained_config(config).get("bias") else [BIAS]
        contract.forbidden = {
            "layers.0.input_layernorm.weight": "the first layer does not normalise what it reads",
            "norm.weight": "there is no norm behind the last layer",
            LM_HEAD: "the output layer is the target's",
            EMBEDDING: BARE_EMBEDDING,
        }
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        tensors = folder.bare_tensors(EMBEDDING, LM_HEAD)
        bias = tensors.setdefault(BIAS, torch.zeros(folder.target.hidden_size))
        keys = {
            "num_layers": folder.config.read("num_hidden_layers", int) or 1,
            "bias": bool(bias.any()),
            "architecture": architecture_of(folder.config, folder.target),
        }
        return Imported(keys, tensors)

    def notes(self, head: HeadFolder) -> list[str]:
        return whole_vocabulary_note(head, "EAGLE-1 heads")
