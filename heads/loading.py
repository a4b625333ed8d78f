"""Loading a target from disk or the hub (path, config, dtype, device, fingerprint), and locating its parts."""

import gc
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from ..configs.errors import BadInput, first_line
from ..configs.files import LocalPath
from .importing.gguf import gguf_folder
from .nn.cpu_kernels import multiplies_bf16


@dataclass(kw_only=True)
class TargetConfig:
    """Which frozen model to load."""

    path: LocalPath  # local folder, hub id or GGUF file
    dtype: str = "auto"  # float32, bfloat16, float16, or auto (as stored)
    # for a target too large for one GPU, as Accelerate takes it: `auto` spreads its layers over all GPUs of the machine
    # and then over host memory, for a single process; None: each process loads it on its own device
    device_map: str | dict[str, str | int] | None = None
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
            what = "no config.json in it" if Path(path).is_dir() else "no such folder"
            raise BadInput(f"target {path}: {what}")
    return path


def read_model_config(target: TargetConfig) -> Any:
    """The Hugging Face config of a model, without its weights. Raises BadInput if it cannot be loaded."""
    path, revision = found_path(target.path), target.revision
    try:
        with quiet_loading():
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=target.trust_remote_code)
    except Exception as error:  # as in load_model
        raise BadInput(f"target {path}: {first_line(error)}") from error


def load_tokenizer(target: TargetConfig) -> Any:
    """A model's tokenizer, without its weights. Raises BadInput if it cannot be loaded."""
    path, revision = found_path(target.path), target.revision
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=target.trust_remote_code)
    except Exception as error:
        raise BadInput(f"tokenizer of {path}: {first_line(error)}") from error


def quantization(config: Any) -> str | None:
    """The quantisation method of a model's stored weights, as its config names it; None: not quantised."""
    method = getattr(config, "quantization_config", None)
    method = method if isinstance(method, dict) or method is None else method.to_dict()
    return None if method is None else str(method.get("quant_method"))


def release_memory() -> None:
    """Free GPU memory that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def default_device() -> str:
    """cuda where there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(path: str | Path, device: str) -> str:
    """The dtype to measure a target in by default: as stored on a GPU; on a CPU float32, or bfloat16 if the weights are
    stored in 16 bits and the processor has bf16 instructions."""
    if device != "cpu":
        return "auto"
    is_narrow = read_model_config(TargetConfig(path=str(path))).get_text_config().dtype in (
        torch.bfloat16,
        torch.float16,
    )
    return "bfloat16" if is_narrow and multiplies_bf16() else "float32"


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


def fingerprint_of(model: nn.Module) -> str:
    """32 hex digits of sha256 over names, shapes and 64 evenly spread values of each parameter, as stored."""
    from accelerate.utils import align_module_device

    sampled: dict[str, tuple[Any, bytes]] = {}
    for place, module in model.named_modules():
        with align_module_device(module):  # loads offloaded weights
            for name, value in module.named_parameters(recurse=False):
                spread = value.detach().flatten()[:: max(1, value.numel() // 64)][:64]
                sampled[f"{place}.{name}".lstrip(".")] = tuple(value.shape), spread.float().cpu().numpy().tobytes()
    names = {name for name, _ in model.named_parameters()}  # tied parameters count once, under their first name
    digest = hashlib.sha256()
    for name in sorted(names):
        shape, values = sampled[name]
        digest.update(f"{name} {shape}".encode())
        digest.update(values)
    return digest.hexdigest()[:32]


def load_model(target: TargetConfig, *, device: str | torch.device | None = None) -> tuple[Any, str]:
    """Load a Hugging Face causal language model; returns it and the fingerprint of its weights.

    Args: device: ignored if the config has a device_map.
    Raises: BadInput if there is no such model or device, or the checkpoint lacks weights.
    """
    path, wanted, config = target.path, torch_dtype(target.dtype), read_model_config(target)
    if target.device_map is not None and isinstance(wanted, torch.dtype) and wanted != config.get_text_config().dtype:
        raise BadInput(f"target.dtype {target.dtype}: with target.device_map weights stay as stored: leave it at auto")
    try:
        with quiet_loading():
            loaded: Any = model_class(config).from_pretrained(
                path,
                config=config,
                dtype="auto",  # as stored: the fingerprint must not depend on the dtype that the run asks for
                output_loading_info=True,
                device_map=target.device_map,
                revision=target.revision,
                trust_remote_code=target.trust_remote_code,
                use_safetensors=True,  # no pickles, which can run code
            )
        model, info = loaded
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, safetensors' own ...
        raise BadInput(f"target {path}: {first_line(error)}") from error
    if info["missing_keys"]:
        raise BadInput(f"target {path}: weights missing in the checkpoint: {sorted(info['missing_keys'])[:3]} ...")
    drop_other_modalities(model)
    fingerprint = fingerprint_of(model)
    if target.device_map is not None:
        return model, fingerprint
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:  # no such device, none in this build, too little memory
        raise BadInput(f"device {device}: {first_line(error)}") from error
    if isinstance(wanted, torch.dtype):
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay in fp32
            parameter.data = parameter.data.to(wanted)
    return model, fingerprint


def model_class(config: Any) -> Any:
    """The class that loads a model's weights: a causal language model, or a multimodal one with such a model inside."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal or config.get_text_config() is config else AutoModelForImageTextToText


def text_decoder(model: Any) -> Any:
    """The part of a model that reads text: embedding, layers and final norm, without the output layer."""
    decoder = model.get_decoder()
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


LAYER_LISTS = ("layers", "h", "blocks")  # names of the list of decoder layers in Hugging Face models


class FrozenModel:
    """A Hugging Face causal language model in evaluation mode, and its parts under uniform names."""

    def __init__(
        self, model: Any, *, name: str, fingerprint: str, tokenizer: Any = None, source: TargetConfig | None = None
    ):
        """Args: source: the config that it was loaded by. Raises: BadInput if no decoder layers are found."""
        self.model = model.eval().requires_grad_(False)
        self.name, self.fingerprint = name, fingerprint
        self._tokenizer, self._source = tokenizer, source or TargetConfig(path=name)
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.base = text_decoder(model)
        lists = (getattr(self.base, attribute, None) for attribute in LAYER_LISTS)
        layers = next((modules for modules in lists if isinstance(modules, nn.ModuleList)), None)
        if layers is None:
            raise BadInput(f"target {name}: no decoder layers found under {', '.join(LAYER_LISTS)}")
        self.layers: nn.ModuleList = layers
        self.num_layers = len(layers)  # not what the config says: LongCat's has two entries per layer
        norms = (module for key, module in self.base.named_children() if "norm" in key or key == "ln_f")
        self.final_norm: nn.Module | None = next(norms, None)
        self.output_layer: nn.Linear = model.get_output_embeddings()
        self.input_embedding: nn.Module = model.get_input_embeddings()
        self.vocab_size: int = self.output_layer.weight.shape[0]
        self.logit_scale = 1.0
        caps = (getattr(self.config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
        self.logit_cap: float | None = next((cap for cap in caps if cap), None)
        has_window = any("sliding" in kind for kind in self.layer_types or ["sliding_attention"])
        self._window: int | None = getattr(self.config, "sliding_window", None) if has_window else None
        has_chunks = "chunked_attention" in self.layer_types
        self.chunk: int | None = getattr(self.config, "attention_chunk_size", None) if has_chunks else None

    @property
    def tokenizer(self) -> Any:
        """The target's own tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(replace(self._source, path=self.name))
        return self._tokenizer

    @property
    def is_spread(self) -> bool:
        """Whether its layers are on several devices, or offloaded to host memory or disk."""
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1

    @property
    def device(self) -> torch.device:
        """The device of its inputs and outputs, also for a target on several devices."""
        if not self.is_spread:
            return self.output_layer.weight.device
        devices = [device for device in self.model.hf_device_map.values() if device not in ("cpu", "disk")]
        return torch.device(devices[0] if devices else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.output_layer.weight.dtype

    @property
    def max_positions(self) -> int:
        """The context window in tokens: rotary frequencies that change beyond some length (longrope) end it there, as
        else the longest text of a batch, or a draft, would change the states of the others."""
        whole = getattr(self.config, "max_position_embeddings", None) or 2**31 - 1
        return min(whole, self.rotary_change or whole)

    @property
    def rotary_change(self) -> int | None:
        """The length in tokens beyond which the rotary frequencies are others; None: they are the same everywhere."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            if kind.get("rope_type") == "longrope":
                return kind.get("original_max_position_embeddings") or self.config.original_max_position_embeddings
        return None

    @property
    def context(self) -> str:
        """`max_positions` in words, for messages."""
        why = "" if self.rotary_change is None else ", where its rotary frequencies change (longrope)"
        return f"{self.max_positions}{why}"

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer, from the generation config, else the model config."""
        for config in (self.model.generation_config, self.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return frozenset(eos if isinstance(eos, list) else [eos])
        return frozenset()

    @property
    def layer_types(self) -> list[str]:
        """The attention type of each layer, in Hugging Face's terms; empty if the config does not list them."""
        return getattr(self.config, "layer_types", None) or []

    def as_logits(self, values: Tensor) -> Tensor:
        """The output layer's values [..., V] as the model's logits: scaled, and capped in fp32, where it does that."""
        values = values if self.logit_scale == 1 else values * self.logit_scale
        cap = self.logit_cap
        return values if cap is None else torch.tanh(values.float() / cap) * cap

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, the query's own included; None: it has full attention."""
        return self._window if not self.layer_types or "sliding" in self.layer_types[layer] else None

    def to(self, device: str | torch.device) -> Self:
        """Move the weights, unless they are spread over devices; returns itself."""
        if not self.is_spread:
            self.model.to(device)
        return self
