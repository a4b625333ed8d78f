"""EAGLE-1 and EAGLE-2 in one folder that vLLM and SGLang both load.

SGLang has a bias that vLLM ignores, so it is zeros. Embedding and output layer are the target's and not in the file;
only of a target whose embedding module scales its table, the scaled one is in a folder for vLLM, as engines share the
bare one.
"""

from pathlib import Path
from typing import Any

import torch

from ...configs.errors import BadInput
from ..importing.imported import ForeignFolder, Imported
from ..importing.published import architecture_of
from .contracts import SIZES, Contract, llama_keys, llama_layer_shapes, sizes_of, trained_config
from .folder import (
    BARE_EMBEDDING,
    SCALE,
    bare_embedding,
    own_embedding,
    scale_key,
    whole_vocabulary_note,
    write_config,
    write_tensors,
)
from .serving import HeadFolder, Serving
from .tensor_files import TensorFiles


class EagleServing(Serving):
    engines = ("vllm", "sglang")
    order = 4
    path_words = ("eagle-",)
    key_types = {"eagle_config": dict}
    computes = ("num_layers", "bias", "architecture")
    sglang_algorithms = {"eagle": "EAGLE"}

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        """fc, layers.{i}. Raises BadInput on a trained bias for vLLM, which would ignore it."""
        embedding = own_embedding(head) if to == "vllm" else bare_embedding(head)
        if to == "vllm" and head.tensors["fc.bias"].any():
            why = "fc.bias is trained and vLLM leaves it out: export to sglang, or head.bias false"
            raise BadInput(f"head {head.path}: {why}")
        write_config(folder, {**head.config, **scale_key(head), **head.provenance})
        tensors = {name: value for name, value in head.tensors.items() if name not in ("d2t", "t2d")}
        write_tensors(folder, tensors | embedding)

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
        sizes = sizes_of(config, contract, (*SIZES, "num_hidden_layers"))
        if sizes is None:
            return contract
        hidden = sizes["hidden_size"]
        contract.shapes = {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
        for i in range(sizes["num_hidden_layers"]):
            norms = ["post_attention_layernorm"] if i == 0 else ["input_layernorm", "post_attention_layernorm"]
            contract.shapes |= llama_layer_shapes(f"layers.{i}", sizes, in_size=hidden, norms=norms)
        contract.zero = [] if trained_config(config).get("bias") else ["fc.bias"]
        contract.forbidden = {
            "layers.0.input_layernorm.weight": "the first layer does not normalise what it reads",
            "norm.weight": "there is no norm behind the last layer",
            "lm_head.weight": "the output layer is the target's",
            "embed_tokens.weight": BARE_EMBEDDING,
        }
        if config.get(SCALE):
            contract.shapes["embed_tokens.weight"] = (sizes["vocab_size"], hidden)
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        tensors = folder.bare_tensors("embed_tokens.weight", "lm_head.weight")
        bias = tensors.setdefault("fc.bias", torch.zeros(folder.target.hidden_size))
        keys = {
            "num_layers": folder.config.read("num_hidden_layers", int) or 1,
            "bias": bool(bias.any()),
            "architecture": architecture_of(folder.config, folder.target),
        }
        return Imported(keys, tensors)

    def notes(self, head: HeadFolder) -> list[str]:
        return whole_vocabulary_note(head, "EAGLE-1 heads")
