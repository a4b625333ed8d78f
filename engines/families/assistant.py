"""Assistants of Gemma 4 in the folder that transformers, vLLM and SGLang load, and llama.cpp's converter reads."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...base.errors import BadInput
from ...base.typed import TypedKeys
from ...targets.weights.tensor_files import INTEGERS, TensorFiles
from ..layouts.contracts import FULL, Contract, sizes_of
from ..layouts.foreign import ForeignFolder, Imported, same
from ..layouts.gguf_file import GgufFile
from ..layouts.serving import HeadFolder, Serving
from ..layouts.writing import target_folder, write_config, write_tensors
from .draft_lm import TOKENIZER_FILES

MODEL_TYPE = "gemma4_assistant"
KINDS = ("gemma4_text", "gemma4_unified_text")  # of the targets that engines have an assistant of
TABLE = "model.embed_tokens.weight"
PREFIXED = ("layers.", "norm.")  # names that have the prefix `model.` there
GROUPS = "masked_embedding.token_ordering"


def served_name(name: str) -> str:
    """The name in the folder of a tensor of ours."""
    if name == "lm_head.weight":
        return TABLE
    return f"model.{name}" if name.startswith(PREFIXED) else name


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or {}


class AssistantServing(Serving):
    is_whole_model, targets = True, KINDS
    key_types = {"backbone_hidden_size": int, "num_centroids": int, "centroid_intermediate_top_k": int}
    computes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "layer_types")
    computes += ("num_centroids", "num_chosen")

    def refusals(self, head: HeadFolder, *, to: str) -> list[str]:
        why = "engines have assistants of Gemma 4 alone, and the target is"
        if head.target_config is None:
            return [f"{why} not there: name it with --target"]
        kind, cut = head.target_config.get("model_type"), head.own["draft_vocab_size"]
        problems = [f"{why} a {kind}"] if kind not in KINDS else []
        if head.own["layer_types"][-1] != FULL:
            problems.append(f"layer_types: {head.own['layer_types'][-1]} last: transformers makes it {FULL}")
        if cut is not None:
            problems.append(f"draft_vocab_size {cut}: engines draft the whole vocabulary from an assistant")
        return problems

    def write(self, head: HeadFolder, folder: Path, *, to: str) -> None:
        write_config(folder, {**head.config, **head.provenance})
        write_tensors(folder, {served_name(name): value for name, value in head.tensors.items()})
        if to == "llama.cpp":  # whose file of a head holds the vocabulary
            for pattern in TOKENIZER_FILES:
                for path in sorted(target_folder(head).glob(pattern)):
                    shutil.copyfile(path, folder / path.name)

    def recognises(self, config: dict[str, Any], stored: TensorFiles) -> bool:
        is_told = str(config.get("model_type", "")).startswith("gemma4") and "assistant" in str(config["model_type"])
        return is_told or "pre_projection.weight" in stored.shapes

    def contract(self, folder: Path, config: dict[str, Any], stored: TensorFiles, *, to: str) -> Contract:
        contract, text = Contract("assistant"), text_of(config)
        own = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
        sizes, backbone = sizes_of(text, contract, *own), sizes_of(config, contract, "backbone_hidden_size")
        kinds = text.get("layer_types") or []
        contract.report(str(config.get("model_type")).find("assistant") < 0, f"model_type: expected {MODEL_TYPE}")
        shared, every = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
        is_whole = shared in (None, 0, every)  # transformers fills it in
        contract.report(not is_whole, f"num_kv_shared_layers: {shared}, expected all {every}")
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            contract.want(text, key, 0, "transformers refuses another one")
        for key in ("enable_moe_block", "use_double_wide_mlp"):
            contract.report(text.get(key), f"{key}: transformers refuses it in an assistant")
        contract.report(text.get("attention_bias"), "attention_bias: expected none")
        if sizes is None or backbone is None:
            return contract
        width, inner, num_layers, num_heads, vocab, sliding = sizes.values()
        contract.report(len(kinds) != num_layers, f"layer_types: {len(kinds)} for {num_layers} layers")
        contract.report(kinds[-1:] != [FULL], f"layer_types: the last must be {FULL}; transformers makes it one")
        full = full_head_dim(text)
        for i, kind in enumerate(kinds):
            place, rows = f"model.layers.{i}", num_heads * (full if kind == FULL else sliding)
            contract.shapes |= {
                f"{place}.self_attn.q_proj.weight": (rows, width),
                f"{place}.self_attn.q_norm.weight": (rows // num_heads,),
                f"{place}.self_attn.o_proj.weight": (width, rows),
                f"{place}.mlp.gate_proj.weight": (inner, width),
                f"{place}.mlp.up_proj.weight": (inner, width),
                f"{place}.mlp.down_proj.weight": (width, inner),
                f"{place}.layer_scalar": (1,),
            }
            names = "input post_attention pre_feedforward post_feedforward".split()
            contract.shapes |= {f"{place}.{name}_layernorm.weight": (width,) for name in names}
        contract.shapes |= {
            "model.norm.weight": (width,),
            "pre_projection.weight": (width, 2 * backbone["backbone_hidden_size"]),
            "post_projection.weight": (backbone["backbone_hidden_size"], width),
            TABLE: (vocab, width),
        }
        contract.optional = {"lm_head.weight": (vocab, width)}
        if config.get("use_ordered_embeddings"):
            groups = sizes_of(config, contract, "num_centroids", "centroid_intermediate_top_k")
            num = (groups or {}).get("num_centroids", 1)
            contract.report(vocab % num, f"num_centroids: {num} does not divide the {vocab} tokens")
            contract.shapes |= {"masked_embedding.centroids.weight": (num, width), GROUPS: (vocab,)}
            contract.dtypes[GROUPS] = INTEGERS
            if stored.shapes.get(GROUPS) == (vocab,):
                is_split = torch.equal(stored.read(GROUPS).sort().values.long(), torch.arange(vocab))
                contract.report(not is_split, f"tensor {GROUPS}: expected each of the {vocab} tokens once")
        return contract

    def read(self, folder: ForeignFolder) -> Imported:
        config, text = folder.config, folder.config.inner("text_config")
        size, wanted = config.need("backbone_hidden_size", int), folder.target.hidden_size
        if size != wanted:
            raise BadInput(f"backbone_hidden_size {size}: {folder.target.name} has {wanted}")
        refuse_unlike(text, folder.target.config)
        keys = {
            "num_layers": text.need("num_hidden_layers", int),
            "hidden_size": text.need("hidden_size", int),
            "intermediate_size": text.need("intermediate_size", int),
            "num_heads": text.need("num_attention_heads", int),
            "layer_types": text.need("layer_types", list[str]),
        }
        if config.read("use_ordered_embeddings", bool):
            keys["num_centroids"] = config.need("num_centroids", int)
            keys["num_chosen"] = config.need("centroid_intermediate_top_k", int)
        stored = folder.tensors()
        tables = stored.pop("lm_head.weight", None), stored.pop(TABLE, None)
        is_tied = config.read("tie_word_embeddings", bool) is not False
        table = next((one for one in (tables[::-1] if is_tied else tables) if one is not None), None)
        if table is None:
            raise BadInput(f"tensor {TABLE}: missing")
        tensors = {name.removeprefix("model."): value for name, value in stored.items()}
        if GROUPS in tensors:
            tensors[GROUPS] = tensors[GROUPS].long().flatten()
        for i in range(keys["num_layers"]):
            tensors.setdefault(f"layers.{i}.layer_scalar", torch.ones(1))
        return Imported(keys, {**tensors, "lm_head.weight": table})

    def notes(self, head: HeadFolder) -> list[str]:
        return ["vLLM (0.32) and SGLang rotate its queries to the position before: fewer of its drafts may be accepted"]

    def method_of(self, file: GgufFile) -> str | None:
        return "assistant" if file.architecture == "gemma4-assistant" else None

    def not_in_llamacpp(self, config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        text = text_of(config)
        same = text.get("hidden_size") == config.get("backbone_hidden_size")
        return [f"hidden_size {text.get('hidden_size')}: must differ from the target's"] if same else []


def refuse_unlike(text: TypedKeys, target: Any) -> None:
    """Raises BadInput where layers compute otherwise than ours, which take from the target what they share with it."""
    if text.read("attention_bias", bool):
        raise BadInput(f"{text.where}attention_bias: expected none")
    if (name := text.read("hidden_activation", str)) not in (None, "gelu_pytorch_tanh"):
        raise BadInput(f"{text.where}hidden_activation {name}: expected gelu_pytorch_tanh")
    if text.need("layer_types", list[str])[-1:] != [FULL]:
        raise BadInput(f"{text.where}layer_types: expected {FULL} last, which transformers makes it")
    for key in ("sliding_window", "rms_norm_eps", "rope_parameters"):
        given, theirs = text.values.get(key), getattr(target, key, None)
        if given is not None and not same(given, theirs):
            raise BadInput(f"{text.where}{key} {given}: the target has {theirs}")


def full_head_dim(text: Mapping[str, Any]) -> int:
    """The head dimension of layers with full attention, in old and in new configs."""
    own = [layer["head_dim"] for layer in (text.get("per_layer_config") or {}).values() if "head_dim" in layer]
    return text.get("global_head_dim") or (own[0] if own else 512)
