"""A target without its layers: what heads read of it when the states of its layers were extracted before.

The embedding, the final norm and the output layer are read from the checkpoint by the names that transformers' own
loading gives its tensors. On a CPU they stay in the files as far as possible: only the pages that are used take memory.
"""

from typing import Any, NoReturn, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer

from ...configs.errors import BadInput, first_line
from ..loading import TargetConfig, empty_model, found_path, quantization, quiet_loading, read_model_config, torch_dtype
from ..target import Target
from .check import find_output_use
from .output_use import parts_beside
from .parts import OutputUse
from .stored import DTYPES, StoredTensor, fingerprint_of_stored, stored_tensors

PLAIN = ("F64", "F32", "F16", "BF16")  # weights that are not quantised


class NeedsLayers(BadInput):
    """A target cannot be loaded without its layers."""


class BareTarget(Target):
    """A target of which the embedding, the final norm, the output layer and what stands before it have weights."""

    @classmethod
    def read(cls, source: TargetConfig, use: OutputUse | None = None) -> Self:
        """Read these parts of a checkpoint, on the CPU.

        Args: source: its `device_map` does not count. use: of the output layer, as the whole target was found to; None:
            it is found here, see `find_output_use`.
        Raises: NeedsLayers if these parts cannot be read alone, or the use cannot be found; BadInput if there is no
            such model, or it is damaged.
        """
        path, wanted, config = found_path(source.path), torch_dtype(source.dtype), read_model_config(source)
        stored = stored_tensors(path, revision=source.revision)
        kinds = (DTYPES[each.dtype] for each in stored.values() if each.dtype in PLAIN)
        dtype = config.dtype or next(kinds, None)
        try:
            model = empty_model(source, dtype=dtype)
            with torch.device("meta"), quiet_loading():
                fingerprint = fingerprint_of_stored(stored, num_layers=config.get_text_config().num_hidden_layers)
                target = cls(model, name=source.path, fingerprint=fingerprint, source=source)
            target._use(use)
            with quiet_loading():
                target._read(stored, dtype)
        except BadInput:
            raise
        except Exception as error:  # whatever the code of an unknown model raises
            raise NeedsLayers(f"{type(error).__name__}: {first_line(error)}") from error
        if isinstance(wanted, torch.dtype):
            for parameter in model.parameters():
                parameter.data = parameter.data.to(wanted)
        if use is None:
            try:
                find_output_use(target)
            except Exception as error:  # as above
                raise NeedsLayers(f"how it uses its output layer is not found: {first_line(error)}") from error
        return target

    def _use(self, use: OutputUse | None) -> None:
        self.undecodable = "it was loaded without its layers"
        self.beside: list[nn.Module] = [] if use else parts_beside(self)  # of which one may be `before_output`
        if use is not None:
            self.logit_scale, self.caps_wide = use.logit_scale, use.caps_wide
            self.before_output = None if use.before_output is None else self.model.get_submodule(use.before_output)

    @property
    def parts(self) -> list[nn.Module]:
        """Those with weights."""
        parts = self.input_embedding, self.final_norm, self.before_output, *self.beside, self.output_layer
        return [part for part in parts if part is not None]

    def _read(self, stored: dict[str, StoredTensor], dtype: torch.dtype | None) -> None:
        """Give the parts their weights. Raises: NeedsLayers if the checkpoint has none for one of them."""
        plain = {name: each for name, each in stored.items() if each.dtype in PLAIN}
        missing = self._load(plain, dtype, None)
        if missing and quantization(self.model.config) is not None:
            quantizer = AutoHfQuantizer.from_config(self.model.config.quantization_config, pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True)
            quantizer.preprocess_model(model=self.model, dtype=dtype, device_map=None)
            self.output_layer = self.model.get_output_embeddings()
            missing = self._load(stored, dtype, quantizer)
        if missing:
            raise NeedsLayers(f"no weights for {missing[0]} under a known name")
        self._finish()
        self.model.eval().requires_grad_(False)

    def _load(self, stored: dict[str, StoredTensor], dtype: torch.dtype | None, quantizer: Any) -> list[str]:
        """Give the parts those of their weights that are still missing; returns the names of those that are so then."""
        model, state = self.model, self.model.state_dict(keep_vars=True)
        of_parts = {id(value) for part in self.parts for value in part.state_dict(keep_vars=True).values()}
        named = {name for name, value in state.items() if id(value) in of_parts}  # a tied one has two names
        wanted = {name for name in named if state[name].device.type == "meta"}
        mapping: Any = get_model_conversion_mapping(model, None, quantizer)
        by_name = {name: name_in_model(name, model, mapping, state) for name in stored}
        chosen = {name: stored[name] for name, found in by_name.items() if found in wanted}
        opened = {file: safe_open(file, framework="pt") for file in {each.file for each in chosen.values()}}
        slices = {name: opened[each.file].get_slice(name) for name, each in chosen.items()}
        plan = model._get_dtype_plan(dtype)
        how = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=mapping, hf_quantizer=quantizer)
        loaded, _ = convert_and_load_state_dict_in_model(model, slices, how)
        if loaded.mismatched_keys:
            name, found, expected = next(iter(loaded.mismatched_keys))
            raise BadInput(f"target {self.name}: tensor {name}: expected {tuple(expected)}, found {tuple(found)}")
        model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
        state = model.state_dict(keep_vars=True)
        return sorted(name for name in wanted & state.keys() if state[name].device.type == "meta")

    def _finish(self) -> None:
        """What transformers does behind loading weights: compute the buffers that no checkpoint has, such as the scale
        of Gemma's embedding, and what a model makes of the weights that it loaded."""
        owners = {}
        for owner in self.model.modules():  # a model before those inside it
            if isinstance(owner, PreTrainedModel):
                owners |= dict.fromkeys(owner.modules(), owner)
        for module in {module: None for part in self.parts for module in part.modules()}:
            for name, value in list(module.named_buffers(recurse=False)):
                if value.device.type == "meta":
                    module._buffers[name] = torch.empty_like(value, device="cpu")
            with torch.no_grad(), init.guard_torch_init_functions():  # which spare loaded weights
                owners[module]._initialize_weights(module, self.model.is_custom_code())

    def to(self, device: str | torch.device) -> Self:
        device = torch.device(device)
        for part in self.parts:
            part.to("cpu" if device.type == "cpu" else device)  # to `cpu:0` it would be a copy
        return self

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BadInput(f"target {self.name}: it was loaded without its layers, so it cannot read tokens")

    def read_texts(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.forward()


def name_in_model(name: str, model: Any, mapping: list[Any], state: dict[str, Tensor]) -> str:
    """The name that transformers' loading gives a stored tensor, of which it makes that weight or a part of it."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix
    found, _ = rename_source_key(name, renamings, converters, prefix, state)
    if found not in state and name in state:
        found, _ = rename_source_key(name, [], [], prefix, state)
    return found
