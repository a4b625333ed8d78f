"""Targets in GGUF, llama.cpp's file format: dequantised once into a Hugging Face folder in the user's cache."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...base.errors import BadInput, first_line
from ...base.files import cache_root, locked, replacing_folder, restore_folder

MAGIC = b"GGUF"
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}  # GGUF's name: transformers'
FLOATS = {"F32": torch.float32, "F16": torch.float16}  # types that keep their precision; all others become bf16

VERSION = 2  # of what `dequantise` writes; it is part of a cached folder's name
ROPE_FREQS = "rope_freqs.weight"  # [H / 2] by which frequencies are divided
LLAMA_3 = {  # of all models with such factors, whose file does not say so
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def cache_folder() -> Path:
    """The folder of fetched and dequantised targets, in $HEADSTART_CACHE, else in ~/.cache/headstart."""
    return cache_root() / "targets"


def gguf_folder(path: str | Path) -> Path:
    """The folder with a GGUF file's weights, config, tokenizer and chat template; made on first use.

    Its name contains the file's digest, so that another file of the same name gets its own folder.

    Raises: BadInput as `dequantise`.
    """
    path = Path(path).expanduser()
    check_gguf(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{path.stem}-{digest[:12]}-{VERSION}"
    locks = cache_root() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with locked(locks / folder.name, waits=True):  # of two processes, the second takes the first's
        restore_folder(folder)
        if not (folder / "config.json").is_file():
            dequantise(path, folder)
    return folder


def dequantise(path: Path, output: Path) -> None:
    """Write a GGUF file's model as safetensors, with its tokenizer and chat template, atomically.

    Quantised weights become bf16, so they differ from those that llama.cpp uses only by bf16's rounding.

    Raises: BadInput on a file that is no GGUF, of an architecture or quantisation that transformers cannot read,
    without a tensor of the model, which transformers would fill with random numbers, or with rotary factors that
    transformers leaves out.
    """
    check_gguf(path)
    parent, name = str(path.parent), path.name
    packed = hasattr(transformers, "GgufConfig")  # transformers that would otherwise keep the weights packed
    whole: dict[str, Any] = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packed else {}
    try:
        from gguf import GGUFReader  # imported only where it is used

        file = GGUFReader(path)
        check_rotary(file)
        how = {"dtype": precision(file), "output_loading_info": True, **whole}
        loaded: Any = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name, **how)
        tokenizer: Any = AutoTokenizer.from_pretrained(parent, gguf_file=name)
        set_special_tokens(tokenizer, file)
        set_rotary(loaded[0].config, file)
    except ImportError as error:
        raise BadInput(f"target {path}: needs the package gguf (pip install gguf): {first_line(error)}") from error
    except Exception as error:  # transformers and gguf each raise several kinds
        raise BadInput(f"target {path}: {first_line(error)}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        parts = "of a file in parts, merge them (llama-gguf-split --merge)"
        raise BadInput(f"target {path}: no tensor for {missing[:3]} ...: {parts}")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now, and saved as such
    with replacing_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_rotary(file: Any) -> None:
    """Raises BadInput on scaled rotary embeddings, which transformers reads of no file, apart from Llama 3's, which
    `set_rotary` reads, and Gemma 4's, which are those of its default config."""
    architecture = file.get_field("general.architecture").contents()
    left_out = [tensor.name for tensor in file.tensors if tensor.name.startswith("rope_")]
    if architecture in ("llama", "gemma4"):
        left_out = [name for name in left_out if name != ROPE_FREQS]
    scaling = f"{architecture}.rope.scaling.type"
    field = file.get_field(scaling)
    left_out += [scaling] if field is not None and field.contents() != "none" else []
    if left_out:
        raise BadInput(f"{left_out[0]}: transformers leaves it out, so texts would be others: take the model's folder")


def set_rotary(config: Any, file: Any) -> None:
    """Set the rotary factors that a file of Llama 3.1 or later has. Raises BadInput if these are others."""
    factors = next((torch.tensor(tensor.data) for tensor in file.tensors if tensor.name == ROPE_FREQS), None)
    if factors is None or config.model_type not in ("llama", "mistral"):
        return
    plain = LlamaRotaryEmbedding(config).inv_freq
    config.rope_parameters |= {**LLAMA_3, "factor": factors.max().item()}
    scaled = LlamaRotaryEmbedding(config).inv_freq
    if factors.shape != plain.shape or not torch.allclose(scaled, plain / factors, rtol=1e-3, atol=0):
        raise BadInput(f"{ROPE_FREQS}: unknown rotary factors")


def set_special_tokens(tokenizer: Any, file: Any) -> None:
    """Set those that the file names: transformers 5.17 takes some files' start token for their end."""
    for key, name in SPECIAL_TOKENS.items():
        field = file.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
        tokenizer.init_kwargs.pop(f"{name}_token_id", None)


def precision(file: Any) -> torch.dtype:
    """The lossless dtype of the type that most matrices of the file have, bf16 if that is quantised."""
    kinds = [tensor.tensor_type.name for tensor in file.tensors if len(tensor.shape) > 1]
    return FLOATS.get(max(set(kinds), key=kinds.count), torch.bfloat16) if kinds else torch.bfloat16


def check_gguf(path: Path) -> None:
    """Raises BadInput if the file does not exist or is not GGUF."""
    if not path.is_file():
        raise BadInput(f"target {path}: no such file")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise BadInput(f"target {path}: not a GGUF file")
