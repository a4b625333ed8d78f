"""Low-rank adapters (LoRA, Hu et al. 2022) by peft: on a head's own layers, merged when saved, or on the target's.

peft is imported where adapters are made, and nowhere else. Adapters that are served on the target, which are merged
into it when it is loaded, are another thing: targets/served_adapter.py.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..base.errors import BadInput
from .target import Target
from .weights.served_adapter import PREFIX, WEIGHTS

ADAPTER = "default"  # what peft calls the only adapter of a module


def add_adapters(module: nn.Module, *, rank: int, alpha: float, outputs: Sequence[Tensor], key: str) -> None:
    """Freeze a module and put a trainable adapter on each linear layer except output layers.

    An adapter adds alpha / rank * B A x; B starts as zeros.

    Args: outputs: the weights of output layers. key: config key of the rank, for messages.
    Raises: BadInput if peft is missing, or the module already has adapters or has no layer for them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # imported only where it is used
    except ImportError as error:
        raise BadInput(f"{key} {rank}: needs the package peft (pip install peft)") from error
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    without = [name for name, layer in linear.items() if any(layer.weight is weight for weight in outputs)]
    if adapted_layers(module) or any(isinstance(part, TargetAdapter) for part in module.modules()):
        raise BadInput(f"{key} {rank}: this {type(module).__name__} has adapters already")
    scale: Any = alpha  # peft annotates an int and takes any number
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules="all-linear", exclude_modules=without or None)
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        raise BadInput(f"{key} {rank}: {type(module).__name__} has no linear layer to adapt") from error


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that `add_adapters` wrapped, by name."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "base_layer")}


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state dict with each adapter merged into its layer, under the names of the unadapted module."""
    layers = adapted_layers(module)
    for name, layer in layers.items():
        plain = copy.deepcopy(layer.base_layer)
        plain.weight.data += layer.get_delta_weight(ADAPTER).detach().to(plain.weight)
        module.set_submodule(name, plain)
    try:
        return module.state_dict()
    finally:
        for name, layer in layers.items():
            module.set_submodule(name, layer)


class TargetAdapter(nn.Module):
    """Adapters on each linear layer of a target except its output layer, owned by the head that trains them (Medusa-2).

    The target computes with them; its own weights do not change. The fp32 tensors `{layer}.lora_A.weight` and
    `{layer}.lora_B.weight` are shared with the target's layers, not copies.

    Raises: BadInput if peft is missing or the target already has adapters.
    """

    def __init__(self, target: Target, *, rank: int, alpha: float):
        super().__init__()
        outputs = [target.output_layer.weight]
        add_adapters(target.model, rank=rank, alpha=alpha, outputs=outputs, key="head.target_lora_rank")
        target.is_adapted = True
        adapted = adapted_layers(target.model)
        self.layers_of_target = list(adapted.values())  # in a list, so that they are not registered as submodules
        for name, layer in adapted.items():
            place: nn.Module = self
            for part in name.split("."):
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.add_module("lora_A", layer.lora_A[ADAPTER])
            place.add_module("lora_B", layer.lora_B[ADAPTER])
        self.float()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the target computes without the adapters."""
        trained = [parameter.requires_grad for parameter in self.parameters()]
        for layer in self.layers_of_target:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers_of_target:
                layer.enable_adapters(True)
            for parameter, flag in zip(self.parameters(), trained, strict=True):  # enable_adapters changes the flags
                parameter.requires_grad_(flag)


def write_adapter(tensors: dict[str, Tensor], target: Target, folder: Path) -> None:
    """Write a target's adapter in peft's format, for `PeftModel.from_pretrained`.

    Args: tensors: those of a `TargetAdapter`, under its names.
    """
    from peft import LoraConfig

    ours = target.model.peft_config[ADAPTER]
    LoraConfig(
        r=ours.r,
        lora_alpha=ours.lora_alpha,
        target_modules=sorted(ours.target_modules),
        base_model_name_or_path=target.name,
        task_type="CAUSAL_LM",
        inference_mode=True,
    ).save_pretrained(str(folder))
    save_file({PREFIX + name: value for name, value in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors that `write_adapter` wrote, under the names of a `TargetAdapter`; empty if there are none."""
    path = folder / WEIGHTS
    return {name.removeprefix(PREFIX): value for name, value in load_file(path).items()} if path.is_file() else {}
