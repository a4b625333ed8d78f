"""Reading chosen tensors of a checkpoint into a model on the meta device, by the names that transformers' own loading
gives them. On a CPU they stay in the files as far as possible: only the pages that are used take memory."""

from collections.abc import Iterable
from typing import Any

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

from ...base.errors import BadInput
from .stored import StoredTensor


class WeightReader:
    """A checkpoint's tensors on their way into a model without weights."""

    def __init__(
        self,
        model: Any,
        stored: dict[str, StoredTensor],
        *,
        name: str,
        dtype: torch.dtype | None,
        device: str | torch.device = "cpu",
        quantizer: Any = None,
    ):
        """Args: name: of the target, for messages. dtype: that transformers reads plain weights in. quantizer: of a
        checkpoint that is stored quantised, which has prepared the model."""
        self.model, self.stored, self.name, self.device = model, stored, name, device
        self.mapping: Any = get_model_conversion_mapping(model, None, quantizer)
        plan, places = model._get_dtype_plan(dtype), {"": str(device)}
        self.how = LoadStateDictConfig(
            dtype=dtype, dtype_plan=plan, device_map=places, weight_mapping=self.mapping, hf_quantizer=quantizer
        )
        state = model.state_dict(keep_vars=True)
        self.names = {stored_name: name_in_model(stored_name, model, self.mapping, state) for stored_name in stored}

    def read(self, modules: Iterable[nn.Module], *, ties: bool) -> list[str]:
        """Give modules those of their own weights that are still missing; returns the names of those that are so then.

        Args: modules: without those inside them. ties: whether weights that were read stand for those that are tied to
        them. Raises: BadInput if one has another shape than the model's.
        """
        state = self.model.state_dict(keep_vars=True)
        own = {id(value) for module in modules for value in (*module._parameters.values(), *module._buffers.values())}
        named = {name for name, value in state.items() if id(value) in own}  # a tied one has two names
        wanted = {name for name in named if not is_read(state[name])}
        chosen = {name: self.stored[name] for name, place in self.names.items() if place in wanted}
        opened = {file: safe_open(file, framework="pt") for file in {tensor.file for tensor in chosen.values()}}
        slices = {name: opened[tensor.file].get_slice(name) for name, tensor in chosen.items()}
        loaded, _ = convert_and_load_state_dict_in_model(self.model, slices, self.how)
        if loaded.mismatched_keys:
            name, actual, expected = next(iter(loaded.mismatched_keys))
            raise BadInput(f"target {self.name}: tensor {name}: expected {tuple(expected)}, found {tuple(actual)}")
        if ties:
            self.model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
        state = self.model.state_dict(keep_vars=True)
        return sorted(name for name in wanted & state.keys() if is_left_out(state[name]))

    def finish(self, modules: Iterable[nn.Module]) -> None:
        """What transformers does behind loading weights: compute the buffers that no checkpoint has, such as the scale
        of Gemma's embedding, and what a model makes of the weights that it loaded."""
        owners = {}
        for owner in self.model.modules():  # a model before those inside it
            if isinstance(owner, PreTrainedModel):
                owners |= dict.fromkeys(owner.modules(), owner)
        for module in modules:
            make_room(module, module._buffers, self.device)
            with torch.no_grad(), init.guard_torch_init_functions():  # which spare loaded weights
                owners[module]._initialize_weights(module, self.model.is_custom_code())


def make_room(module: nn.Module, names: Iterable[str], device: str | torch.device) -> None:
    """Replace those of a module's own buffers that are on the meta device by ones with memory and no values yet."""
    for name in list(names):
        value = module._buffers[name]
        if value is not None and value.device.type == "meta":
            module._buffers[name] = torch.empty_like(value, device=device)


def is_read(value: Tensor) -> bool:
    """Whether it is from a checkpoint. Not being on the meta device is no proof: some models draw weights elsewhere."""
    return getattr(value, "_is_hf_initialized", False)


def is_left_out(value: Tensor) -> bool:
    return value.device.type == "meta" or (isinstance(value, nn.Parameter) and not is_read(value))


def name_in_model(name: str, model: Any, mapping: list[Any], state: dict[str, Tensor]) -> str:
    """The weight of the model that transformers makes of a stored tensor of this name, alone or with others."""
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    prefix = model.base_model_prefix
    renamed, _ = rename_source_key(name, renamings, converters, prefix, state)
    if renamed not in state and name in state:
        renamed, _ = rename_source_key(name, [], [], prefix, state)
    return renamed
