"""Targets in GGUF, llama.cpp's file format: dequantised once into a Hugging Face folder in the user's cache."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...configs.errors import BadInput, first_line
from ...configs.files import cache_root, replacing_folder, restore_folder

MAGIC = b"GGUF"
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}  # GGUF's name: transformers'
FLOATS = {"F32": torch.float32, "F16": torch.float16}  # types that keep their precision; all others become bf16


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
    folder = cache_folder() / f"{path.stem}-{digest[:12]}"
    restore_folder(folder)
    if not (folder / "config.json").is_file():
        dequantise(path, folder)
    return folder


def dequantise(path: Path, output: Path) -> None:
    """Write a GGUF file's model as safetensors, with its tokenizer and chat template, atomically.

    Quantised weights become bf16, so they differ from those that llama.cpp uses only by bf16's rounding.

    Raises: BadInput on a file that is no GGUF, or of an architecture or quantisation that transformers cannot read.
    """
    check_gguf(path)
    parent, name = str(path.parent), path.name
    packed = hasattr(transformers, "GgufConfig")  # transformers that would otherwise keep the weights packed
    whole: dict[str, Any] = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packed else {}
    try:
        file = read_gguf(path)
        model: Any = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name, dtype=precision(file), **whole)
        tokenizer: Any = AutoTokenizer.from_pretrained(parent, gguf_file=name)
        set_special_tokens(tokenizer, file)
    except ImportError as error:
        raise BadInput(f"target {path}: needs the package gguf (pip install gguf): {first_line(error)}") from error
    except Exception as error:  # transformers and gguf each raise several kinds
        raise BadInput(f"target {path}: {first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now, and saved as such
    with replacing_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def set_special_tokens(tokenizer: Any, file: Any) -> None:
    """Set those that the file of `read_gguf` names: transformers 5.17 takes some files' start token for their end."""
    for key, name in SPECIAL_TOKENS.items():
        field = file.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
        tokenizer.init_kwargs.pop(f"{name}_token_id", None)


def read_gguf(path: Path) -> Any:
    """The file's fields and tensors. Raises BadInput without the package that reads them."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BadInput(f"target {path}: needs the package gguf (pip install gguf)") from error
    return GGUFReader(path)


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
