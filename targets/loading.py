"""Loading a target from disk or the hub (path, config, dtype, device, fingerprint), and locating its parts."""

import ctypes
import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import logging as hf_logging

from ..base.errors import BadInput, first_line
from ..base.files import LocalPath, lack_of
from .weights.gguf import gguf_folder
from .weights.stored import DTYPES, PLAIN, StoredTensor, fingerprint_of_stored, stored_tensors

CONSENT = "HEADSTART_TRUST_REMOTE_CODE"  # environment variable: 1 permits code of a model's own repository
HUB_SECONDS = 10.0  # for an answer of the hub
GPU = Path("/dev/nvidiactl")  # there where a machine has GPUs of NVIDIA
GATED = re.compile("access (a )?gated repo")  # in what transformers and the hub's client say
# multimodal models that transformers would load as language models alone, in which pictures have no place
WHOLE = ("qwen3_5", "qwen3_5_moe")
NOT_COMPUTED = ("dtype", "torch_dtype", "transformers_version", "architectures", "use_cache")  # keys of a config


@dataclass(kw_only=True)
class TargetConfig:
    """Which frozen model to load."""

    path: LocalPath  # local folder, hub id or GGUF file
    dtype: str = "auto"  # float32, bfloat16, float16, or auto: as stored; of a run, `targets.dtype.default_dtype`
    # for a target too large for one GPU, as Accelerate takes it: `auto` spreads its layers over all GPUs of the machine
    # and then over host memory, for a single process; None: each process loads it on its own device
    device_map: str | dict[str, str | int] | None = None
    adapter: LocalPath | None = None  # a folder of a LoRA adapter (peft), as served on the target; merged into it
    revision: str | None = None  # of the hub repository
    trust_remote_code: bool = False


def torch_dtype(name: str) -> torch.dtype | str:
    """The `torch.dtype` of a name in a config; `auto` is returned as it is. Raises BadInput on an unknown name."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if name == "auto":
        return name
    if short.get(name, name) not in names:
        raise BadInput(f"dtype {name!r}: expected one of auto, {', '.join(names)}")
    return names[short.get(name, name)]


def torch_device(name: str) -> torch.device:
    """Raises BadInput on a device that torch does not know."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"device {name}: {first_line(error)}") from error


def found_path(path: str | Path) -> str:
    """A hub id unchanged, a local folder with `~` expanded, a GGUF file as the folder that it is dequantised into.

    Raises: BadInput if a folder holds no model or a GGUF file cannot be read.
    """
    path = str(path)
    if path.endswith(".gguf"):
        return str(gguf_folder(path))
    if Path(path).exists() or path.startswith((".", "/", "~")):
        path = str(Path(path).expanduser())
        if not Path(path, "config.json").is_file():
            raise BadInput(f"target {path}: {lack_of(path, 'config.json')}")
    return path


def read_model_config(target: TargetConfig) -> Any:
    """The Hugging Face config of a model, without its weights. Raises BadInput if it cannot be loaded."""
    path, revision = found_path(target.path), target.revision
    try:
        with quiet_loading():
            if not Path(path).exists():
                ask_hub(path, revision)
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=is_trusted(target))
    except Exception as error:  # as in load_model
        where = "" if Path(path).exists() else "no such folder, and from the hub: "
        raise BadInput(f"target {path}: {where}{refusal_of(error)}") from error
    return config


def ask_hub(path: str, revision: str | None) -> None:
    """Raises at once what the hub's client would say after half a minute of retries: that it is not reached, or has no
    such model. Nothing is asked of a model that is in the cache."""
    if not HF_HUB_OFFLINE and try_to_load_from_cache(path, "config.json", revision=revision) is None:
        HfApi().model_info(path, revision=revision, timeout=HUB_SECONDS)


def is_trusted(target: TargetConfig) -> bool:
    """Whether code of the model's own repository may be run."""
    return target.trust_remote_code or os.environ.get(CONSENT) == "1"


def refusal_of(error: Exception) -> str:
    """Another library's error in a line; where it is about code of the model's own, how to consent; of a gated model
    how to get it."""
    if GATED.search(str(error)):
        return "gated: ask for access on its page on huggingface.co, then `hf auth login`, or set HF_TOKEN"
    if "trust_remote_code" not in str(error):
        return first_line(error)
    how = f"having read it, allow it with {CONSENT}=1 in the environment, or target.trust_remote_code=true in a run"
    return f"comes with code of its own, which is not run unasked; {how}"


def stored_generation(target: TargetConfig) -> GenerationConfig | None:
    """The generation_config.json of a model; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(found_path(target.path), revision=target.revision or "main")
    except (OSError, ValueError):
        return None


def load_tokenizer(target: TargetConfig) -> Any:
    """A model's tokenizer, without its weights. Raises BadInput if it cannot be loaded, or the folder has none."""
    path, revision = found_path(target.path), target.revision
    if not comes_with_tokenizer(path):
        raise BadInput(f"tokenizer of {path}: no file of one in the folder")
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=is_trusted(target))
    except Exception as error:
        raise BadInput(f"tokenizer of {path}: {refusal_of(error)}") from error


def comes_with_tokenizer(path: str) -> bool:
    """Whether a model's folder holds a tokenizer; without one, transformers returns an empty one for some families."""
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
    return not Path(path).is_dir() or any(any(Path(path).glob(pattern)) for pattern in patterns)


def quantization(config: Any) -> str | None:
    """The quantisation method of a model's stored weights, as its config names it; None: not quantised."""
    method = getattr(config, "quantization_config", None)
    method = method if isinstance(method, dict) or method is None else method.to_dict()
    return None if method is None else str(method.get("quant_method"))


def is_quantised(model: nn.Module) -> bool:
    """Whether a model that was stored quantised still has such weights, which only its own layers read; not of one that
    transformers has dequantised, as it does where a device cannot compute with them."""
    tensors = [*model.parameters(), *model.buffers()]
    return any(
        tensor.dtype != torch.bool and (tensor.itemsize == 1 or not tensor.is_floating_point()) for tensor in tensors
    )


def release_memory() -> None:
    """Give back memory that nothing refers to any more: of GPUs, and what glibc keeps of what was freed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def default_device() -> str:
    """cuda where there is one, else cpu, with a line where the machine has one that torch does not see."""
    say_unseen_gpu()
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def say_unseen_gpu() -> None:
    """Say once that the machine has a GPU that this torch does not see, unless it is hidden on purpose."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if GPU.exists() and not is_hidden and not torch.cuda.is_available():
        why = f"torch {torch.__version__} does not see the GPU of this machine, so its CPUs compute"
        print(f"headstart: {why}; install a torch for its driver (pytorch.org)", file=sys.stderr)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' loading reports, and its progress bars unless stderr is a terminal."""
    verbosity, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bar:
            hf_logging.enable_progress_bar()


def use_attention(model: Any, name: str) -> None:
    """Let a model compute attention by the implementation of that name, without a word on parts that it lost."""
    with quiet_loading():
        model.set_attn_implementation(name)


def config_hash(config: Any) -> str:
    """16 hex digits of sha256 over a model's config, without where it lies, its dtype and who wrote it."""

    def hashed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: hashed(part) for key, part in value.items() if str(key)[:1] != "_" and key not in NOT_COMPUTED}

    return hashlib.sha256(json.dumps(hashed(config.to_dict()), sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_model(
    target: TargetConfig, *, device: str | torch.device | None = None, is_whole: bool = False
) -> tuple[Any, str]:
    """Load a Hugging Face causal language model; returns it and the fingerprint of its weights.

    Args: device: ignored if the config has a device_map. is_whole: with the parts that read images and sound.
    Raises: BadInput if there is no such model or device, or the checkpoint lacks weights.
    """
    path, wanted, config = target.path, torch_dtype(target.dtype), read_model_config(target)
    method = quantization(config)
    if method is not None and method not in AUTO_QUANTIZER_MAPPING and f"{method}_4bit" not in AUTO_QUANTIZER_MAPPING:
        raise BadInput(f"target {path}: stored quantised ({method}): transformers cannot read that")
    check_safe(path)
    if target.device_map is not None and isinstance(wanted, torch.dtype) and wanted != config.get_text_config().dtype:
        raise BadInput(f"target.dtype {target.dtype}: with target.device_map weights stay as stored: leave it at auto")
    try:
        with quiet_loading():
            loaded: Any = model_class(config).from_pretrained(
                path,
                config=config,
                dtype="auto",
                output_loading_info=True,
                device_map=target.device_map,
                revision=target.revision,
                trust_remote_code=is_trusted(target),
                use_safetensors=True,  # no pickles, which can run code
            )
        model, info = loaded
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, safetensors' own ...
        stored = "" if method is None else f"stored quantised ({method}): "
        raise BadInput(f"target {path}: {stored}{refusal_of(error)}") from error
    is_packed = method is not None and is_quantised(model)
    if is_packed and isinstance(wanted, torch.dtype):
        raise BadInput(
            f"target.dtype {target.dtype}: weights stored quantised ({method}) stay as stored: leave it at auto"
        )
    if info["missing_keys"]:
        raise BadInput(f"target {path}: weights missing in the checkpoint: {sorted(info['missing_keys'])[:3]} ...")
    if not is_whole:
        drop_other_modalities(model)
    fingerprint = Checkpoint.of(target, config).fingerprint()
    if target.device_map is not None:
        return model, fingerprint
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # no such device, none in this build, too little memory
        raise BadInput(f"device {device}: {first_line(error)}") from error
    if isinstance(wanted, torch.dtype):
        cast_weights(model, model.modules(), wanted)
        cast_buffers(model, target, wanted)
    return model, fingerprint


class Checkpoint(NamedTuple):
    """A model as it is stored, of which parts can be read. dtype: of its weights; None: not known."""

    path: str
    config: Any
    stored: dict[str, StoredTensor]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, target: TargetConfig, config: Any = None) -> Self:
        """Args: config: the model's, if it was read before. Raises: BadInput if there is no such model, or it is
        damaged."""
        path, config = found_path(target.path), config or read_model_config(target)
        stored = stored_tensors(path, revision=target.revision)
        plain = (DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in PLAIN)
        return cls(path, config, stored, config.dtype or next(plain, None))

    @property
    def num_layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    def fingerprint(self) -> str:
        """Reads all of it."""
        return fingerprint_of_stored(self.stored, num_layers=self.num_layers)


def check_safe(path: str) -> None:
    """Raises BadInput if a local folder holds weights as pickles alone, which can run code when they are read."""
    files = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else []
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth")) and "model" in name]
    if pickles and not any(name.endswith(".safetensors") for name in files):
        raise BadInput(f"target {path}: weights in {pickles[0]}, a pickle, are not read: convert them to safetensors")


def cast_weights(model: Any, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Give the weights of some of a model's modules, without those inside them, the dtypes in which transformers loads
    them for `dtype`: some models keep some in fp32, such as the routers of DeepSeek's experts."""
    plan, names = model._get_dtype_plan(dtype), {weight: name for name, weight in model.named_parameters()}
    for weight in [weight for module in modules for weight in module.parameters(recurse=False)]:
        kept = (wide for part, wide in plan.items() if re.search(part.replace("*", ".*"), names[weight]))
        weight.data = weight.data.to(next(kept, dtype))


def cast_buffers(model: Any, target: TargetConfig, dtype: torch.dtype) -> None:
    """Give the buffers of a loaded model the dtypes that the model makes them in for weights of `dtype`: rotary
    frequencies stay in fp32, and XGLM's positions do not."""
    floating = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if all("inv_freq" in name for name in floating):
        return
    made = dict(empty_model(target, dtype=dtype).named_buffers())
    for name in floating:
        if name in made and made[name].dtype != model.get_buffer(name).dtype:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = model.get_buffer(name).to(made[name].dtype)


def empty_model(target: TargetConfig, *, dtype: torch.dtype | None = None) -> Any:
    """A model with shapes but no weights, on torch's meta device. Args: dtype: None: its config's.

    Raises: BadInput if there is no such model; whatever the code of a model raises that cannot be built so.
    """
    config = read_model_config(target)
    given = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"), quiet_loading():
        model = model_class(config).from_config(config, trust_remote_code=is_trusted(target), **given)
    model.generation_config = stored_generation(target) or model.generation_config
    return model


def model_class(config: Any) -> Any:
    """The class that loads a model's weights: a causal language model, or a multimodal one with such a model inside."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in WHOLE
    return AutoModelForCausalLM if is_causal or config.get_text_config() is config else AutoModelForImageTextToText


def text_decoder(model: Any) -> Any:
    """The part of a model that reads text: embedding, layers and final norm, without the output layer."""
    decoder = model.get_decoder()
    if decoder is model.get_output_embeddings():  # which ModernBERT calls so
        return model.base_model
    return getattr(model, "model", decoder) if decoder is model else decoder


def drop_other_modalities(model: Any) -> None:
    """Remove the models of images and sound that a multimodal model has inside, as its vision tower."""
    decoder, inside = text_decoder(model), model.base_model
    while inside is not decoder and inside is not model:
        parts = dict(inside.named_children())
        inside_next = next((part for part in parts.values() if any(own is decoder for own in part.modules())), decoder)
        for name, part in parts.items():
            if isinstance(part, PreTrainedModel) and part is not inside_next:
                setattr(inside, name, None)
        inside = inside_next


def restore_other_modalities(model: Any, whole: Any, device: torch.device) -> None:
    """Undo `drop_other_modalities`, with the parts of another copy of the model."""
    for path, part in list(whole.named_modules()):
        owner, _, name = path.rpartition(".")
        if path and getattr(model.get_submodule(owner), name, part) is None:
            setattr(model.get_submodule(owner), name, part.to(device).eval().requires_grad_(False))
